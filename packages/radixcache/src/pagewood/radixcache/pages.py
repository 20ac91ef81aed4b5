"""Which pages the tree holds."""

import numpy as np
import numpy.typing as npt

from pagewood.radixcache.arrays import Int32


class PageSet:
    """A set of page ids as one byte per id up to the largest seen.

    Invariant: it holds the ids that were adopted and not dropped since.
    """

    __slots__ = ("_is_held",)

    def __init__(self) -> None:
        self._is_held: npt.NDArray[np.bool_] = np.zeros(1024, np.bool_)  # written by: adopt, drop, _grow

    def __contains__(self, page: int) -> bool:
        return 0 <= page < len(self._is_held) and bool(self._is_held[page])

    def adopt(self, pages: Int32) -> None:
        """Take in pages of which none is in the set.

        Args:
            pages: `[n] int32`, distinct page ids.

        Raises:
            ValueError: a page is negative, given twice or in the set; nothing is taken in.
        """
        index = pages.astype(np.intp)
        ordered = np.sort(index) if len(index) > 1 else index
        if len(index) and ordered[0] < 0:
            raise ValueError(f"pages must be >= 0, got page {ordered[0]}")
        if (ordered[1:] == ordered[:-1]).any():
            twice = int(ordered[1:][ordered[1:] == ordered[:-1]][0])
            raise ValueError(f"pages must be distinct, got page {twice} twice")
        if len(index) and ordered[-1] >= len(self._is_held):
            self._grow(int(ordered[-1]) + 1)
        held = self._is_held.take(index)
        if held.any():
            raise ValueError(f"pages must not be in the tree yet, got page {int(index[held][0])}, which is")
        self._is_held[index] = True

    def drop(self, pages: Int32) -> None:
        """Take out pages that are in the set: `[n] int32`."""
        self._is_held[pages.astype(np.intp)] = False

    def __len__(self) -> int:
        return int(np.count_nonzero(self._is_held))

    def _grow(self, num_ids: int) -> None:
        grown = np.zeros(max(num_ids, 2 * len(self._is_held)), np.bool_)
        grown[: len(self._is_held)] = self._is_held
        self._is_held = grown
