"""The set of page ids that the tree holds."""

import numpy as np
import numpy.typing as npt

from pagewood.radixcache.arrays import Int32

_FEW = 32
"""Up to this many ids, a loop over Python ints is faster than calls of numpy."""
_MANY, _DENSE = 4096, 16
"""From _MANY ids on, in a range of up to _DENSE times as many, counting finds repeated ids faster than sorting."""
_GROWTH = 4096
"""The flags grow by multiples of this, which is a page of memory: what no id needs is not touched."""
_RUN = 512
"""Of at least _MANY ids, those in runs of _RUN on average are adopted as slices, which are faster than an index."""


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
        if self._adopt_runs(pages):
            return
        lowest, highest, is_distinct = _range(pages)
        if lowest < 0:
            raise ValueError(f"pages must be >= 0, got page {lowest}")
        self._reserve(highest + 1)
        index = pages.astype(np.intp)
        if np.count_nonzero(self._is_held[index]):
            _sorted(pages)
            first = next(page for page in pages.tolist() if self._flags[page])
            raise ValueError(f"pages must not be in the tree already, got page {first}")
        within = slice(lowest, highest + 1)
        num_held = 0 if is_distinct else np.count_nonzero(self._is_held[within])
        self._is_held[index] = True
        if not is_distinct and np.count_nonzero(self._is_held[within]) - num_held < len(pages):
            self._is_held[index] = False
            _sorted(pages)

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

    def _adopt_runs(self, pages: Int32) -> bool:
        """Add pages and return True; return False, with nothing changed, if one is wrong or they are not in a few runs.

        The pages of a long new prompt are often consecutive, but for what shorter requests have left between them.
        """
        runs = _runs(pages)
        if not runs:
            return False
        self._reserve(runs[-1][1])
        previous = 0
        for start, end in runs:
            if start < previous or self._flags.find(1, start, end) >= 0:
                return False
            previous = end
        for start, end in runs:
            self._is_held[start:end] = True
        return True

    def _reserve(self, num_flags: int) -> None:
        """Make room for the ids below `num_flags`; the flags grow in place where the C library can do it."""
        if num_flags > len(self._flags):
            more = bytes(-(-num_flags // _GROWTH) * _GROWTH - len(self._flags))
            del self._is_held  # while there is a view, the bytes cannot grow
            try:
                self._flags.extend(more)
            finally:
                self._is_held = np.frombuffer(self._flags, np.bool_)

    def __len__(self) -> int:
        return int(np.count_nonzero(self._is_held))


def _runs(pages: Int32) -> list[tuple[int, int]]:
    """Return the ranges `[start, end)` of consecutive ids that the pages are, sorted; empty if these are short."""
    first, last = int(pages[0]), int(pages[-1])
    if last - first == len(pages) - 1 and not np.count_nonzero(pages[1:] <= pages[:-1]):
        return [(first, last + 1)]
    if len(pages) < _MANY:
        return []
    is_break = pages[1:] - pages[:-1] != 1
    if np.count_nonzero(is_break) >= len(pages) // _RUN:
        return []
    runs = [(int(run[0]), int(run[-1]) + 1) for run in np.split(pages, np.flatnonzero(is_break) + 1)]
    return sorted(runs) if sum(end - start for start, end in runs) == len(pages) else []


def _range(pages: Int32) -> tuple[int, int, bool]:
    """Return the lowest page, the highest page, and whether all pages are known to be distinct.

    Raises:
        ValueError: a page occurs twice; not always found here.
    """
    if not np.count_nonzero(pages[1:] <= pages[:-1]):
        return int(pages[0]), int(pages[-1]), True
    if len(pages) >= _MANY:
        lowest, highest = int(pages.min()), int(pages.max())
        if highest - lowest < _DENSE * len(pages):
            return lowest, highest, False
    ordered = _sorted(pages)
    return int(ordered[0]), int(ordered[-1]), True


def _sorted(pages: Int32) -> Int32:
    """Return the pages in ascending order.

    Raises:
        ValueError: a page occurs twice.
    """
    ordered = np.sort(pages)
    is_twice = ordered[1:] == ordered[:-1]
    if np.count_nonzero(is_twice):
        raise ValueError(f"pages must be distinct, got page {ordered[1:][is_twice][0]} twice")
    return ordered


def grown(flags: npt.NDArray[np.bool_], num_flags: int) -> npt.NDArray[np.bool_]:
    """Return `flags` with False appended: at least `num_flags` in total, and at least twice as many as before."""
    larger = np.zeros(max(num_flags, 2 * len(flags)), np.bool_)
    larger[: len(flags)] = flags
    return larger
