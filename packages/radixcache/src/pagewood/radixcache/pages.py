"""The set of page ids that the tree holds."""

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pagewood.radixcache.arrays import Int32

_FEW = 16
"""Up to this many ids, a loop over Python ints is faster than calls of numpy."""
_NUM_MARKS = 255
_MOST = _NUM_MARKS**2
_MARKS = np.arange(1, _NUM_MARKS + 1, dtype=np.uint8)
_ROUNDS = np.tile(_MARKS, _NUM_MARKS), np.repeat(_MARKS, _NUM_MARKS)
"""Two marks for each of up to _MOST ids. Within _NUM_MARKS ids the first marks differ; any two ids differ in one of
both."""
_MANY, _RUN = 4096, 512
"""From _MANY ids on, ids in runs of _RUN on average are adopted as slices, which are faster than an index."""
_GROWTH = 4096
"""The marks grow by multiples of this, which is a page of memory, so memory that no id needs is not touched."""
_NO_MARKS = np.zeros(0, np.uint8)
_INTP, _UINT32 = np.dtype(np.intp), np.dtype(np.uint32)


class PageSet:
    """A set of page ids, stored as one byte per id up to the largest id seen: a mark, or 0 for an id not in the set.

    Invariant: it holds exactly the ids that were adopted and not dropped since; `_marks` is a view of `_bytes`.

    Ids that are adopted together get different marks. So an id that occurs twice is found without sorting: it has kept
    the last of its marks.
    """

    __slots__ = ("_bytes", "_marks")

    def __init__(self) -> None:
        self._bytes = bytearray(1024)  # written by: adopt, drop
        self._marks: npt.NDArray[np.uint8] = np.frombuffer(self._bytes, np.uint8)  # written by: adopt, drop

    def __contains__(self, page: int) -> bool:
        return 0 <= page < len(self._bytes) and bool(self._bytes[page])

    def adopt(self, pages: Int32) -> None:
        """Add pages that are not in the set yet.

        Args:
            pages: `[n] int32`, distinct page ids.

        Raises:
            ValueError: a page id is negative, occurs twice, or is in the set already. The set is then unchanged.
        """
        num = len(pages)
        if num <= _FEW:
            if self._adopt_few(pages.tolist()):
                return
        elif num > _NUM_MARKS and self._adopt_runs(pages):
            return
        index = pages.view(_UINT32).astype(_INTP)  # negative ids become larger than any page
        if num > _MOST or not self._adopt_distinct(index):
            self._require_new(pages)
            self._reserve(int(pages.max()) + 1)
            self._marks[index] = 1

    def drop(self, pages: Int32) -> None:
        """Remove pages that are in the set.

        Args:
            pages: `[n] int32`, page ids.
        """
        self._marks[pages.astype(_INTP)] = 0

    def _adopt_few(self, pages: list[int]) -> bool:
        """Add pages and return True; return False, with nothing changed, if one is wrong or beyond the marks."""
        marks = self._bytes
        if pages and (min(pages) < 0 or max(pages) >= len(marks)):
            return False
        for count, page in enumerate(pages):
            if marks[page]:
                for added in pages[:count]:
                    marks[added] = 0
                return False
            marks[page] = 1
        return True

    def _adopt_distinct(self, index: npt.NDArray[np.intp]) -> bool:
        """Add up to _MOST pages and return True; return False, with nothing changed, if one is wrong or has no mark."""
        marks, num = self._marks, len(index)
        try:
            if marks[index].tobytes() != bytes(num):
                return False
        except IndexError:
            return False
        for of_round in _ROUNDS if num > _NUM_MARKS else _ROUNDS[:1]:
            new = of_round[:num]
            marks[index] = new
            if marks[index].tobytes() != new.tobytes():
                marks[index] = 0
                return False
        return True

    def _adopt_runs(self, pages: Int32) -> bool:
        """Add pages and return True; return False, with nothing changed, if one is wrong or they are not in a few runs.

        The pages of a long new prompt are often consecutive, except for gaps that shorter requests have left.
        """
        runs = _runs(pages)
        if not runs:
            return False
        self._reserve(runs[-1][1])
        previous = 0
        for start, end in runs:
            if start < previous or not self._bytes.startswith(bytes(end - start), start):
                return False
            previous = end
        for start, end in runs:
            self._marks[start:end] = 1
        return True

    def _require_new(self, pages: Int32) -> None:
        """Raise the ValueError of `adopt` for the first reason that applies, if any."""
        ordered = np.sort(pages)
        is_twice = ordered[1:] == ordered[:-1]
        if np.count_nonzero(is_twice):
            raise ValueError(f"pages must be distinct, got page {ordered[1:][is_twice][0]} twice")
        if ordered[0] < 0:
            raise ValueError(f"pages must be >= 0, got page {ordered[0]}")
        known = pages[pages < len(self._marks)]
        is_held = self._marks[known] > 0
        if np.count_nonzero(is_held):
            raise ValueError(f"pages must not be in the tree already, got page {known[is_held][0]}")

    def _reserve(self, num_marks: int) -> None:
        """Make room for the ids below `num_marks`; the marks grow in place where the C library can do it."""
        if num_marks > len(self._bytes):
            more = bytes(-(-num_marks // _GROWTH) * _GROWTH - len(self._bytes))
            self._marks = _NO_MARKS  # while there is a view, the bytes cannot grow
            try:
                self._bytes.extend(more)
            finally:
                self._marks = np.frombuffer(self._bytes, np.uint8)

    def __len__(self) -> int:
        return int(np.count_nonzero(self._marks))


def _runs(pages: Int32) -> list[tuple[int, int]]:
    """Return the ranges `[start, end)` of consecutive ids that the pages are, sorted; empty if these are short."""
    num, first = len(pages), int(pages[0])
    if int(pages[-1]) - first == num - 1 and 1 not in (pages[1:] <= pages[:-1]).tobytes():
        return [(first, first + num)]
    if num < _MANY:
        return []
    cuts = np.flatnonzero(pages[1:] - pages[:-1] != 1)
    if len(cuts) >= num // _RUN:
        return []
    lasts = [*cuts.tolist(), num - 1]
    runs = [(int(pages[before + 1]), int(pages[last]) + 1) for before, last in pairwise([-1, *lasts])]
    runs.sort()
    return runs if sum(end - start for start, end in runs) == num else []


def grown(flags: npt.NDArray[np.bool_], num_flags: int) -> npt.NDArray[np.bool_]:
    """Return `flags` with False appended: at least `num_flags` in total, and at least twice as many as before."""
    larger = np.zeros(max(num_flags, 2 * len(flags)), np.bool_)
    larger[: len(flags)] = flags
    return larger
