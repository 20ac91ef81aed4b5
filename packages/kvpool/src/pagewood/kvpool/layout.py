"""What a page is: its shape, its bytes, and how many fit."""

from dataclasses import dataclass
from typing import Literal, Protocol

_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class KVLayout(Protocol):
    """What must be known of a page to size a pool of them."""

    @property
    def num_layers(self) -> int:
        """Layers whose KV one page holds."""
        ...

    @property
    def page_size(self) -> int:
        """Token positions in a page."""
        ...

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers."""
        ...

    def pages_for(self, num_bytes: int) -> int:
        """Return how many pages fit into `num_bytes`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiHeadLayout:
    """Keys and values of every KV head, for multi-head and grouped-query attention.

    Invariant: one layer of a pool is one C-contiguous array, and a page is contiguous in it. Its axes are FlashInfer's,
    so that FlashInfer's kernels read it in place. With P = page_size, H = num_kv_heads, D = head_dim:

    | order | axes of one layer | strides in elements |
    |---|---|---|
    | NHD | page, K or V, offset, head, dim: `[pages, 2, P, H, D]` | 2PHD, PHD, HD, D, 1 |
    | HND | page, K or V, head, offset, dim: `[pages, 2, H, P, D]` | 2PHD, PHD, PD, D, 1 |

    NHD writes all heads of a token in one run; HND lets a kernel read all tokens of one head in one run.

    Attributes:
        num_layers: Layers of the model, >= 1.
        num_kv_heads: Heads of K and V in a layer, >= 1.
        head_dim: Elements of a head, >= 1.
        page_size: Token positions in a page, >= 1.
        dtype: "float32", "float16" or "bfloat16".
        order: "NHD" or "HND".
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str = "float32"
    order: Literal["NHD", "HND"] = "NHD"

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "page_size"):
            value: int = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        if self.dtype not in _ITEM_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(_ITEM_BYTES)}, got {self.dtype!r}")
        if self.order not in ("NHD", "HND"):
            raise ValueError(f"order must be NHD or HND, got {self.order!r}")

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers, K and V."""
        elements = self.num_layers * 2 * self.page_size * self.num_kv_heads * self.head_dim
        return elements * _ITEM_BYTES[self.dtype]

    @property
    def strides(self) -> tuple[int, int, int, int, int]:
        """Strides of one layer's axes, in elements."""
        row = (self.page_size if self.order == "HND" else self.num_kv_heads) * self.head_dim
        half = self.page_size * self.num_kv_heads * self.head_dim
        return (2 * half, half, row, self.head_dim, 1)

    def shape(self, num_pages: int) -> tuple[int, int, int, int, int]:
        """Return the shape of one layer of a pool of `num_pages` pages."""
        if self.order == "HND":
            return (num_pages, 2, self.num_kv_heads, self.page_size, self.head_dim)
        return (num_pages, 2, self.page_size, self.num_kv_heads, self.head_dim)

    def pages_for(self, num_bytes: int) -> int:
        """Return how many pages fit into `num_bytes`, counting all layers.

        Raises:
            ValueError: `num_bytes` is negative.
        """
        if num_bytes < 0:
            raise ValueError(f"num_bytes must be >= 0, got {num_bytes}")
        return num_bytes // self.bytes_per_page
