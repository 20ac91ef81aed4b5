"""What a page holds of one layer: arrays, by name, type and shape."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageArray:
    """One array of one layer of one page; it is C-contiguous in every page.

    Attributes:
        name: What the layout calls it.
        dtype: One of `ITEM_BYTES`, by the name that torch has for it.
        shape: Of one page, every axis >= 1.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"shape must have axes, each >= 1, got {self.shape}")

    @property
    def num_bytes(self) -> int:
        """Bytes of it in one page of one layer."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of its axes within a page, in elements."""
        return tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))


def total_bytes(num_layers: int, arrays: Iterable[PageArray]) -> int:
    """Return the bytes of one page over all layers."""
    return num_layers * sum(array.num_bytes for array in arrays)


def pages_within(num_bytes: int, bytes_per_page: int) -> int:
    """Return how many pages fit into `num_bytes`.

    Raises:
        ValueError: Not even one does.
    """
    if num_bytes < bytes_per_page:
        raise ValueError(f"num_bytes must be >= {bytes_per_page}, the bytes of one page, got {num_bytes}")
    return num_bytes // bytes_per_page


def check_at_least_one(**sizes: int) -> None:
    """Raise a ValueError that names the first size below one."""
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")


def check_dtype(dtype: str) -> None:
    """Raise a ValueError unless the type is one of `ITEM_BYTES`."""
    if dtype not in ITEM_BYTES:
        raise ValueError(f"dtype must be one of {', '.join(ITEM_BYTES)}, got {dtype!r}")
