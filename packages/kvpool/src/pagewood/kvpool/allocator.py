"""The list of free pages: hands out page ids and takes them back."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewood.kvpool.arrays import require_whole
from pagewood.kvpool.runs import Part, as_index, parts_of, taken

# Up to this many pages, a loop over Python ints is faster than calls of numpy.
_FEW = 16
_INT32 = np.dtype(np.int32)
# Page ids are int32.
_MAX_PAGES = 2**31 - 1


class OutOfPages(Exception):
    """More pages were requested than are free; no page was allocated.

    Attributes:
        requested: Number of pages requested.
        available: Number of pages that were free and not reserved.
    """

    def __init__(self, requested: int, available: int) -> None:
        super().__init__(f"requested {requested} pages, {available} are free")
        self.requested = requested
        self.available = available


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moves:
    """A plan that moves held pages to free places, so that the held pages lie together.

    The moves are independent: any of them may be left out, and their order does not matter, because no page is both a
    source and a destination.

    Attributes:
        src: `[n] int32`, ids of held pages, ascending.
        dst: `[n] int32`, ids of free pages, ascending, each smaller than its source.
    """

    src: NDArray[np.int32]
    dst: NDArray[np.int32]


class PageAllocator:
    """Hands out the page ids 0 .. num_pages-1, each to one holder at a time.

    Invariant: every page is either held, or free, or was freed inside an open `batched_frees` block.

    `alloc` costs one copy of the ids and `free` a few passes over them, whatever the size of the pool. The pages that
    were freed last are handed out first, in the order in which they were freed: their memory is the most likely to be
    in a cache, and consecutive pages of a request stay consecutive. Not thread-safe.

    The free pages form a stack, and `_position` gives the place in the stack where a page would be. A page is free if
    and only if the stack holds it at that place. So `alloc` need not mark the pages that it hands out: the old entries
    that it leaves behind do no harm.

    Source: Briggs and Torczon, An Efficient Representation for Sparse Sets, 1993.
    """

    __slots__ = (
        "_batch_depth", "_first", "_num_pages", "_num_parked", "_num_reserved", "_position", "_position_items",
        "_stack", "_stack_items",
    )  # fmt: skip

    def __init__(self, num_pages: int) -> None:
        """Create an allocator with every page free; the first pages handed out are 0, 1, 2, ...

        Args:
            num_pages: Number of pages, in [1, 2**31).

        Raises:
            ValueError: `num_pages` is not an integer, or out of range.
        """
        self._num_pages = num_pages = _checked_num_pages(num_pages)  # written by: resize
        # _stack[_first:] are the free pages, in the order in which they will be handed out. _stack[:_num_parked] were
        # freed in an open batch. The entries between them are stale; there are as many of them as held pages.
        self._stack = np.arange(
            num_pages, dtype=np.int32
        )  # written by: _restack, _push, _free_few, batched_frees, move
        self._position = np.arange(
            num_pages, dtype=np.int32
        )  # written by: _restack, _push, _free_few, batched_frees, move
        # Views of these two whose items are Python ints, for a few pages at a time.
        self._stack_items = self._stack.data  # written by: _restack
        self._position_items = self._position.data  # written by: _restack
        self._first = 0  # written by: _restack, alloc, _push, _free_few, batched_frees
        self._num_parked = 0  # written by: _push, _free_few, batched_frees
        self._num_reserved = 0  # written by: reserve, unreserve
        self._batch_depth = 0  # written by: batched_frees

    @property
    def num_pages(self) -> int:
        """Number of pages, held or free."""
        return self._num_pages

    @property
    def num_free(self) -> int:
        """Number of pages that `alloc` can hand out now.

        Pages that are reserved, or were freed inside an open `batched_frees` block, do not count.
        """
        return self._num_pages - self._first - self._num_reserved

    @property
    def num_reserved(self) -> int:
        """Number of free pages that `alloc` does not hand out."""
        return self._num_reserved

    def alloc(
        self,
        n: int,
        *,
        out: NDArray[np.int32] | None = None,
        evict: Callable[[int], NDArray[np.int32]] | None = None,
    ) -> NDArray[np.int32]:
        """Hand out `n` pages; the caller holds them until it frees them.

        To serve many requests, make one call for the sum of their needs and split the result.

        Args:
            n: Number of pages, at least 0.
            out: `[n] int32`, the array to write the ids to, for instance the end of a row. If None, a new array is
                made.
            evict: Called with the number of pages that are lacking, if any; returns pages that their holder gives up,
                which become free. The `evict` of a prefix cache is one.

        Returns:
            `[n] int32`, distinct page ids. The array belongs to the caller.

        Raises:
            OutOfPages: Fewer than `n` pages are free, evicted ones included. No page is allocated.
            ValueError: `n` is negative or not an integer, or `out` is not `[n] int32`. No page is allocated.
        """
        if type(n) is not int:
            n = require_whole("n", n)
        if n < 0:
            raise ValueError(f"n must be >= 0, got {n}")
        last = self._num_pages - self._num_reserved
        if self._first + n > last and evict is not None:
            self.free(evict(self._first + n - last))
        first = self._first
        end = first + n
        if end > last:
            raise OutOfPages(requested=n, available=last - first)
        pages = self._stack[first:end]
        if out is None:
            out = pages.copy()
        elif isinstance(out, np.ndarray) and out.dtype == _INT32 and out.shape == (n,):  # pyright: ignore[reportUnnecessaryIsInstance]
            out[:] = pages
        else:
            raise ValueError(f"out must be int32 of shape ({n},), got {out!r:.80}")
        self._first = end
        return out

    def free(self, pages: NDArray[np.int32]) -> None:
        """Take pages back.

        Args:
            pages: `[n] int32`, distinct ids of held pages, in any order.

        Raises:
            ValueError: `pages` is not such an array. The message names the lowest wrong page id. No page is freed.
        """
        is_vector = type(pages) is np.ndarray and pages.dtype == _INT32 and pages.ndim == 1
        if is_vector and pages.size <= _FEW and self._free_few(pages.tolist()):
            return
        parts = parts_of(pages, self._num_pages)
        if len(pages) > self._first - self._num_parked:
            raise ValueError(self._complaint(pages))
        for ids, index in parts:
            if not self._all_held(ids, index):
                raise ValueError(self._complaint(pages))
        if not self._push(pages, parts):
            raise ValueError(self._complaint(pages))

    @contextmanager
    def batched_frees(self) -> Generator[None]:
        """Make the pages that are freed inside the block available only when the block ends.

        `free` checks the pages at once, as it does outside the block. They become available at the end of the block,
        even if the block ends with an exception. In nested blocks this is the end of the outermost one. Use it around a
        step whose kernels still read pages that the host has already given up.
        """
        self._batch_depth += 1
        try:
            yield
        finally:
            self._batch_depth -= 1
            if not self._batch_depth and self._num_parked:
                first = self._first - self._num_parked
                parked = self._stack[: self._num_parked].copy()
                self._stack[first : self._first] = parked
                self._position[parked.astype(np.intp)] = np.arange(first, self._first, dtype=np.int32)
                self._first, self._num_parked = first, 0

    def reserve(self, n: int) -> None:
        """Set `n` free pages aside, for instance for requests that are admitted but have not grown yet.

        Only the number is set aside, not particular pages; `unreserve` makes it available to `alloc` again.

        Args:
            n: Number of pages, at least 0.

        Raises:
            OutOfPages: Fewer than `n` pages are free. No page is reserved.
            ValueError: `n` is negative or not an integer.
        """
        n = require_whole("n", n)
        if n < 0:
            raise ValueError(f"n must be >= 0, got {n}")
        if n > self.num_free:
            raise OutOfPages(requested=n, available=self.num_free)
        self._num_reserved += n

    def unreserve(self, n: int) -> None:
        """Make `n` reserved pages available to `alloc` again.

        Args:
            n: Number of pages, in [0, num_reserved].

        Raises:
            ValueError: `n` is out of range or not an integer.
        """
        n = require_whole("n", n)
        if not 0 <= n <= self._num_reserved:
            raise ValueError(f"n must be in [0, num_reserved = {self._num_reserved}], got {n}")
        self._num_reserved -= n

    def held_pages(self) -> NDArray[np.int32]:
        """Return the ids of all held pages, for audits. Reads the whole pool.

        Returns:
            `[num_held] int32`, ascending.
        """
        is_held = np.ones(self._num_pages, dtype=np.bool_)
        is_held[self._stack[self._first :]] = False
        is_held[self._stack[: self._num_parked]] = False
        return np.flatnonzero(is_held).astype(np.int32)

    def resize(self, num_pages: int) -> None:
        """Change the number of pages. Pages below the new number keep their holders. Reads the whole pool.

        New pages are handed out after the pages that are already free.

        Args:
            num_pages: New number of pages, in [1, 2**31).

        Raises:
            ValueError: `num_pages` is out of range or not an integer, or a page with an id >= `num_pages` is not free,
                or fewer free pages would remain than are reserved. Nothing changes. `plan_moves(num_pages)` plans how
                to empty the end of the pool.
        """
        num_pages = _checked_num_pages(num_pages)
        free, parked = self._stack[self._first :], self._stack[: self._num_parked]
        kept = free[free < num_pages]
        num_busy = (self._num_pages - num_pages) - (len(free) - len(kept))
        if num_pages < self._num_pages and num_busy:
            raise ValueError(f"num_pages must cut off only free pages, got {num_pages} with {num_busy} pages not free")
        free = np.concatenate((kept, np.arange(self._num_pages, num_pages, dtype=np.int32)))
        if len(free) < self._num_reserved:
            raise ValueError(f"num_pages must leave {self._num_reserved} free pages for reservations, got {num_pages}")
        self._num_pages = num_pages
        self._restack(free, parked)

    def plan_moves(self, num_pages: int | None = None) -> Moves:
        """Plan the fewest moves that bring all held pages below `num_pages`. Changes nothing. Reads the whole pool.

        To carry out a plan: copy the pages (`KVStorage.copy_pages`), rewrite every table that names them, then call
        `move`. Pages that were freed in an open `batched_frees` block are neither moved nor used as destinations.

        Args:
            num_pages: Pages with an id >= `num_pages` are to be emptied. If None, the lowest number that has room for
                all pages that are not free.

        Returns:
            The plan.

        Raises:
            ValueError: `num_pages` is not an integer in [0, num_pages of the pool], or there are too few free pages
                below it.
        """
        if num_pages is None:
            num_pages = self._first
        num_pages = require_whole("num_pages", num_pages)
        if not 0 <= num_pages <= self._num_pages:
            raise ValueError(f"num_pages must be in [0, {self._num_pages}], got {num_pages}")
        held = self.held_pages()
        src = held[np.searchsorted(held, num_pages) :]
        free = self._stack[self._first :]
        dst = np.sort(free[free < num_pages])[: len(src)]
        if len(dst) < len(src):
            raise ValueError(f"num_pages must have {len(src)} free pages below it, got {num_pages} with {len(dst)}")
        return Moves(src=src, dst=dst)

    def move(self, moves: Moves) -> None:
        """Record that pages have moved: each `dst` is now held instead of its `src`, and each `src` is free.

        Args:
            moves: A plan from `plan_moves`, or part of one.

        Raises:
            ValueError: A source is not held, a destination is not free, or an id occurs twice. Nothing changes.
        """
        src, dst = as_index(moves.src), as_index(moves.dst)
        if len(src) != len(dst) or len(np.unique(np.concatenate((src, dst)))) != 2 * len(src):
            raise ValueError("moves must have distinct pages, one destination for each source")
        if not self._all_held(moves.src, src):
            raise ValueError(self._complaint(moves.src))
        if dst.max(initial=0) >= self._num_pages:
            raise ValueError(f"destinations must be in [0, {self._num_pages}), got page {dst.max()}")
        position = self._position[dst]
        is_free = (position >= self._first) & (self._stack[position] == moves.dst)
        if not is_free.all():
            raise ValueError(f"destinations must be free, got page {moves.dst[~is_free].min()}")
        self._stack[position] = moves.src
        self._position[src] = position

    def _free_few(self, pages: list[int]) -> bool:
        """Take pages back and return True; return False, with nothing changed, if one of them is wrong."""
        stack, position, first, num_parked = self._stack_items, self._position_items, self._first, self._num_parked
        n, num_pages = len(pages), self._num_pages
        if n > first - num_parked or len(set(pages)) < n:
            return False
        for page in pages:
            if not 0 <= page < num_pages:
                return False
            place = position[page]
            if (place >= first or place < num_parked) and stack[place] == page:
                return False  # free, or parked
        place = num_parked if self._batch_depth else first - n
        for page in pages:
            position[page] = place
            stack[place] = page
            place += 1
        if self._batch_depth:
            self._num_parked = place
        else:
            self._first = first - n
        return True

    def _all_held(self, pages: NDArray[np.int32], index: NDArray[np.intp] | slice) -> bool:
        """Return whether all pages are held; `index` is `pages` in the type of an index."""
        try:
            position = self._position[index]
        except IndexError:
            return False
        is_live = position >= self._first
        if self._num_parked:
            is_live |= position < self._num_parked
        elif 1 not in is_live.tobytes():
            return True  # as after an `alloc` below which nothing was freed
        return not np.count_nonzero(is_live & (taken(self._stack, position) == pages))

    def _push(self, pages: NDArray[np.int32], parts: list[Part]) -> bool:
        """Put held pages on the stack, or among the parked pages in an open batch.

        Returns:
            False if the pages are not distinct; then nothing that counts has changed.
        """
        start = self._num_parked if self._batch_depth else self._first - len(pages)
        end = start + len(pages)
        place = start
        for ids, index in parts:
            if isinstance(index, slice):
                np.add(ids, np.int32(place - index.start), out=self._position[index])
            else:
                position = np.arange(place, place + len(ids), dtype=_INT32)
                self._position[index] = position
                # A page that occurs twice has kept one of its positions. The stack is unchanged: all are still held.
                if self._position[index].tobytes() != position.tobytes():
                    return False
            place += len(ids)
        self._stack[start:end] = pages
        if self._batch_depth:
            self._num_parked = end
        else:
            self._first = start
        return True

    def _restack(self, free: NDArray[np.int32], parked: NDArray[np.int32]) -> None:
        """Rebuild the stack for a pool of `_num_pages` pages; pages that are neither free nor parked are held."""
        num_parked, num_pages = len(parked), self._num_pages
        first = num_pages - len(free)
        self._stack = np.concatenate((parked, np.zeros(first - num_parked, dtype=np.int32), free))
        self._position = np.zeros(num_pages, dtype=np.int32)
        self._position[parked] = np.arange(num_parked, dtype=np.int32)
        self._position[free] = np.arange(first, num_pages, dtype=np.int32)
        self._stack_items, self._position_items = self._stack.data, self._position.data
        self._first = first

    def _complaint(self, pages: NDArray[np.int32]) -> str:
        """Return what is wrong with the ids; at least one of them is not held or occurs twice."""
        previous = -1
        for page in np.sort(pages):
            if not 0 <= page < self._num_pages:
                return f"pages must be in [0, {self._num_pages}), got page {page}"
            if page == previous:
                return f"pages must be distinct, got page {page} twice"
            one = np.array([page], dtype=np.int32)
            if not self._all_held(one, as_index(one)):
                return f"pages must be held, got page {page}, which is free"
            previous = page
        raise AssertionError("every page is held and distinct")


def _checked_num_pages(num_pages: int) -> int:
    num_pages = require_whole("num_pages", num_pages)
    if not 1 <= num_pages <= _MAX_PAGES:
        raise ValueError(f"num_pages must be in [1, {_MAX_PAGES}], got {num_pages}")
    return num_pages
