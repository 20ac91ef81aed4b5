"""The free list: hands out page ids and takes them back."""

from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

# Page ids are int32.
_MAX_PAGES = 2**31 - 1


class OutOfPages(Exception):
    """Fewer pages are free than were asked for; none was allocated.

    Attributes:
        requested: Pages asked for.
        available: Pages that were free.
    """

    def __init__(self, requested: int, available: int) -> None:
        super().__init__(f"requested {requested} pages, {available} are free")
        self.requested = requested
        self.available = available


class PageAllocator:
    """Hands out the page ids 0 .. num_pages-1, each to one holder at a time.

    Invariant: every page is either held, free, or freed within an open `batched_frees` block.

    `alloc` and `free` cost time in the number of pages that they move, whatever the size of the pool. Pages freed last
    are handed out first, in the order in which they were freed, because their memory is the likeliest to be in a cache.
    Not thread-safe.
    """

    __slots__ = ("_batch_depth", "_is_held", "_num_free", "_num_pages", "_parked", "_stack")

    def __init__(self, num_pages: int) -> None:
        """Make an allocator with every page free; the first pages handed out are 0, 1, 2, ...

        Raises:
            ValueError: `num_pages` is not in [1, 2**31).
        """
        if not 1 <= num_pages <= _MAX_PAGES:
            raise ValueError(f"num_pages must be in [1, {_MAX_PAGES}], got {num_pages}")
        self._num_pages = num_pages
        # The free pages are _stack[:_num_free], the next one to hand out last.  # written by: alloc, _push
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._num_free = num_pages  # written by: alloc, _push
        self._is_held = np.zeros(num_pages, dtype=np.bool_)  # written by: alloc, free
        self._parked: list[NDArray[np.int32]] = []  # written by: free, batched_frees
        self._batch_depth = 0  # written by: batched_frees

    @property
    def num_pages(self) -> int:
        """All pages, held or free."""
        return self._num_pages

    @property
    def num_free(self) -> int:
        """Pages that `alloc` can hand out now; pages freed within an open `batched_frees` block are not among them."""
        return self._num_free

    def alloc(self, n: int) -> NDArray[np.int32]:
        """Hand out `n` pages; the caller holds them until it frees them.

        Returns:
            `[n] int32`, distinct page ids; the array is the caller's own.

        Raises:
            OutOfPages: Fewer than `n` pages are free; nothing is allocated.
            ValueError: `n` is negative.
        """
        num_left = self._num_free - n
        if num_left < 0:
            raise OutOfPages(requested=n, available=self._num_free)
        if n < 0:
            raise ValueError(f"n must be >= 0, got {n}")
        pages = self._stack[num_left : self._num_free][::-1].copy()
        # numpy turns any other index type into intp first, once per use and slower than this.
        self._is_held[pages.astype(np.intp)] = True
        self._num_free = num_left
        return pages

    def free(self, pages: NDArray[np.int32]) -> None:
        """Take pages back.

        Args:
            pages: `[n] int32`, distinct ids of held pages, in any order.

        Raises:
            ValueError: `pages` is no such array. The message names the first wrong page in ascending order, and nothing
                is freed.
        """
        if pages.dtype != np.int32 or pages.ndim != 1:
            raise ValueError(f"pages must be a one-dimensional int32 array, got {pages.dtype} of shape {pages.shape}")
        if not len(pages):
            return
        index = np.sort(pages).astype(np.intp)
        is_in_range = index[0] >= 0 and index[-1] < self._num_pages
        if not is_in_range or not self._is_held[index].all() or (index[1:] == index[:-1]).any():
            raise ValueError(self._complaint(index))
        self._is_held[index] = False
        if self._batch_depth:
            self._parked.append(pages.copy())
        else:
            self._push(pages)

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
            if not self._batch_depth:
                for pages in self._parked:
                    self._push(pages)
                self._parked.clear()

    def held_pages(self) -> NDArray[np.int32]:
        """Return the ids of all held pages, for audits: this one reads the whole pool.

        Returns:
            `[num_held] int32`, ascending.
        """
        return np.flatnonzero(self._is_held).astype(np.int32)

    def _push(self, pages: NDArray[np.int32]) -> None:
        end = self._num_free + len(pages)
        self._stack[self._num_free : end] = pages[::-1]
        self._num_free = end

    def _complaint(self, index: NDArray[np.intp]) -> str:
        """Say what is wrong with the ids in `index`, `[n] intp`, ascending, of which at least one is wrong."""
        previous = -1
        for page in index.tolist():
            if not 0 <= page < self._num_pages:
                return f"pages must be in [0, {self._num_pages}), got page {page}"
            if page == previous:
                return f"pages must be distinct, got page {page} twice"
            if not self._is_held[page]:
                return f"pages must be held, got page {page}, which is free"
            previous = page
        raise AssertionError("every page is held and distinct")
