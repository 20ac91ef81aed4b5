"""The set of page ids that the tree holds."""

import numpy as np
import numpy.typing as npt

from pagewood.radixcache.arrays import Int32

_FEW = 64
"""Up to this many ids, a loop over Python ints is faster than calls of numpy."""


class PageSet:
    """A set of page ids, stored as one byte per id up to the largest id seen.

    Invariant: it holds exactly the ids that were adopted and not dropped since; `_is_held` is a view of `_flags`.
    """

    __slots__ = ("_flags", "_is_held")

    def __init__(self) -> None:
        self._flags = bytearray(1024)  # written by: adopt, drop
        self._is_held: npt.NDArray[np.bool_] = np.frombuffer(self._flags, np.bool_)  # written by: adopt, drop

    def __contains__(self, page: int) -> bool:
        return 0 <= page < len(self._flags) and bool(self._flags[page])

    def adopt(self, pages: Int32) -> None:
        """Add pages that are not in the set yet.

        Args:
            pages: `[n] int32`, distinct page ids.

        Raises:
            ValueError: a page id is negative, occurs twice, or is in the set already. The set is then unchanged.
        """
        if len(pages) <= _FEW and self._adopt_few(pages.tolist()):
            return
        index = pages.astype(np.intp)
        ordered = np.sort(index) if len(index) > 1 else index
        if len(index) and ordered[0] < 0:
            raise ValueError(f"pages must be >= 0, got page {ordered[0]}")
        if (ordered[1:] == ordered[:-1]).any():
            twice = int(ordered[1:][ordered[1:] == ordered[:-1]][0])
            raise ValueError(f"pages must be distinct, got page {twice} twice")
        if len(index) and ordered[-1] >= len(self._flags):
            larger = bytearray(max(int(ordered[-1]) + 1, 2 * len(self._flags)))
            larger[: len(self._flags)] = self._flags
            self._flags, self._is_held = larger, np.frombuffer(larger, np.bool_)
        held = self._is_held.take(index)
        if held.any():
            raise ValueError(f"pages must not be in the tree already, got page {int(index[held][0])}")
        self._is_held[index] = True

    def drop(self, pages: Int32) -> None:
        """Remove pages that are in the set.

        Args:
            pages: `[n] int32`, page ids.
        """
        if len(pages) <= _FEW:
            flags = self._flags
            for page in pages.tolist():
                flags[page] = 0
        else:
            self._is_held[pages.astype(np.intp)] = False

    def _adopt_few(self, pages: list[int]) -> bool:
        """Add pages and return True; return False, with nothing changed, if one is wrong or beyond the flags."""
        flags = self._flags
        if pages and (min(pages) < 0 or max(pages) >= len(flags)):
            return False
        for count, page in enumerate(pages):
            if flags[page]:
                for added in pages[:count]:
                    flags[added] = 0
                return False
            flags[page] = 1
        return True

    def __len__(self) -> int:
        return int(np.count_nonzero(self._is_held))


def grown(flags: npt.NDArray[np.bool_], num_flags: int) -> npt.NDArray[np.bool_]:
    """Return `flags` with False appended: at least `num_flags` in total, and at least twice as many as before."""
    larger = np.zeros(max(num_flags, 2 * len(flags)), np.bool_)
    larger[: len(flags)] = flags
    return larger
