"""The free list: hands out page ids and takes them back."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Page ids are int32.
_MAX_PAGES = 2**31 - 1


class OutOfPages(Exception):
    """Fewer pages are free than were asked for; none was allocated.

    Attributes:
        requested: Pages asked for.
        available: Pages that were free and not reserved.
    """

    def __init__(self, requested: int, available: int) -> None:
        super().__init__(f"requested {requested} pages, {available} are free")
        self.requested = requested
        self.available = available


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moves:
    """Where held pages may go, so that the held pages lie together.

    Each move stands alone: any of them may be left out, and their order does not matter, because no page is both a
    source and a destination.

    Attributes:
        src: `[n] int32`, ascending ids of held pages.
        dst: `[n] int32`, ascending ids of free pages, each less than its source.
    """

    src: NDArray[np.int32]
    dst: NDArray[np.int32]


class PageAllocator:
    """Hands out the page ids 0 .. num_pages-1, each to one holder at a time.

    Invariant: every page is either held, free, or freed within an open `batched_frees` block.

    `alloc` costs a copy of the ids, `free` a few passes over them, whatever the size of the pool. Pages freed last are
    handed out first, in the order in which they were freed: their memory is the likeliest to be in a cache, and a
    request's run of consecutive pages stays a run. Not thread-safe.

    The free pages are a stack, and `_position` says where in it a page would be. A page is free exactly if the stack
    holds it there, so that `alloc` need not mark what it hands out: what it leaves behind is stale, and harmless.

    Source: Briggs and Torczon, An Efficient Representation for Sparse Sets, 1993.
    """

    __slots__ = ("_batch_depth", "_first", "_num_pages", "_num_parked", "_num_reserved", "_position", "_stack")

    def __init__(self, num_pages: int) -> None:
        """Make an allocator with every page free; the first pages handed out are 0, 1, 2, ...

        Raises:
            ValueError: `num_pages` is not in [1, 2**31).
        """
        _check_num_pages(num_pages)
        self._num_pages = num_pages  # written by: resize
        # _stack[_first:] is free, the next page first; _stack[:_num_parked] was freed in an open batch.
        # The rest is stale, and as long as the pages held.
        self._stack = np.arange(num_pages, dtype=np.int32)  # written by: _restack, _push, batched_frees, move
        self._position = np.arange(num_pages, dtype=np.int32)  # written by: _restack, _push, batched_frees, move
        self._first = 0  # written by: _restack, alloc, _push, batched_frees
        self._num_parked = 0  # written by: _push, batched_frees
        self._num_reserved = 0  # written by: reserve, unreserve
        self._batch_depth = 0  # written by: batched_frees

    @property
    def num_pages(self) -> int:
        """All pages, held or free."""
        return self._num_pages

    @property
    def num_free(self) -> int:
        """Pages that `alloc` can hand out now: neither reserved, nor freed within an open `batched_frees` block."""
        return self._num_pages - self._first - self._num_reserved

    @property
    def num_reserved(self) -> int:
        """Free pages that `alloc` does not hand out."""
        return self._num_reserved

    def alloc(self, n: int, *, out: NDArray[np.int32] | None = None) -> NDArray[np.int32]:
        """Hand out `n` pages; the caller holds them until it frees them.

        Many requests are served by one call with the sum of what they need, and shares of its result.

        Args:
            n: At least 0.
            out: `[n] int32`, where the ids go, for instance the end of a row; None: a new array.

        Returns:
            `[n] int32`, distinct page ids; the array is the caller's own.

        Raises:
            OutOfPages: Fewer than `n` pages are free; nothing is allocated.
            ValueError: `n` is negative, or `out` is not `[n] int32`; nothing is allocated.
        """
        end = self._first + n
        if n > self.num_free:
            raise OutOfPages(requested=n, available=self.num_free)
        if n < 0:
            raise ValueError(f"n must be >= 0, got {n}")
        pages = self._stack[self._first : end]
        if out is None:
            out = pages.copy()
        elif out.dtype == np.int32 and out.shape == (n,):
            out[:] = pages
        else:
            raise ValueError(f"out must be int32 of shape ({n},), got {out.dtype} of shape {out.shape}")
        self._first = end
        return out

    def free(self, pages: NDArray[np.int32]) -> None:
        """Take pages back.

        Args:
            pages: `[n] int32`, distinct ids of held pages, in any order.

        Raises:
            ValueError: `pages` is no such array. The message names the first wrong page in ascending order, and nothing
                is freed.
        """
        index = _index(pages)
        if len(index) > self._first - self._num_parked or not self._all_held(pages, index):
            raise ValueError(self._complaint(pages))
        if not self._push(pages, index):
            raise ValueError(self._complaint(pages))

    @contextmanager
    def batched_frees(self) -> Generator[None]:
        """Keep the pages that are freed inside the block from being handed out before it ends.

        They are checked at once as ever, and become free at the end of the block, also when it ends by an exception. A
        block within a block ends with the outer one. Use it around a step whose kernels still read pages that the host
        has already given up.
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
        """Keep `n` free pages from being handed out, for instance for requests that are admitted but not yet grown.

        Which pages they are is open until `unreserve` lets `alloc` have as many again.

        Raises:
            OutOfPages: Fewer than `n` pages are free; nothing is reserved.
            ValueError: `n` is negative.
        """
        if n > self.num_free:
            raise OutOfPages(requested=n, available=self.num_free)
        if n < 0:
            raise ValueError(f"n must be >= 0, got {n}")
        self._num_reserved += n

    def unreserve(self, n: int) -> None:
        """Let `alloc` hand out `n` reserved pages.

        Raises:
            ValueError: `n` is negative, or more than `num_reserved`.
        """
        if not 0 <= n <= self._num_reserved:
            raise ValueError(f"n must be in [0, num_reserved = {self._num_reserved}], got {n}")
        self._num_reserved -= n

    def held_pages(self) -> NDArray[np.int32]:
        """Return the ids of all held pages, for audits: this one reads the whole pool.

        Returns:
            `[num_held] int32`, ascending.
        """
        is_held = np.ones(self._num_pages, dtype=np.bool_)
        is_held[self._stack[self._first :]] = False
        is_held[self._stack[: self._num_parked]] = False
        return np.flatnonzero(is_held).astype(np.int32)

    def resize(self, num_pages: int) -> None:
        """Change how many pages there are; ids that remain keep their holders. Reads the whole pool.

        New pages are handed out after those that are free already.

        Raises:
            ValueError: `num_pages` is not in [1, 2**31), or fewer pages than are reserved would be free, or a page from
                `num_pages` on is not free: `plan_moves(num_pages)` says how to empty that tail. Nothing changes.
        """
        _check_num_pages(num_pages)
        free, parked = self._stack[self._first :], self._stack[: self._num_parked]
        kept = free[free < num_pages]
        num_busy = (self._num_pages - num_pages) - (len(free) - len(kept))
        if num_pages < self._num_pages and num_busy:
            raise ValueError(f"num_pages must leave only free pages behind, got {num_pages} with {num_busy} not free")
        free = np.concatenate((kept, np.arange(self._num_pages, num_pages, dtype=np.int32)))
        if len(free) < self._num_reserved:
            raise ValueError(f"num_pages must leave {self._num_reserved} reserved pages free, got {num_pages}")
        self._num_pages = num_pages
        self._restack(free, parked)

    def sort_free(self) -> None:
        """Hand out the lowest free pages first from now on, so that runs of free pages become runs of a request.

        Reads all free pages: for when an engine is idle, or after `move`.
        """
        self._restack(np.sort(self._stack[self._first :]), self._stack[: self._num_parked])

    def plan_moves(self, num_pages: int | None = None) -> Moves:
        """Say how the held pages would come to lie below `num_pages`; changes nothing. Reads the whole pool.

        Carry a plan out in this order: copy the pages (`KVStorage.copy_pages`), rewrite every table that names them,
        and `move`. No move is planned for pages freed in an open `batched_frees` block, nor into them.

        Args:
            num_pages: Where the pages from here on shall be empty; None: as few as hold the pages that are not free.

        Raises:
            ValueError: `num_pages` is not in [0, num_pages of the pool], or the free pages below it are too few.
        """
        if num_pages is None:
            num_pages = self._first
        if not 0 <= num_pages <= self._num_pages:
            raise ValueError(f"num_pages must be in [0, {self._num_pages}], got {num_pages}")
        held = self.held_pages()
        src = held[np.searchsorted(held, num_pages) :]
        free = self._stack[self._first :]
        dst = np.sort(free[free < num_pages])[: len(src)]
        if len(dst) < len(src):
            raise ValueError(
                f"num_pages must leave room for {len(src)} pages, got {num_pages} with {len(dst)} free below it"
            )
        return Moves(src=src, dst=dst)

    def move(self, moves: Moves) -> None:
        """Take note that pages have moved: each `dst` is held in place of its `src`, which becomes free.

        Raises:
            ValueError: A source is not held or a destination not free, or an id occurs twice; nothing changes.
        """
        src, dst = _index(moves.src), _index(moves.dst)
        if len(src) != len(dst) or len(np.unique(np.concatenate((src, dst)))) != 2 * len(src):
            raise ValueError("moves must have as many sources as destinations, all of them distinct")
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

    def _all_held(self, pages: NDArray[np.int32], index: NDArray[np.intp]) -> bool:
        """Tell whether the ids, given in both types, are those of pages that are held."""
        try:
            position = self._position[index]
        except IndexError:
            return False
        is_live = position >= self._first
        if self._num_parked:
            is_live |= position < self._num_parked
        return not np.count_nonzero(is_live & (self._stack[position] == pages))

    def _push(self, pages: NDArray[np.int32], index: NDArray[np.intp]) -> bool:
        """Put held pages, given in both types, on the stack or among the parked; decline if they are not distinct."""
        start = self._num_parked if self._batch_depth else self._first - len(pages)
        end = start + len(pages)
        position = np.arange(start, end, dtype=np.int32)
        self._position[index] = position
        # Of a page that is here twice, one position has remained. The stack is not written yet, so all are still held.
        if self._position[index].tobytes() != position.tobytes():
            return False
        self._stack[start:end] = pages
        if self._batch_depth:
            self._num_parked = end
        else:
            self._first = start
        return True

    def _restack(self, free: NDArray[np.int32], parked: NDArray[np.int32]) -> None:
        """Rebuild the stack of a pool of `_num_pages` pages; those neither free nor parked are held."""
        num_parked, num_pages = len(parked), self._num_pages
        first = num_pages - len(free)
        self._stack = np.concatenate((parked, np.zeros(first - num_parked, dtype=np.int32), free))
        self._position = np.zeros(num_pages, dtype=np.int32)
        self._position[parked] = np.arange(num_parked, dtype=np.int32)
        self._position[free] = np.arange(first, num_pages, dtype=np.int32)
        self._first = first

    def _complaint(self, pages: NDArray[np.int32]) -> str:
        """Say what is wrong with the ids, of which at least one is not held or occurs twice."""
        previous = -1
        for page in np.sort(pages):
            if not 0 <= page < self._num_pages:
                return f"pages must be in [0, {self._num_pages}), got page {page}"
            if page == previous:
                return f"pages must be distinct, got page {page} twice"
            one = np.array([page], dtype=np.int32)
            if not self._all_held(one, one.astype(np.intp)):
                return f"pages must be held, got page {page}, which is free"
            previous = page
        raise AssertionError("every page is held and distinct")


def _check_num_pages(num_pages: int) -> None:
    if not 1 <= num_pages <= _MAX_PAGES:
        raise ValueError(f"num_pages must be in [1, {_MAX_PAGES}], got {num_pages}")


def _index(pages: NDArray[np.int32]) -> NDArray[np.intp]:
    """Return the ids as indices; those that are negative become greater than any page."""
    if pages.dtype != np.int32 or pages.ndim != 1:
        raise ValueError(f"pages must be a one-dimensional int32 array, got {pages.dtype} of shape {pages.shape}")
    return pages.view(np.uint32).astype(np.intp)
