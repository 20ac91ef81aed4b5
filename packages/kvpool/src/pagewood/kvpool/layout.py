"""Page layouts: the arrays in a page, its size in bytes, and how many pages fit into a budget."""

from dataclasses import dataclass
from typing import Literal, Protocol

from pagewood.kvpool.arrays import PageArray, check_at_least_one, check_dtype, pages_within, total_bytes


class PageLayout(Protocol):
    """What a pool needs to know about a page in order to allocate memory for it."""

    @property
    def num_layers(self) -> int:
        """Number of layers that store something in a page."""
        ...

    @property
    def arrays(self) -> tuple[PageArray, ...]:
        """The arrays that a page holds for each layer."""
        ...

    @property
    def bytes_per_page(self) -> int:
        """Size of one page over all layers, in bytes."""
        ...

    def pages_for(self, num_bytes: int) -> int:
        """Return the number of pages that fit into `num_bytes`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiHeadLayout:
    """Keys and values of every KV head, for multi-head and grouped-query attention.

    Invariant: an array of one layer of a pool is C-contiguous, and so is each page in it. The order of the axes is
    FlashInfer's, so FlashInfer's kernels read it in place. With P = page_size, H = num_kv_heads, D = head_dim:

    | halves | order | arrays of one layer of a pool | strides in elements |
    |---|---|---|---|
    | joint | NHD | `kv [pages, 2, P, H, D]` | 2PHD, PHD, HD, D, 1 |
    | joint | HND | `kv [pages, 2, H, P, D]` | 2PHD, PHD, PD, D, 1 |
    | pair | NHD | `k [pages, P, H, D]`, `v` the same | PHD, HD, D, 1 |
    | pair | HND | `k [pages, H, P, D]`, `v` the same | PHD, PD, D, 1 |

    In NHD, all heads of a token are contiguous, so one write stores a token. In HND, all tokens of a head are
    contiguous, so one read fetches a head. FlashInfer accepts the joint array and the pair; kernels that take one
    tensor of keys and one of values need the pair.

    In int8, every head of a token has its own scale, in a float32 array `kv_scales` (or `k_scales` and `v_scales`) with
    the axes of the codes except the last. A value is its code times its scale.

    Attributes:
        num_layers: Layers of the model, >= 1.
        num_kv_heads: Heads of K and V in a layer, >= 1.
        head_dim: Elements of a head, >= 1.
        page_size: Token positions in a page, >= 1.
        dtype: "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2" or "int8".
        order: "NHD" or "HND".
        halves: "joint" for one array of keys and values, or "pair" for one array each.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str = "float32"
    order: Literal["NHD", "HND"] = "NHD"
    halves: Literal["joint", "pair"] = "joint"

    def __post_init__(self) -> None:
        check_at_least_one(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
        )
        check_dtype(self.dtype)
        if self.order not in ("NHD", "HND"):
            raise ValueError(f"order must be NHD or HND, got {self.order!r}")
        if self.halves not in ("joint", "pair"):
            raise ValueError(f"halves must be joint or pair, got {self.halves!r}")

    @property
    def arrays(self) -> tuple[PageArray, ...]:
        """`kv`, or `k` and `v`, followed by their scales in int8."""
        tokens = (self.num_kv_heads, self.page_size) if self.order == "HND" else (self.page_size, self.num_kv_heads)
        heads = (2, *tokens) if self.halves == "joint" else tokens
        names = ("kv",) if self.halves == "joint" else ("k", "v")
        codes = [PageArray(name=name, dtype=self.dtype, shape=(*heads, self.head_dim)) for name in names]
        scales = [PageArray(name=f"{name}_scales", dtype="float32", shape=heads) for name in names]
        return (*codes, *scales) if self.dtype == "int8" else tuple(codes)

    @property
    def bytes_per_page(self) -> int:
        """Size of one page over all layers, K and V, scales included, in bytes."""
        return total_bytes(self.num_layers, self.arrays)

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the axes of `kv` (or of `k` and `v`) in one layer of a pool, in elements."""
        array = self.arrays[0]
        return (array.shape[0] * array.strides[0], *array.strides)

    def shape(self, num_pages: int) -> tuple[int, ...]:
        """Return the shape of `kv` (or of `k` and `v`) in one layer of a pool of `num_pages` pages."""
        return (num_pages, *self.arrays[0].shape)

    def pages_for(self, num_bytes: int) -> int:
        """Return the number of pages, with all layers, that fit into `num_bytes`.

        Raises:
            ValueError: `num_bytes` is less than one page.
        """
        return pages_within(num_bytes, self.bytes_per_page)
