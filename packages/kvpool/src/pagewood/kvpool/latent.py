"""The page layout of multi-head latent attention (MLA)."""

from dataclasses import dataclass

from pagewood.kvpool.arrays import PageArray, check_at_least_one, check_dtype, pages_within, total_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentLayout:
    """One compressed vector for the keys and values of all heads, and one rotated key that all heads share.

    Invariant: one layer of a pool is one C-contiguous array `latent [pages, P, C + R]` with P = page_size, C =
    latent_dim, R = rope_dim. The compressed part of a token comes first, its rotated part second. FlashMLA reads this
    array as it is; FlashInfer's MLA kernels take it as two views `[pages, P, C]` and `[pages, P, R]`.

    In int8, each part of a token has its own scale, in a float32 array `latent_scales [pages, P, 2]`. A value is its
    code times its scale.

    Source: DeepSeek-AI, DeepSeek-V2, 2024, section 2.1.

    Attributes:
        num_layers: Layers of the model, >= 1.
        latent_dim: Elements of the compressed part, >= 1 (`kv_lora_rank`).
        rope_dim: Elements of the rotated part, >= 1 (`qk_rope_head_dim`).
        page_size: Token positions in a page, >= 1.
        dtype: "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2" or "int8".
    """

    num_layers: int
    latent_dim: int
    rope_dim: int
    page_size: int
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_at_least_one(
            num_layers=self.num_layers, latent_dim=self.latent_dim, rope_dim=self.rope_dim, page_size=self.page_size
        )
        check_dtype(self.dtype)

    @property
    def arrays(self) -> tuple[PageArray, ...]:
        """`latent`, followed by the scales in int8."""
        shape = (self.page_size, self.latent_dim + self.rope_dim)
        latent = PageArray(name="latent", dtype=self.dtype, shape=shape)
        scales = PageArray(name="latent_scales", dtype="float32", shape=(self.page_size, 2))
        return (latent, scales) if self.dtype == "int8" else (latent,)

    @property
    def bytes_per_page(self) -> int:
        """Size of one page over all layers, scales included, in bytes."""
        return total_bytes(self.num_layers, self.arrays)

    def pages_for(self, num_bytes: int) -> int:
        """Return the number of pages, with all layers, that fit into `num_bytes`.

        Raises:
            ValueError: `num_bytes` is less than one page.
        """
        return pages_within(num_bytes, self.bytes_per_page)
