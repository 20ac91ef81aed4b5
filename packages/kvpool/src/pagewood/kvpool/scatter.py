"""Reads and writes scattered rows of an array, addressed by page or by page and offset.

On a CPU this uses numpy, which copies each contiguous run at once. torch copies element by element, which was measured
to be three to four times slower. On other devices it uses torch. Both take the same index.
"""

from typing import Any

import numpy as np
import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ScatteredRows:
    """A view of an array whose first axes are indexed by the result of `index_pages` or `locate_slots`.

    Invariant: rows are moved as bits, so any dtype works and the bits of a NaN do not change.
    """

    __slots__ = ("_bits", "_dtype")

    def __init__(self, array: torch.Tensor) -> None:
        """Make a view of `array`, which is not copied."""
        self._bits = _movable(array)  # contents written by: write
        self._dtype = array.dtype

    def write(self, index: Any, values: torch.Tensor) -> None:
        """Write rows, given in the array's dtype. If a row occurs twice, either of its values may remain."""
        self._bits[index] = _movable(values)

    def zero(self, index: Any) -> None:
        """Fill rows with zeros."""
        self._bits[index] = 0

    def read(self, index: Any) -> torch.Tensor:
        """Return copies of rows."""
        bits = self._bits[index]
        return (bits if isinstance(bits, torch.Tensor) else torch.as_tensor(bits)).view(self._dtype)


def index_pages(pages: torch.Tensor, *, num_pages: int) -> Any:
    """Return an index for pages; `pages` may have any integer type.

    Raises:
        IndexError: A page is not in [0, num_pages). To check this on a GPU would mean to wait for it. There a negative
            id is replaced by `num_pages`, so that the use of a wrong id triggers a device-side assertion.
    """
    return _checked(pages, num_pages, "pages")


def locate_slots(slots: torch.Tensor, *, page_size: int, num_pages: int) -> Any:
    """Return an index by page and offset for slots; `slots` may have any integer type.

    Raises:
        IndexError: A slot is not in [0, num_pages * page_size). For a GPU see `index_pages`.
    """
    index = _checked(slots, num_pages * page_size, "slots")
    pages = index // page_size
    return pages, index - pages * page_size


def _checked(ids: torch.Tensor, limit: int, name: str) -> Any:
    if ids.device.type != "cpu":
        # torch would count a negative index from the end.
        ids = ids.long()
        return ids.masked_fill(ids < 0, limit)
    index: Any = ids.numpy().astype(np.int64)
    if len(index) and index.view(np.uint64).max() >= limit:
        wrong = index[(index < 0) | (index >= limit)]
        raise IndexError(f"{name} must be in [0, {limit}), got {wrong[0]}")
    return index


def _movable(array: torch.Tensor) -> Any:
    """Return a view of an array as integers of the same size: of numpy on a CPU, of torch elsewhere."""
    bits = array.view(_BITS[array.dtype.itemsize])
    return bits.numpy() if bits.device.type == "cpu" else bits
