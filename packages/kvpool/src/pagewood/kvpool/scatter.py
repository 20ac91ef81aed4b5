"""Reading and writing scattered rows of an array, by page or by page and offset.

On a CPU numpy does it: it copies each contiguous run at once, where torch copies number by number (measured three to
four times slower). Elsewhere torch does it. Both are indexed alike.
"""

from typing import Any

import numpy as np
import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ScatteredRows:
    """An array, not a copy, whose first axes are indexed by the result of `index_pages` or `locate_slots`.

    Invariant: only bits are moved, so that every dtype can be, and a NaN stays the same NaN.
    """

    __slots__ = ("_bits", "_dtype")

    def __init__(self, array: torch.Tensor) -> None:
        self._bits = _movable(array)  # contents written by: write
        self._dtype = array.dtype

    def write(self, index: Any, values: torch.Tensor) -> None:
        """Write rows, given in the array's dtype; which of the values for one row twice remains is open."""
        self._bits[index] = _movable(values)

    def zero(self, index: Any) -> None:
        """Fill rows with zeros."""
        self._bits[index] = 0

    def read(self, index: Any) -> torch.Tensor:
        """Return copies of rows."""
        bits = self._bits[index]
        return (bits if isinstance(bits, torch.Tensor) else torch.as_tensor(bits)).view(self._dtype)


def index_pages(pages: torch.Tensor, *, num_pages: int) -> Any:
    """Return an index of pages, which are of any integer type.

    Raises:
        IndexError: A page is not in [0, num_pages). A GPU would have to be waited for: there the index is made one past
            the end, so that its use is a device-side assertion.
    """
    return _checked(pages, num_pages, "pages")


def locate_slots(slots: torch.Tensor, *, page_size: int, num_pages: int) -> Any:
    """Return an index by page and offset of slots, which are of any integer type.

    Raises:
        IndexError: A slot is not in [0, num_pages * page_size); on a GPU see `index_pages`.
    """
    index = _checked(slots, num_pages * page_size, "slots")
    pages = index // page_size
    return pages, index - pages * page_size


def _checked(ids: torch.Tensor, limit: int, name: str) -> Any:
    if ids.device.type != "cpu":
        # A negative index would count from the end.
        ids = ids.long()
        return ids.masked_fill(ids < 0, limit)
    index: Any = ids.numpy().astype(np.int64)
    if len(index) and index.view(np.uint64).max() >= limit:
        wrong = index[(index < 0) | (index >= limit)]
        raise IndexError(f"{name} must be in [0, {limit}), got {wrong[0]}")
    return index


def _movable(array: torch.Tensor) -> Any:
    """Return a view of an array as integers of its size, of numpy on a CPU."""
    bits = array.view(_BITS[array.dtype.itemsize])
    return bits.numpy() if bits.device.type == "cpu" else bits
