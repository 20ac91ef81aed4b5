"""Live matches: the cached lengths of many waiting sequences, kept up to date while the tree changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from pagewood.radixcache.arrays import ITEM_BYTES, Int32, from_bytes, num_common_items
from pagewood.radixcache.namespaces import Namespace
from pagewood.radixcache.node import Edge, Space
from pagewood.radixcache.pages import grown

T = TypeVar("T")

_FEW_PAGES = 16
"""Up to this many pages, a loop is faster than calls of numpy."""

_Place: TypeAlias = int | Namespace
"""Where a watch rests: the id of the last cached page of its sequence, or the namespace if no page is cached."""


class Watch:
    """The current length of the longest cached prefix of a sequence.

    Invariant: while the watch is open, `num_tokens` is what `RadixCache.peek` would return.

    Attributes:
        namespace: the namespace of the sequence.
        num_tokens: length of the longest cached prefix, whole pages.
        key: the whole pages of the sequence, as int32 bytes; internal, like the following.
        owner: what `WatchGroup.changed` returns for this watch.
        notes: the notes of its group, or None without a group.
        place: where it rests.
    """

    __slots__ = ("_close", "key", "namespace", "notes", "num_tokens", "owner", "place")

    def __init__(
        self,
        key: bytes,
        namespace: Namespace,
        close: Callable[[Watch], None],
        *,
        owner: Any = None,
        notes: dict[Watch, Any] | None = None,
    ) -> None:
        self.key = key
        self.namespace = namespace
        self.owner = owner
        self.notes = notes  # written by: Watches
        self.num_tokens = 0  # written by: Watches
        self.place: _Place = namespace  # written by: Watches
        self._close = close

    def close(self) -> None:
        """Stop watching: `num_tokens` keeps its last value. Closing a watch again does nothing."""
        self._close(self)

    def __repr__(self) -> str:
        return f"Watch(namespace={self.namespace!r}, num_tokens={self.num_tokens})"


class WatchGroup(Generic[T]):
    """Watches that report which of them have changed, so that the caller need not read all of them.

    Invariant: `changed` returns the owner of every open watch of this group whose length has changed since the last
    call, or since the watch was opened. Each owner is returned once, even if the length has changed back. Owners are in
    the order of their first changes, which depends only on the calls made to the cache, not on hashes.

    The cache calls nothing while the tree changes. A watch that moves leaves a note, at most one per open watch, and
    `changed` reads the notes.
    """

    __slots__ = ("_notes", "_open")

    def __init__(self, open: Callable[[Int32, Namespace, T, dict[Watch, T]], Watch]) -> None:
        self._open = open
        self._notes: dict[Watch, T] = {}  # written by: Watches, changed

    def watch(self, owner: T, tokens: Int32, namespace: Namespace = None) -> Watch:
        """Return a live match, the same as `RadixCache.watch`; `changed` identifies it by `owner`.

        Raises:
            ValueError: `tokens` is not a one-dimensional int32 array.
        """
        return self._open(tokens, namespace, owner, self._notes)

    def changed(self) -> list[T]:
        """Return the owners of the open watches that have changed since the last call, at one step for each."""
        owners = list(self._notes.values())
        self._notes.clear()
        return owners


class Watches:
    """All open watches, by the page at which each rests and the page that it waits for next.

    Invariant: `_waiting[watch.place][next page of watch]` contains each open watch, no dict in it is empty, and
    `_is_place` is true exactly for the pages that are keys of `_waiting`; its last item is false.

    A page id identifies a place as long as the page is cached, whatever is split or joined. A new run moves only the
    watches that rest at its parent page and wait for its first page. A removed run moves up the watches that rest at
    its pages. So the cost is one look-up per run that enters or leaves, and one step per watch whose length changes.
    """

    __slots__ = ("_is_place", "_page_bytes", "_page_size", "_waiting")

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._page_bytes = page_size * ITEM_BYTES
        self._waiting: dict[_Place, dict[bytes, dict[Watch, None]]] = {}  # written by: _rest, _leave, stored, removed
        self._is_place: npt.NDArray[np.bool_] = np.zeros(1024, np.bool_)  # written by: _rest, _leave, stored, removed

    def open(self, watch: Watch, num_pages: int, place: _Place) -> None:
        """Place a new watch at the end of its cached pages.

        Args:
            watch: the watch.
            num_pages: number of its cached pages.
            place: the id of the last of them, or its namespace if there is none.
        """
        self._rest(watch, num_pages, place)

    def close(self, watch: Watch) -> None:
        """Remove a watch if it is open."""
        group = self._waiting.get(watch.place, {}).get(self._next_page(watch), {})
        if watch in group:
            del group[watch]
            if watch.notes is not None:
                watch.notes.pop(watch, None)
            if not group:
                self._leave(watch.place, self._next_page(watch))

    def watched_end(self, edge: Edge) -> int:
        """Return the end of the longest prefix that ends in `edge` and at which a watch rests, or 0."""
        waiting = self._waiting
        if not waiting or edge.parent is None:
            return 0
        if len(edge.values) <= _FEW_PAGES * ITEM_BYTES:
            few = memoryview(edge.values).cast("i").tolist()
            return edge.start + next((n for n in range(len(few), 0, -1) if few[n - 1] in waiting), -edge.start)
        from_end = self._is_place.take(from_bytes([edge.values]), mode="clip")[::-1]  # no watch rests at the last flag
        first = int(from_end.argmax())
        return edge.end - first if from_end[first] else 0

    def stored(self, space: Space, parent_page: int | None, key: bytes, values: bytes) -> None:
        """Move forward the watches that wait for the first of the new pages."""
        place = space.name if parent_page is None else parent_page
        group = self._waiting.get(place, {}).get(key[: self._page_bytes])
        if group is None:
            return
        self._leave(place, key[: self._page_bytes])
        pages = from_bytes([values])
        for watch in group:
            offset = watch.num_tokens * ITEM_BYTES
            if watch.key.startswith(key, offset):
                num_pages = len(pages)
            else:
                num_pages = num_common_items(key, watch.key, offset) // self._page_size
            self._move(watch, watch.num_tokens // self._page_size + num_pages, int(pages[num_pages - 1]))

    def removed(self, space: Space, parent_page: int | None, key: bytes, values: bytes) -> None:
        """Move up the watches that rest at removed pages."""
        pages = from_bytes([values])
        inside = pages[pages < len(self._is_place)] if len(self._waiting) else pages[:0]
        gone = inside[self._is_place.take(inside)]
        if not len(gone):
            return
        place = space.name if parent_page is None else parent_page
        self._is_place[gone] = False
        for page in gone.tolist():
            depth = -1
            for group in self._waiting.pop(page).values():
                for watch in group:
                    if depth < 0:
                        depth = watch.num_tokens // self._page_size - 1 - int(np.flatnonzero(pages == page)[0])
                    self._move(watch, depth, place)

    def cleared(self, space: Space) -> None:
        """Do nothing: `removed` was called for each page."""

    def check(self, num_cached: Callable[[Watch], int]) -> None:
        """Raise AssertionError unless every watch has the length that `num_cached` returns and is at its place."""
        for place, groups in self._waiting.items():
            if isinstance(place, int) and not self._is_place[place]:
                raise AssertionError(f"_is_place must be true for a page at which a watch rests: {place}")
            for next_page, group in groups.items():
                if not group:
                    raise AssertionError("no group of watches may be empty")
                for watch in group:
                    if watch.num_tokens != num_cached(watch):
                        raise AssertionError(f"num_tokens of a watch must be the length of a match: {watch!r}")
                    if watch.place != place or self._next_page(watch) != next_page:
                        raise AssertionError(f"a watch must be stored under its place and next page: {watch!r}")
        if np.count_nonzero(self._is_place) != sum(isinstance(place, int) for place in self._waiting):
            raise AssertionError("_is_place must be false for all other pages")

    def _next_page(self, watch: Watch) -> bytes:
        offset = watch.num_tokens * ITEM_BYTES
        return watch.key[offset : offset + self._page_bytes]

    def _move(self, watch: Watch, num_pages: int, place: _Place) -> None:
        """Move a watch to another place and note the change."""
        if watch.notes is not None:
            watch.notes[watch] = watch.owner
        self._rest(watch, num_pages, place)

    def _rest(self, watch: Watch, num_pages: int, place: _Place) -> None:
        """Place a watch `num_pages` deep."""
        offset = num_pages * self._page_bytes
        watch.num_tokens = num_pages * self._page_size
        watch.place = place
        groups = self._waiting.get(place)
        if groups is None:
            groups = self._waiting[place] = {}
            if isinstance(place, int):
                self._mark(place)
        next_page = watch.key[offset : offset + self._page_bytes]
        group = groups.get(next_page)
        if group is None:
            groups[next_page] = {watch: None}
        else:
            group[watch] = None

    def _leave(self, place: _Place, next_page: bytes) -> None:
        """Remove a group, and its place if no other group is there."""
        groups = self._waiting[place]
        del groups[next_page]
        if not groups:
            del self._waiting[place]
            if isinstance(place, int):
                self._is_place[place] = False

    def _mark(self, page: int) -> None:
        if page + 1 >= len(self._is_place):
            self._is_place = grown(self._is_place, page + 2)
        self._is_place[page] = True
