"""A prefix cache with lower tiers whose answers are recorded, and one that repeats recorded answers.

The answers of such a cache depend on the ends of copies, so a replay cannot compute them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagewood.engine.core.cache_keys import Key
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.request import Request


class RecordedCache:
    """Satisfies `TieredCache` and `WatchedCache` of the core; other attributes are those of the cache itself.

    Args:
        inner: the cache.
        answered: gets the method, and the parts of its answer that decisions depend on.
    """

    def __init__(self, inner: Any, answered: Callable[[str, Any], None]) -> None:
        self._inner = inner
        self._answered = answered
        self.lock, self.unlock, self.cancel = inner.lock, inner.unlock, inner.cancel
        self.poll, self.close, self.explain = inner.poll, inner.close, inner.explain

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the cache."""
        return getattr(self._inner, name)

    @property
    def num_pages(self) -> int:
        """Pages it owns."""
        return self._inner.num_pages

    @property
    def num_locked(self) -> int:
        """Pages on a locked path."""
        return self._inner.num_locked

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` can give back now."""
        found = self._inner.num_evictable
        self._answered("num_evictable", found)
        return found

    def match(self, tokens: Int32, namespace: Key = None) -> Any:
        """Return the longest cached prefix."""
        found = self._inner.match(tokens, namespace)
        self._answered("match", found.num_tokens)
        return found

    def peek(self, tokens: Int32, namespace: Key = None) -> Any:
        """Return the longest cached prefix; this does not count as a use."""
        found = self._inner.peek(tokens, namespace)
        self._answered("peek", found.num_tokens)
        return found

    def insert(
        self, tokens: Int32, pages: Int32, namespace: Key = None, *, after: Any = None, relock: bool = False
    ) -> Any:
        """Adopt the pages that the cache lacks."""
        found = self._inner.insert(tokens, pages, namespace, after=after, relock=relock)
        self._answered("insert", found.num_existing)
        return found

    def evict(self, num_pages: int) -> Int32:
        """Remove unlocked pages and return them."""
        found = self._inner.evict(num_pages)
        self._answered("evict", len(found))
        return found

    def clear(self) -> Int32:
        """Drop unused pages, and return the device's pages."""
        found = self._inner.clear()
        self._answered("clear", len(found))
        return found

    def recall(self, tokens: Int32, namespace: Key = None, *, priority: int = 0) -> Any | None:
        """Start to copy pages back from lower tiers."""
        found = self._inner.recall(tokens, namespace, priority=priority)
        self._answered("recall", found is not None)
        return found

    def advance(
        self,
        recall: Any,
        take: Callable[[int], Int32 | None],
        *,
        take_state: Callable[[], int | None] | None = None,
        priority: int | None = None,
    ) -> bool:
        """Continue a recall; states of recurrent layers are not recorded."""
        takes: list[int] = []

        def taken(n: int) -> Int32 | None:
            takes.append(n)
            return take(n)

        is_coming = self._inner.advance(recall, taken, priority=priority)
        self._answered("advance", [is_coming, recall.is_over, takes])
        return is_coming

    def watch_group(self) -> Any:
        """Return a group without watches."""
        return _RecordedGroup(self._inner.watch_group(), self._answered)


class _RecordedGroup:
    def __init__(self, inner: Any, answered: Callable[[str, Any], None]) -> None:
        self._inner = inner
        self._answered = answered
        self._watches: dict[int, Any] = {}
        """By arrival."""  # written by: watch

    def watch(self, owner: Request, tokens: Int32, namespace: Key = None) -> Any:
        watch = self._watches[owner.arrival] = self._inner.watch(owner, tokens, namespace)
        self._answered("watch", watch.num_tokens)
        return watch

    def changed(self) -> list[Request]:
        owners: list[Request] = self._inner.changed()
        self._answered("changed", [(owner.arrival, self._watches[owner.arrival].num_tokens) for owner in owners])
        return owners


@dataclass(slots=True)
class _Match:
    num_tokens: int
    pages: Int32
    node: None = None


@dataclass(slots=True)
class _Insertion:
    num_existing: int
    node: None = None


@dataclass(slots=True)
class _Recall:
    is_over: bool = False  # written by: recorded_tiers
    num_known: int = 0


class ReplayedCache:
    """Gives recorded answers; it knows the number of its pages, but not their content.

    Args:
        page_size: tokens per page.
        answer: returns the next answer of a method; None: there are no more.
    """

    num_locked = 0

    def __init__(self, page_size: int, answer: Callable[[str], Any]) -> None:
        self._page_size = page_size
        self._answer = answer
        self._pages: deque[int] = deque()
        """Pages that it owns."""  # written by: insert, advance, evict, clear

    @property
    def num_pages(self) -> int:
        """Pages it owns."""
        return len(self._pages)

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could give back."""
        return self._answer("num_evictable") or 0

    def match(self, tokens: Int32, namespace: Key = None) -> _Match:
        """Return a prefix of the recorded length; its pages are made up."""
        num_tokens = self._answer("match") or 0
        return _Match(num_tokens, np.zeros(num_tokens // self._page_size, np.int32))

    def peek(self, tokens: Int32, namespace: Key = None) -> _Match:
        """Return a prefix of the recorded length."""
        num_tokens = self._answer("peek") or 0
        return _Match(num_tokens, np.zeros(num_tokens // self._page_size, np.int32))

    def insert(
        self, tokens: Int32, pages: Int32, namespace: Key = None, *, after: Any = None, relock: bool = False
    ) -> _Insertion:
        """Adopt as many pages as the cache did."""
        num_existing = self._answer("insert") or 0
        self._pages.extend(pages[num_existing:].tolist())
        return _Insertion(num_existing)

    def lock(self, node: Any) -> None:
        """Do nothing."""

    def unlock(self, node: Any) -> None:
        """Do nothing."""

    def evict(self, num_pages: int) -> Int32:
        """Return as many pages as were evicted."""
        return self._drop(self._answer("evict") or 0)

    def clear(self) -> Int32:
        """Return as many pages as were dropped."""
        return self._drop(self._answer("clear") or 0)

    def recall(self, tokens: Int32, namespace: Key = None, *, priority: int = 0) -> _Recall | None:
        """Return a recall if there was one."""
        return _Recall() if self._answer("recall") else None

    def advance(
        self,
        recall: _Recall,
        take: Callable[[int], Int32 | None],
        *,
        take_state: Callable[[], int | None] | None = None,
        priority: int | None = None,
    ) -> bool:
        """Take the pages that were taken."""
        is_coming, recall.is_over, takes = self._answer("advance") or (False, True, ())
        for n in takes:
            pages = take(n)
            if pages is not None:
                self._pages.extend(pages.tolist())
        return is_coming

    def cancel(self, recall: _Recall) -> None:
        """Do nothing."""

    def poll(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def watch_group(self) -> Any:
        """Return a group without watches."""
        return _ReplayedGroup(self._answer)

    def _drop(self, num_pages: int) -> Int32:
        return np.array([self._pages.popleft() for _ in range(min(num_pages, len(self._pages)))], np.int32)


class _ReplayedGroup:
    def __init__(self, answer: Callable[[str], Any]) -> None:
        self._answer = answer
        self._watches: dict[int, tuple[Request, _Watch]] = {}
        """By arrival."""  # written by: watch

    def watch(self, owner: Request, tokens: Int32, namespace: Key = None) -> _Watch:
        watch = _Watch(self._answer("watch") or 0)
        self._watches[owner.arrival] = owner, watch
        return watch

    def changed(self) -> list[Request]:
        owners: list[Request] = []
        for arrival, num_tokens in self._answer("changed") or ():
            if arrival in self._watches:
                owner, watch = self._watches[arrival]
                watch.num_tokens = num_tokens
                owners.append(owner)
        return owners


@dataclass(slots=True)
class _Watch:
    num_tokens: int  # written by: recorded_tiers

    def close(self) -> None:
        """Do nothing."""
