"""The prefix cache of a simulated replica: which leading pages of a request are cached."""

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol

_FEW_LEAVES = 64
"""Entries of the heap of leaves that may be stale in any case."""


class PrefixCache(Protocol):
    """The cache interface of the simulator: pages by key, where a key identifies its page and all pages before it."""

    @property
    def num_pages(self) -> int:
        """Cached pages."""
        ...

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` can free now."""
        ...

    def match(self, keys: Sequence[int]) -> int:
        """Return how many of the leading pages are cached; does not count as a use."""
        ...

    def insert(self, keys: Sequence[int], num_pages: int) -> int:
        """Adopt those of the first `num_pages` pages that are not cached yet, and return how many those are."""
        ...

    def lock(self, keys: Sequence[int], num_pages: int) -> None:
        """Lock the first `num_pages` pages, which are cached, against eviction."""
        ...

    def unlock(self, keys: Sequence[int], num_pages: int) -> None:
        """Undo one lock; the pages count as used now."""
        ...

    def evict(self, num_pages: int) -> int:
        """Evict up to `num_pages` unlocked pages, and return how many."""
        ...


class MatchWatch:
    """The number of cached leading pages of one request, kept up to date by the cache; made by `BlockCache.watch`."""

    __slots__ = ("_on_change", "keys", "num_pages")

    def __init__(self, keys: Sequence[int], on_change: Callable[[], None]) -> None:
        """Start with no cached pages."""
        self.keys = keys
        self.num_pages = 0  # written by: BlockCache
        self._on_change = on_change

    def changed(self) -> None:
        """Notify the owner that `num_pages` has changed."""
        self._on_change()


class _Node:
    __slots__ = ("key", "num_children", "num_locks", "parent", "used")

    def __init__(self, key: int, parent: "_Node | None", used: int) -> None:
        self.key = key
        self.parent = parent
        self.num_children = 0  # written by: BlockCache
        self.num_locks = 0
        """Leases on this page, plus children that are locked."""  # written by: BlockCache
        self.used = used
        """Time of its own last use; a page is evicted after its descendants in any case."""  # written by: BlockCache


class BlockCache:
    """A hash table of pages with links to the page before; evicts the least recently used pages, leaves first.

    Invariant: if a page is cached, so are all pages before it; a page is evictable if and only if neither it nor a page
    after it is locked.

    A match is a binary search, because the cached pages are a prefix. Using, locking and unlocking a prefix touch its
    last page, and its ancestors only as far as their locks change.

    Source: block hashing of vLLM's prefix caching, with the leaf order of RadixAttention (arXiv 2312.07104).
    """

    __slots__ = ("_awaiting", "_clock", "_events", "_leaves", "_nodes", "_num_locked", "_resting")

    def __init__(self, *, records_events: bool = False) -> None:
        """Start empty; `records_events`: whether `take_events` is called."""
        self._events: list[tuple[str, list[int]]] | None = [] if records_events else None
        self._nodes: dict[int, _Node] = {}
        self._leaves: list[tuple[int, int]] = []  # heap of (used, key), stale entries included
        self._clock = 0
        self._num_locked = 0
        self._resting: dict[int, list[MatchWatch]] = {}  # by the last cached page
        self._awaiting: dict[int, list[MatchWatch]] = {}  # by the first page that is not cached

    @property
    def num_pages(self) -> int:
        """Cached pages."""
        return len(self._nodes)

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` can free now."""
        return len(self._nodes) - self._num_locked

    def match(self, keys: Sequence[int]) -> int:
        """Return how many of the leading pages are cached; does not count as a use."""
        return self._num_cached(keys, len(keys))

    def insert(self, keys: Sequence[int], num_pages: int) -> int:
        """Adopt those of the first `num_pages` pages that are not cached yet, and return how many those are."""
        if not num_pages:
            return 0
        nodes = self._nodes
        self._clock += 1
        used = self._clock
        num_cached = self._num_cached(keys, num_pages)
        parent = nodes[keys[num_cached - 1]] if num_cached else None
        for key in keys[num_cached:num_pages]:
            if parent is not None:
                parent.num_children += 1
            nodes[key] = parent = _Node(key, parent, used)
        assert parent is not None
        parent.used = used
        self._queue_if_evictable(parent)
        if self._events is not None:
            self._record("BlockStored", keys[num_cached:num_pages])
        if self._awaiting:
            self._move([w for key in keys[num_cached:num_pages] for w in self._awaiting.pop(key, ())], self._resting)
        return num_pages - num_cached

    def lock(self, keys: Sequence[int], num_pages: int) -> None:
        """Lock the first `num_pages` pages, which are cached, against eviction."""
        node = self._nodes[keys[num_pages - 1]] if num_pages else None
        while node is not None:
            node.num_locks += 1
            if node.num_locks > 1:
                return
            self._num_locked += 1
            node = node.parent

    def unlock(self, keys: Sequence[int], num_pages: int) -> None:
        """Undo one lock; the pages count as used now."""
        node = self._nodes[keys[num_pages - 1]] if num_pages else None
        if node is None:
            return
        self._clock += 1
        node.used = self._clock
        last = node
        while node is not None:
            node.num_locks -= 1
            if node.num_locks:
                break
            self._num_locked -= 1
            node = node.parent
        self._queue_if_evictable(last)  # the others have a page behind them

    def evict(self, num_pages: int) -> int:
        """Evict up to `num_pages` unlocked pages, and return how many."""
        nodes, leaves = self._nodes, self._leaves
        evicted: list[int] = []
        while len(evicted) < num_pages and leaves:
            used, key = heappop(leaves)
            node = nodes.get(key)
            if node is None or node.used != used or node.num_children or node.num_locks:
                continue
            # Continue up the branch without the heap as long as a page was not used after its child: all other leaves
            # were used later.
            while True:
                del nodes[node.key]
                evicted.append(node.key)
                parent = node.parent
                if parent is None:
                    break
                parent.num_children -= 1
                if parent.used > node.used or len(evicted) == num_pages or parent.num_children or parent.num_locks:
                    self._queue_if_evictable(parent)
                    break
                node = parent
        if self._events is not None:
            self._record("BlockRemoved", evicted)
        if self._resting:
            self._move([w for key in evicted for w in self._resting.pop(key, ())], self._awaiting)
        return len(evicted)

    def take_events(self) -> list[tuple[str, list[int]]]:
        """Return the KV events since the last call, in the form of `PrefixIndex`.

        Pages with negative names are left out: no other request can share them (`Trace.page_names`).
        """
        events, self._events = self._events or [], []
        return events

    def watch(self, keys: Sequence[int], on_change: Callable[[], None]) -> MatchWatch:
        """Return a live match, which lasts until `unwatch`; `on_change` is called whenever it has changed."""
        watch = MatchWatch(keys, on_change)
        watch.num_pages = self.match(keys)
        self._rest(watch)
        return watch

    def unwatch(self, watch: MatchWatch) -> None:
        """Stop updating a live match."""
        self._lift(watch, self._resting)
        self._lift(watch, self._awaiting)

    def _num_cached(self, keys: Sequence[int], end: int) -> int:
        """Return how many of the first `end` pages are cached."""
        nodes, low, high = self._nodes, 0, end
        if end and keys[end - 1] in nodes:
            return end
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in nodes:
                low = middle + 1
            else:
                high = middle
        return low

    def _record(self, kind: str, keys: Sequence[int]) -> None:
        names = [key for key in keys if key >= 0]
        if names and self._events is not None:
            self._events.append((kind, names))

    def _queue_if_evictable(self, node: _Node) -> None:
        if not node.num_children and not node.num_locks:
            heappush(self._leaves, (node.used, node.key))
            if len(self._leaves) > 2 * len(self._nodes) + _FEW_LEAVES:
                self._drop_stale()

    def _drop_stale(self) -> None:
        """Remove stale entries from the heap, which without evictions would grow with every use of a page."""
        nodes, leaves = self._nodes, self._leaves
        leaves[:] = [entry for entry in leaves if (node := nodes.get(entry[1])) is not None and node.used == entry[0]]
        heapify(leaves)

    def _move(self, watches: list[MatchWatch], other: dict[int, list[MatchWatch]]) -> None:
        """Update watches that were popped from one table and are still in the other."""
        for watch in watches:
            self._lift(watch, other)
            watch.num_pages = self.match(watch.keys)
            self._rest(watch)
            watch.changed()

    def _rest(self, watch: MatchWatch) -> None:
        if watch.num_pages:
            self._resting.setdefault(watch.keys[watch.num_pages - 1], []).append(watch)
        if watch.num_pages < len(watch.keys):
            self._awaiting.setdefault(watch.keys[watch.num_pages], []).append(watch)

    def _lift(self, watch: MatchWatch, table: dict[int, list[MatchWatch]]) -> None:
        is_resting = table is self._resting
        index = watch.num_pages - 1 if is_resting else watch.num_pages
        if not 0 <= index < len(watch.keys):
            return
        key = watch.keys[index]
        watches = table[key]
        watches.remove(watch)
        if not watches:
            del table[key]
