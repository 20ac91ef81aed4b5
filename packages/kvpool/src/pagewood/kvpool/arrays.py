"""The arrays that a page holds for one layer: name, dtype and shape."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageArray:
    """One array of one layer in one page. It is C-contiguous within the page.

    Attributes:
        name: Name of the array in its layout.
        dtype: A key of `ITEM_BYTES`: the name of a torch dtype.
        shape: Shape in one page, every axis >= 1.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        if not self.shape or min(require_whole("shape", axis) for axis in self.shape) < 1:
            raise ValueError(f"shape must have at least one axis, each >= 1, got {self.shape}")

    @property
    def num_bytes(self) -> int:
        """Size of the array in one page of one layer, in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the axes within a page, in elements."""
        return tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))


def total_bytes(num_layers: int, arrays: Iterable[PageArray]) -> int:
    """Return the size of one page over all layers, in bytes."""
    return num_layers * sum(array.num_bytes for array in arrays)


def pages_within(num_bytes: int, bytes_per_page: int) -> int:
    """Return the number of pages that fit into `num_bytes`.

    Raises:
        ValueError: `num_bytes` is less than one page, or not an integer.
    """
    if require_whole("num_bytes", num_bytes) < bytes_per_page:
        raise ValueError(f"num_bytes must be >= {bytes_per_page}, the bytes of one page, got {num_bytes}")
    return num_bytes // bytes_per_page


def require_whole(name: str, value: object) -> int:
    """Return an integer of Python or numpy as an int.

    Raises:
        ValueError: `value` is anything else, such as a float or a bool.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be an integer, got {value!r:.80}")
    return int(value)


def check_at_least_one(**sizes: int) -> None:
    """Raise a ValueError that names the first size that is below 1 or not an integer."""
    for name, value in sizes.items():
        if require_whole(name, value) < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")


def check_dtype(dtype: str) -> None:
    """Raise a ValueError if `dtype` is not a key of `ITEM_BYTES`."""
    if dtype not in ITEM_BYTES:
        raise ValueError(f"dtype must be one of {', '.join(ITEM_BYTES)}, got {dtype!r}")
