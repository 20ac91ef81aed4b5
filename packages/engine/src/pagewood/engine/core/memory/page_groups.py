"""The memory of pages where layers with a sliding window need only the last pages of a sequence."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.messages.arrays import Int32


class PageAllocator(Protocol):
    """Hands out the ids of free pages."""

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        ...

    @property
    def num_free(self) -> int:
        """Pages that `alloc` can hand out."""
        ...

    def alloc(self, n: int, *, out: Int32 | None = None) -> Int32:
        """Return `[n]` page ids, written to `out` if it is given; the caller owns them."""
        ...

    def free(self, pages: Int32) -> None:
        """Take pages back."""
        ...

    def held_pages(self) -> Int32:
        """Return `[num_pages - num_free]` page ids that are not free."""
        ...


_NO_PAGES: Int32 = np.empty(0, np.int32)


class PageGroups:
    """Maps pages to frames: a frame is the memory of a page in one group of layers.

    All frames have one size, so that a free one serves any group. Groups are whole, which need all positions of a
    sequence, or have a window. A page has a frame in every whole group as long as it exists, and in the groups with a
    window, in all or none of them, as long as a request is near it, and after that while it is cached and memory is
    not short.

    It is the allocator of `KVSpace`: a page that is handed out has all its frames. A page counts as one user for each
    request whose window reaches it. Frames of windows that have no user are idle; they can be taken at any time.

    Invariant: every frame is free or belongs to one page; a page with a user and a page in use by a request has frames
    in all groups that its user reads.

    Source: vLLM's hybrid KV cache manager, for groups of equal size over one pool.
    """

    __slots__ = (
        "_announces_pages", "_clock", "_copies", "_frames", "_has_windows", "_ids", "_is_cached", "_is_end",
        "_num_whole", "_num_windowed", "_page_size", "_peak", "_table", "_used_at", "_users", "num_idle", "reach",
        "window",
    )  # fmt: skip

    def __init__(
        self,
        windows: Sequence[int | None],
        *,
        frames: PageAllocator,
        ids: PageAllocator,
        page_size: int,
        num_ahead: int,
        announces_pages: bool = False,
    ) -> None:
        """Begin with every frame free.

        Args:
            windows: of each group, as in `EngineInfo.windows`.
            frames: hands out frames.
            ids: hands out the ids of pages, of which there may be more than frames if no group is whole.
            page_size: positions per page.
            num_ahead: the most positions that one step computes for a request.
            announces_pages: see `EngineInfo.announces_pages`.

        Raises:
            ValueError: no group has a window, whole groups do not come first, or windows differ.
        """
        check_windows(windows)
        window = windows[-1]
        if window is None:
            raise ValueError(f"windows must have a group with a window, got {tuple(windows)}")
        self.window = window
        self.reach = -(-(window - 1) // page_size)
        """Pages before the first position of a page that its window may reach."""
        self._num_whole = sum(one is None for one in windows)
        self._num_windowed = len(windows) - self._num_whole
        self._page_size = page_size
        self._announces_pages = announces_pages
        self._peak = _peak(window, page_size, num_ahead)
        self._frames, self._ids = frames, ids
        num_ids = ids.num_pages
        self._table = np.full((len(windows), num_ids), -1, np.int32)
        """[groups, pages], the frame of each page in each group; -1: it has none."""
        # contents written by: page_groups
        self._has_windows = self._table[self._num_whole]
        """[pages], the frames of the first group with a window, a view."""  # contents written by: page_groups
        self._users = np.zeros(num_ids, np.int32)  # contents written by: page_groups
        self._copies = np.zeros(num_ids, np.int32)
        """[pages], how many of the users of each are copies from or to other memories."""
        # contents written by: page_groups
        self._is_cached = np.zeros(num_ids, np.bool_)  # contents written by: page_groups
        self._is_end = np.zeros(num_ids, np.bool_)
        """[pages], whether a prompt, an answer or a cached prefix that was used has ended within the window."""
        # contents written by: page_groups
        self._used_at = np.zeros(num_ids, np.int64)
        """[pages], when each lost its last user."""  # contents written by: page_groups
        self._clock = 0  # written by: page_groups
        self.num_idle = 0
        """Cached pages without a user that have frames in the groups with a window."""  # written by: page_groups

    @property
    def num_pages(self) -> int:
        """Pages of which all frames fit into memory."""
        return self._frames.num_pages // len(self._table)

    @property
    def num_groups(self) -> int:
        """Groups of layers."""
        return len(self._table)

    @property
    def num_ids(self) -> int:
        """The ids of pages are below it."""
        return self._ids.num_pages

    @property
    def num_free(self) -> int:
        """Pages that can be handed out without taking idle frames."""
        return min(self._frames.num_free // len(self._table), self._ids.num_free)

    def num_available(self, num_evictable: int) -> int:
        """Return how many pages could be handed out if idle frames were taken and `num_evictable` pages evicted."""
        frames = self._frames.num_free + self.num_idle * self._num_windowed + num_evictable * self._num_whole
        return min(frames // len(self._table), self._ids.num_free + num_evictable)

    def num_cached(self, num_pages: int) -> int:
        """Return how many whole pages the frames of all cached pages, of which there are `num_pages`, make up."""
        frames = num_pages * self._num_whole
        is_owned = self._is_cached | (self._copies > 0)
        frames += int(np.count_nonzero(is_owned & (self._has_windows >= 0))) * self._num_windowed
        return -(-frames // len(self._table))

    def num_needed(self, num_pages: int, *, num_in_windows: int = 0) -> int:
        """Return how many whole pages the frames make up that a request needs at most for `num_pages` more pages.

        Args:
            num_pages: in its future.
            num_in_windows: pages of which it has frames in the groups with a window.
        """
        frames = num_pages * self._num_whole + max(0, min(num_pages, self._peak - num_in_windows)) * self._num_windowed
        return -(-frames // len(self._table))

    def alloc(self, n: int, *, out: Int32 | None = None) -> Int32:
        """Return `[n]` pages with frames in all groups and one user, written to `out` if it is given."""
        pages = self._ids.alloc(n, out=out)
        self._table[:, pages] = self._frames.alloc(n * len(self._table)).reshape(len(self._table), n)
        self._users[pages] = 1
        return pages

    def alloc_for_hit(self, n: int) -> Int32:
        """Return `[n]` pages for a prefix that a copy fills, with frames in windows where a hit reads them; the copy is
        their user.
        """
        pages = self._ids.alloc(n)
        window = self.window_of(pages)
        num_whole, num_windowed = self._num_whole, self._num_windowed
        frames = self._frames.alloc(n * num_whole + len(window) * num_windowed)
        self._table[:num_whole, pages] = frames[: n * num_whole].reshape(num_whole, n)
        self._table[num_whole:, window] = frames[n * num_whole :].reshape(num_windowed, len(window))
        self._users[pages] = self._copies[pages] = 1
        return pages

    def num_for_hit(self, num_pages: int) -> int:
        """Return how many whole pages the frames make up that `alloc_for_hit` takes."""
        frames = num_pages * self._num_whole + min(num_pages, self.reach) * self._num_windowed
        return -(-frames // len(self._table))

    @property
    def num_free_ids(self) -> int:
        """Pages without an owner; there may be no frames for them."""
        return self._ids.num_free

    def frames_of(self, pages: Int32) -> Int32:
        """Return `[groups, n]`, the frames of pages `[n]` in each group; -1: it has none."""
        return self._table[:, pages]

    def hold(self, pages: Int32) -> None:
        """Count a copy as a user of pages, so that they keep their frames."""
        self.use(pages)
        self._copies[pages] += 1

    def end_copy(self, pages: Int32) -> None:
        """Undo one `hold`, or the use of `alloc_for_hit`."""
        self._copies[pages] -= 1
        self.let_go(pages)

    def drop_windows(self, pages: Int32) -> None:
        """Free the frames in windows of pages that have no user."""
        self.num_idle -= int(np.count_nonzero(self._is_idle(pages)))
        self._take(pages)

    def free(self, pages: Int32) -> None:
        """Take pages back, with all their frames and users."""
        self.num_idle -= int(np.count_nonzero(self._is_idle(pages)))
        frames = self._table[:, pages].ravel()
        self._frames.free(frames[frames >= 0])
        self._table[:, pages] = -1
        self._users[pages] = self._copies[pages] = 0
        self._is_cached[pages] = self._is_end[pages] = False
        self._ids.free(pages)

    def held_pages(self) -> Int32:
        """Return the ids of the pages that are not free."""
        return self._ids.held_pages()

    def held_frames(self) -> Int32:
        """Return the ids of the frames that are not free."""
        return self._frames.held_pages()

    def adopt(self, pages: Int32) -> None:
        """Note that the cache owns pages."""
        self._is_cached[pages] = True

    def num_usable(self, pages: Int32) -> int:
        """Return how many leading pages of a cached prefix can be used: the windows at their end must be there."""
        missing = self._has_windows[pages] < 0
        if not missing.any():
            return len(pages)
        places = np.arange(len(pages))
        last_missing = np.maximum.accumulate(np.where(missing, places, -1))
        usable = np.flatnonzero(last_missing < np.maximum(places + 1 - self.reach, 0))
        return int(usable[-1]) + 1 if len(usable) else 0

    def first_lacking(self, pages: Int32, num_pages: int) -> int:
        """Return the first of the cached pages of a prefix of `num_pages` that lacks a window of the position after it.

        It is the number of `pages` if none does.
        """
        first = min(max(0, num_pages - self.reach), len(pages))
        lacking = np.flatnonzero(self._has_windows[pages[first:]] < 0)
        return first + int(lacking[0]) if len(lacking) else len(pages)

    def window_of(self, pages: Int32) -> Int32:
        """Return the pages of a prefix that the window of the position after it may reach."""
        return pages[max(0, len(pages) - self.reach) :]

    def use(self, pages: Int32) -> None:
        """Count one more user of pages."""
        self.num_idle -= int(np.count_nonzero(self._is_idle(pages)))
        self._users[pages] += 1

    def let_go(self, pages: Int32) -> None:
        """Count one user less of pages; those that are neither cached nor used lose their frames in the windows."""
        self._users[pages] -= 1
        self._clock += 1
        unused = pages[self._users[pages] == 0]
        is_cached = self._is_cached[unused]
        self._used_at[unused] = self._clock
        self.num_idle += int(np.count_nonzero(self._is_idle(unused)))
        self._take(unused[~is_cached])

    def mark_end(self, pages: Int32) -> None:
        """Note that a prefix ends behind these pages, where another request may go on: its windows are worth more."""
        self._is_end[self.window_of(pages)] = True

    def give(self, own: Int32, cached: Int32) -> int:
        """Move frames in the windows from pages to the cached ones that hold the same and have none; return how many.

        Args:
            own: `[n]` pages of one request or copy, which it does not read any more.
            cached: `[n]` pages of the cache, for the same tokens.
        """
        are_given = (self._has_windows[own] >= 0) & (self._has_windows[cached] < 0)
        own, cached = own[are_given], cached[are_given]
        windows = self._table[self._num_whole :]
        windows[:, cached] = windows[:, own]
        windows[:, own] = -1
        self._used_at[cached] = self._clock
        self._is_end[cached] |= self._is_end[own]
        self.num_idle += int(np.count_nonzero(self._is_idle(cached)))
        return len(cached)

    def to_trim(self, num_pages: int, *, ends: bool) -> Int32:
        """Return pages whose idle frames are to be freed until `num_pages` are free: those first that were used longest
        ago. They may be too few.

        Args:
            num_pages: whole pages.
            ends: whether those near the end of a prefix are freed too. Where no group is whole, they always are:
                there is nothing else that could be evicted instead.
        """
        num_lacking = -(-(num_pages * len(self._table) - self._frames.num_free) // self._num_windowed)
        if num_lacking <= 0 or not self.num_idle:
            return _NO_PAGES
        is_idle = self._is_idle(slice(None))
        pages = np.flatnonzero(is_idle if ends or not self._num_whole else is_idle & ~self._is_end).astype(np.int32)
        if num_lacking < len(pages):
            pages = pages[np.argpartition(self._used_at[pages], num_lacking - 1)[:num_lacking]]
        return pages

    def ends_of(self, pages: Int32) -> Int32:
        """Return those of some pages that are near the end of a prefix."""
        return pages[self._is_end[pages]]

    def spread(self, rows: Int32, columns: Int32, pages: Int32, num_rows: int) -> tuple[Int32, Int32, Int32]:
        """Return rows, columns and frames of the tables of all groups, which lie behind each other.

        If pages are announced, their own ids follow, as a table of one more group.

        Args:
            rows: `[n]`, the row of each page.
            columns: `[n]`, its place in the row.
            pages: `[n]`.
            num_rows: rows of the table of one group.
        """
        frames = self._table[:, pages]
        if self._announces_pages:
            frames = np.concatenate([frames, pages[None]])
        firsts = np.arange(len(frames), dtype=np.int32)[:, None] * np.int32(num_rows)
        is_there = frames >= 0
        every = np.broadcast_to(columns, frames.shape)
        return (rows + firsts)[is_there], every[is_there], frames[is_there]

    def violation(self, users: Sequence[Int32], num_retained: int) -> str | None:
        """Return a description of how the invariant is broken, or None if it holds.

        Args:
            users: the pages that each request with a row uses.
            num_retained: pages that are retained, and so may have more users.
        """
        frames = self._table[self._table >= 0]
        if len(frames) + self._frames.num_free != self._frames.num_pages or len(np.unique(frames)) != len(frames):
            return f"{len(frames)} frames of pages and {self._frames.num_free} free are not {self._frames.num_pages}"
        of_requests = np.bincount(np.concatenate([*users, np.empty(0, np.int32)]), minlength=self.num_ids)
        counts = of_requests + self._copies
        if (counts > self._users).any() or (not num_retained and (counts != self._users).any()):
            return "the users of a page are not the requests whose windows reach it, and copies"
        if (self._has_windows[of_requests > 0] < 0).any():
            return "a page lacks a frame that a request reads"
        held = self.held_pages()
        if (self._table[: self._num_whole, held] < 0).any():
            return "a page lacks a frame in a whole group"
        num_idle = int(np.count_nonzero(self._is_idle(slice(None))))
        if num_idle != self.num_idle:
            return f"{num_idle} pages are idle, not {self.num_idle}"
        return None

    def _is_idle(self, pages: Int32 | slice) -> NDArray[np.bool_]:
        return self._is_cached[pages] & (self._users[pages] == 0) & (self._has_windows[pages] >= 0)

    def _take(self, pages: Int32) -> None:
        """Free the frames that pages have in the groups with a window."""
        windows = self._table[self._num_whole :]
        frames = windows[:, pages].ravel()
        self._frames.free(frames[frames >= 0])
        windows[:, pages] = -1


def check_windows(windows: Sequence[int | None]) -> None:
    """Check the windows of groups.

    Raises:
        ValueError: there is no group, whole groups do not come first, or windows differ.
    """
    some = [one for one in windows if one is not None]
    if not windows or any(one is not None for one in windows[: len(windows) - len(some)]):
        raise ValueError(f"windows must have groups, those that need all positions first, got {tuple(windows)}")
    if len(set(some)) > 1 or any(one < 1 for one in some):
        raise ValueError(f"windows must be equal and >= 1, got {tuple(windows)}")


def most_pages(windows: Sequence[int | None], num_frames: int) -> int:
    """Return how many pages some frames are for, if only the groups without a window, at least one, have them."""
    return num_frames // windows.count(None)


def num_frames_needed(windows: Sequence[int | None], num_tokens: int, *, page_size: int, num_ahead: int) -> int:
    """Return the most frames that a request of `num_tokens` holds at one time while it runs alone.

    Args:
        windows: of each group, as in `EngineInfo.windows`.
        num_tokens: of its prompt and its output.
        page_size: positions per page.
        num_ahead: the most positions that one step computes for a request.
    """
    num_pages = -(-num_tokens // page_size)
    return sum(
        num_pages if window is None else min(num_pages, _peak(window, page_size, num_ahead)) for window in windows
    )


def longest_request(
    windows: Sequence[int | None], num_frames: int, *, page_size: int, num_ahead: int, limit: int
) -> int:
    """Return how many tokens the longest request has that fits into some frames, at most `limit`; see
    `num_frames_needed`.
    """

    def needed(num_tokens: int) -> int:
        return num_frames_needed(windows, num_tokens, page_size=page_size, num_ahead=num_ahead)

    return bisect_right(range(limit + 1), num_frames, key=needed) - 1


def _peak(window: int, page_size: int, num_ahead: int) -> int:
    """Return the most pages that a request holds in a group with a window: those of the window and of one step."""
    return -(-(window - 1) // page_size) + -(-num_ahead // page_size) + 1
