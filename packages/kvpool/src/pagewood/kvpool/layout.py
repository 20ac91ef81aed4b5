"""What a page is: its arrays, its bytes, and how many fit."""

from dataclasses import dataclass
from typing import Literal, Protocol

from pagewood.kvpool.arrays import PageArray, check_at_least_one, check_dtype, pages_within, total_bytes


class PageLayout(Protocol):
    """What must be known of a page to size a pool of them and to give it memory."""

    @property
    def num_layers(self) -> int:
        """Layers of which one page holds something."""
        ...

    @property
    def arrays(self) -> tuple[PageArray, ...]:
        """What a page holds of each layer."""
        ...

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers."""
        ...

    def pages_for(self, num_bytes: int) -> int:
        """Return how many pages fit into `num_bytes`."""
        ...


class KVLayout(PageLayout, Protocol):
    """A layout whose pages hold token positions."""

    @property
    def page_size(self) -> int:
        """Token positions in a page."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiHeadLayout:
    """Keys and values of every KV head, for multi-head and grouped-query attention.

    Invariant: an array of one layer of a pool is C-contiguous, and so is a page in it. Its axes are FlashInfer's, so
    that FlashInfer's kernels read it in place. With P = page_size, H = num_kv_heads, D = head_dim:

    | halves | order | arrays of a layer, of the whole pool | strides in elements |
    |---|---|---|---|
    | joint | NHD | `kv [pages, 2, P, H, D]` | 2PHD, PHD, HD, D, 1 |
    | joint | HND | `kv [pages, 2, H, P, D]` | 2PHD, PHD, PD, D, 1 |
    | pair | NHD | `k [pages, P, H, D]`, `v` alike | PHD, HD, D, 1 |
    | pair | HND | `k [pages, H, P, D]`, `v` alike | PHD, PD, D, 1 |

    NHD writes all heads of a token in one run; HND lets a kernel read all tokens of one head in one run. FlashInfer
    takes the joint array and the pair alike; kernels that take a tensor of keys and one of values want the pair.

    In int8, every head of a token has its own scale: a float32 array `kv_scales` (or `k_scales` and `v_scales`), whose
    axes are those of the codes without the last. A value is its code times its scale.

    Attributes:
        num_layers: Layers of the model, >= 1.
        num_kv_heads: Heads of K and V in a layer, >= 1.
        head_dim: Elements of a head, >= 1.
        page_size: Token positions in a page, >= 1.
        dtype: "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2" or "int8".
        order: "NHD" or "HND".
        halves: "joint", one array of keys and values, or "pair", one of each.
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
        """`kv`, or `k` and `v`; in int8 their scales after them."""
        tokens = (self.num_kv_heads, self.page_size) if self.order == "HND" else (self.page_size, self.num_kv_heads)
        heads = (2, *tokens) if self.halves == "joint" else tokens
        names = ("kv",) if self.halves == "joint" else ("k", "v")
        codes = [PageArray(name=name, dtype=self.dtype, shape=(*heads, self.head_dim)) for name in names]
        scales = [PageArray(name=f"{name}_scales", dtype="float32", shape=heads) for name in names]
        return (*codes, *scales) if self.dtype == "int8" else tuple(codes)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers, K and V, scales included."""
        return total_bytes(self.num_layers, self.arrays)

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the axes of one layer's `kv`, or of its `k` and `v`, in elements."""
        array = self.arrays[0]
        return (array.shape[0] * array.strides[0], *array.strides)

    def shape(self, num_pages: int) -> tuple[int, ...]:
        """Return the shape of one layer's `kv`, or of its `k` and `v`, in a pool of `num_pages` pages."""
        return (num_pages, *self.arrays[0].shape)

    def pages_for(self, num_bytes: int) -> int:
        """Return how many pages fit into `num_bytes`, counting all layers.

        Raises:
            ValueError: Not even one does.
        """
        return pages_within(num_bytes, self.bytes_per_page)
