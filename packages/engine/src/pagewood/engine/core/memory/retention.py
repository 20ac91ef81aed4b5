"""Cached prefixes that are likely to return: kept from eviction for a time, within a share of the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import Any, Protocol

import numpy as np

from pagewood.engine.core.cache_keys import Key, namespace_of
from pagewood.engine.core.memory.page_groups import PageGroups
from pagewood.engine.core.messages.arrays import Int32

_SPARE_ENTRIES = 64


class RetainedMatch(Protocol):
    """The longest cached prefix of some tokens."""

    @property
    def pages(self) -> Int32:
        """[num_pages] page ids."""
        ...

    @property
    def node(self) -> Any:
        """Handle for `lock`."""
        ...


class LockingCache(Protocol):
    """What retention needs of a prefix cache."""

    def peek(self, tokens: Int32, namespace: Key = None) -> RetainedMatch:
        """Return the longest cached prefix; this does not count as a use."""
        ...

    def lock(self, node: Any) -> Any:
        """Keep a prefix from eviction; return the handle that unlocks it."""
        ...

    def unlock(self, node: Any) -> None:
        """Undo one lock."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """A retained prefix."""

    lease: Any
    pages: Int32
    """[num_pages] page ids, all of the prefix."""
    until_s: float
    namespace: str | int | None
    of_request: bool


class Retention:
    """Locks the prefixes that are likely to return. Invariant: together they have at most `max_pages` pages.

    If a new prefix does not fit, the oldest one of the namespace with the most retained pages ends. If that is the new
    prefix's own namespace, and it has no other prefix, only the beginning of the new one is retained. So a client that
    retains everything displaces its own prefixes first, and a namespace with at most an equal share keeps its prefixes.

    Args:
        num_pages: the ids of pages are below it.
        max_pages: most pages of all retained prefixes.
        max_s: longest time for which a prefix is retained, seconds.
        page_size: tokens per page.
        clock: returns monotonic seconds.
        groups: the frames of pages; a retained prefix uses those that the next request with it needs. None: a page is
            its memory in all layers.
    """

    __slots__ = (
        "_by_namespace", "_clock", "_deadlines", "_groups", "_kept", "_max_pages", "_max_s", "_num_held", "_num_kept",
        "_page_size", "num_pages",
    )  # fmt: skip

    def __init__(
        self,
        *,
        num_pages: int,
        max_pages: int,
        max_s: float,
        page_size: int,
        clock: Callable[[], float],
        groups: PageGroups | None = None,
    ) -> None:
        self._groups = groups
        self._max_pages = max_pages
        self._max_s = max_s
        self._page_size = page_size
        self._clock = clock
        self.num_pages = 0
        """Pages that retention locks."""  # written by: retention
        self._num_held = np.zeros(num_pages, np.int32)
        """[num_pages], how many retained prefixes have each page."""  # contents written by: retention
        self._kept: dict[int, _Kept] = {}
        """Last page -> prefix, in the order of retention."""  # written by: retention
        self._by_namespace: dict[str | int | None, dict[int, None]] = {}
        """Their last pages, in the same order."""  # written by: retention
        self._num_kept: dict[str | int | None, int] = {}
        """Pages of each namespace."""  # written by: retention
        self._deadlines: list[tuple[float, int]] = []
        """A heap of times and last pages, some of which are out of date."""  # written by: retention

    def keep(
        self,
        cache: LockingCache,
        tokens: Int32,
        key: Key,
        seconds: float,
        *,
        of_request: bool,
        ended: Callable[[Any], object],
    ) -> int:
        """Retain the cached prefix of some tokens, or as much of its beginning as there is room for.

        Args:
            cache: of the prefix.
            tokens: `[num_tokens] int32`.
            key: of the prefix.
            seconds: how long; cut to the longest time.
            of_request: whether a request has computed these tokens; `drop` of a continuation then ends this retention
                too.
            ended: called with the unlocked handle of each prefix that had to end.

        Returns:
            How many tokens are retained because of this.
        """
        namespace, match = namespace_of(key), cache.peek(tokens, key)
        lease = cache.lock(match.node)  # a prefix that ends below may be a part of this one
        pages = match.pages[: self._max_pages]
        while True:
            is_new = self._num_held[pages] == 0
            num_new = int(is_new.sum())
            num_over = self.num_pages + num_new - self._max_pages
            if num_over <= 0:
                break
            counts = self._num_kept | {namespace: self._num_kept.get(namespace, 0) + num_new}
            largest = max(counts, key=counts.__getitem__)
            if self._by_namespace.get(largest):
                ended(self._end(cache, next(iter(self._by_namespace[largest]))))
            else:
                pages = pages[: np.flatnonzero(is_new)[-num_over]]
        if len(pages):
            if len(pages) < len(match.pages):
                whole, node = lease, cache.peek(tokens[: len(pages) * self._page_size], key).node
                lease = cache.lock(node)
                cache.unlock(whole)
            until_s = self._clock() + min(seconds, self._max_s)
            self._add(cache, int(pages[-1]), _Kept(lease, pages.copy(), until_s, namespace, of_request))
        else:
            cache.unlock(lease)
        return len(pages) * self._page_size

    def expire(self, cache: LockingCache) -> Iterator[Any]:
        """End the retention of the prefixes whose time is over; yield their unlocked handles one by one."""
        now_s = self._clock() if self._deadlines else 0.0
        while self._deadlines and self._deadlines[0][0] <= now_s:
            until_s, last = heappop(self._deadlines)
            kept = self._kept.get(last)
            if kept is not None and kept.until_s == until_s:
                yield self._end(cache, last)

    def shrink(self, cache: LockingCache) -> Any | None:
        """End a retention because requests lack memory; return its unlocked handle, or None if nothing is retained."""
        if not self._kept:
            return None
        largest = max(self._num_kept, key=self._num_kept.__getitem__)
        return self._end(cache, next(iter(self._by_namespace[largest])))

    def drop(self, cache: LockingCache, pages: Int32) -> None:
        """End the retention of a prefix, `[num_pages >= 1]` page ids, and of those that requests had of its beginning.

        A shorter prefix that was retained by itself, such as instructions that many texts begin with, stays.
        """
        *before, last = pages.tolist()
        for page in before:
            if page in self._kept and self._kept[page].of_request:
                self._end(cache, page)
        if last in self._kept:
            self._end(cache, last)

    def clear(self, cache: LockingCache) -> None:
        """End all retentions."""
        for last in list(self._kept):
            self._end(cache, last)
        self._deadlines.clear()

    def reset(self) -> None:
        """Forget all, after the cache was replaced."""
        self.num_pages = 0
        self._num_held.fill(0)
        for each in (self._kept, self._by_namespace, self._num_kept, self._deadlines):
            each.clear()

    def _add(self, cache: LockingCache, last: int, kept: _Kept) -> None:
        """Add a locked prefix. It replaces an equal one, and ends no earlier than that."""
        old = self._kept.get(last)
        if old is not None:
            kept = replace(kept, until_s=max(kept.until_s, old.until_s), of_request=kept.of_request and old.of_request)
            self._end(cache, last)
        num_new = int((self._num_held[kept.pages] == 0).sum())
        self._num_held[kept.pages] += 1
        if self._groups is not None:
            self._groups.use(self._groups.window_of(kept.pages))
        self.num_pages += num_new
        self._num_kept[kept.namespace] = self._num_kept.get(kept.namespace, 0) + num_new
        self._kept[last] = kept
        self._by_namespace.setdefault(kept.namespace, {})[last] = None
        self._await(kept.until_s, last)

    def _await(self, until_s: float, last: int) -> None:
        """Note when a retention ends; if most entries are out of date, they are removed."""
        heappush(self._deadlines, (until_s, last))
        if len(self._deadlines) > 2 * len(self._kept) + _SPARE_ENTRIES:
            self._deadlines = [(kept.until_s, last) for last, kept in self._kept.items()]
            heapify(self._deadlines)

    def _end(self, cache: LockingCache, last: int) -> Any:
        kept = self._kept.pop(last)
        self._num_held[kept.pages] -= 1
        if self._groups is not None:
            self._groups.let_go(self._groups.window_of(kept.pages))
        num_gone = int((self._num_held[kept.pages] == 0).sum())
        self.num_pages -= num_gone
        self._num_kept[kept.namespace] -= num_gone
        del self._by_namespace[kept.namespace][last]
        if not self._by_namespace[kept.namespace]:
            del self._by_namespace[kept.namespace], self._num_kept[kept.namespace]
        cache.unlock(kept.lease)
        return kept.lease
