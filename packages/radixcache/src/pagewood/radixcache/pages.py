"""The set of page ids that the tree holds."""

import numpy as np
import numpy.typing as npt

from pagewood.radixcache.arrays import Int32


class PageSet:
    """A set of page ids, stored as one byte per id up to the largest id seen.

    Invariant: it holds exactly the ids that were adopted and not dropped since.
    """

    __slots__ = ("_is_held",)

    def __init__(self) -> None:
        self._is_held: npt.NDArray[np.bool_] = np.zeros(1024, np.bool_)  # written by: adopt, drop

    def __contains__(self, page: int) -> bool:
        return 0 <= page < len(self._is_held) and bool(self._is_held[page])

    def adopt(self, pages: Int32) -> None:
        """Add pages that are not in the set yet.

        Args:
            pages: `[n] int32`, distinct page ids.

        Raises:
            ValueError: a page id is negative, occurs twice, or is in the set already. The set is then unchanged.
        """
        index = pages.astype(np.intp)
        ordered = np.sort(index) if len(index) > 1 else index
        if len(index) and ordered[0] < 0:
            raise ValueError(f"pages must be >= 0, got page {ordered[0]}")
        if (ordered[1:] == ordered[:-1]).any():
            twice = int(ordered[1:][ordered[1:] == ordered[:-1]][0])
            raise ValueError(f"pages must be distinct, got page {twice} twice")
        if len(index) and ordered[-1] >= len(self._is_held):
            self._is_held = grown(self._is_held, int(ordered[-1]) + 1)
        held = self._is_held.take(index)
        if held.any():
            raise ValueError(f"pages must not be in the tree already, got page {int(index[held][0])}")
        self._is_held[index] = True

    def drop(self, pages: Int32) -> None:
        """Remove pages that are in the set.

        Args:
            pages: `[n] int32`, page ids.
        """
        self._is_held[pages.astype(np.intp)] = False

    def __len__(self) -> int:
        return int(np.count_nonzero(self._is_held))


def grown(flags: npt.NDArray[np.bool_], num_flags: int) -> npt.NDArray[np.bool_]:
    """Return `flags` with False appended: at least `num_flags` in total, and at least twice as many as before."""
    larger = np.zeros(max(num_flags, 2 * len(flags)), np.bool_)
    larger[: len(flags)] = flags
    return larger
