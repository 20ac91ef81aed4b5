"""The KV memory of the running requests: rows, page lists and leases over a prefix cache and a page allocator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from pagewood.engine.core.arrays import Int32
from pagewood.engine.core.state import Request


class Match(Protocol):
    """The longest cached prefix of some tokens."""

    @property
    def num_tokens(self) -> int:
        """Its length, whole pages."""
        ...

    @property
    def pages(self) -> Int32:
        """[num_tokens / page_size] page ids; owned by the cache."""
        ...

    @property
    def node(self) -> Any:
        """Handle to lock it by."""
        ...


class Insertion(Protocol):
    """What the cache did with offered pages."""

    @property
    def num_existing(self) -> int:
        """Leading pages that the cache already had: their offered duplicates stay the caller's."""
        ...

    @property
    def node(self) -> Any:
        """Handle of the whole inserted prefix."""
        ...


class PrefixCache(Protocol):
    """Token prefix -> page ids. Owns the pages that it adopted."""

    @property
    def num_pages(self) -> int:
        """Pages it owns."""
        ...

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` can give back now."""
        ...

    @property
    def num_locked(self) -> int:
        """Pages on a locked path."""
        ...

    def match(self, tokens: Int32, namespace: str | None = None) -> Match:
        """Find the longest cached prefix; it counts as a use."""
        ...

    def peek(self, tokens: Int32, namespace: str | None = None) -> Match:
        """Find the longest cached prefix; it does not count as a use."""
        ...

    def insert(self, tokens: Int32, pages: Int32, namespace: str | None = None, *, after: Any = None) -> Insertion:
        """Adopt the pages that are lacking; tokens and pages are those that follow the locked prefix `after`."""
        ...

    def lock(self, node: Any) -> Any:
        """Keep a prefix from eviction; return the handle that unlocks it."""
        ...

    def unlock(self, node: Any) -> None:
        """Undo one lock."""
        ...

    def evict(self, num_pages: int) -> Int32:
        """Disown up to num_pages unlocked pages and return them."""
        ...


class Watch(Protocol):
    """A match that stays true while the cache changes."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are cached now."""
        ...

    def close(self) -> None:
        """Stop watching."""
        ...


class WatchGroup(Protocol):
    """Watches that say which of them have changed."""

    def watch(self, owner: Request, tokens: Int32, namespace: str | None = None) -> Watch:
        """Return a match that stays true until it is closed."""
        ...

    def changed(self) -> list[Request]:
        """Return the owners of the open watches whose length has changed since the last call."""
        ...


@runtime_checkable
class WatchedCache(PrefixCache, Protocol):
    """A prefix cache that knows which waiting sequences are concerned when something comes or goes."""

    def watch_group(self) -> WatchGroup:
        """Return a group without watches."""
        ...


@runtime_checkable
class TieredCache(PrefixCache, Protocol):
    """A prefix cache that keeps evicted pages in other memories, and brings them back."""

    def recall(self, tokens: Int32, namespace: str | None = None) -> Any | None:
        """Begin to bring back what other memories have of these tokens; None: nothing."""
        ...

    def advance(self, recall: Any, take: Callable[[int], Int32 | None]) -> bool:
        """Do what is due, never wait; return whether to come back later. `take` gives pages to the cache, or None."""
        ...

    def cancel(self, recall: Any) -> None:
        """Call it off."""
        ...

    def poll(self) -> None:
        """Take in finished copies and begin new ones."""
        ...

    def close(self) -> None:
        """Write down what is to outlive the process, and end."""
        ...


class PageAllocator(Protocol):
    """Hands out page ids."""

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        ...

    @property
    def num_free(self) -> int:
        """Pages that `alloc` can hand out."""
        ...

    def alloc(self, n: int) -> Int32:
        """[n] page ids, now the caller's."""
        ...

    def free(self, pages: Int32) -> None:
        """Take pages back."""
        ...

    def held_pages(self) -> Int32:
        """[num_pages - num_free] page ids that are not free."""
        ...


@dataclass(frozen=True, slots=True)
class _NoMatch:
    num_tokens: int
    pages: Int32
    node: None


@dataclass(frozen=True, slots=True)
class _NothingAdopted:
    num_existing: int
    node: None


class NoPrefixCache:
    """A prefix cache that never has anything and never adopts a page: what runs when caching is switched off."""

    num_pages = 0
    num_evictable = 0
    num_locked = 0

    def match(self, tokens: Int32, namespace: str | None = None) -> _NoMatch:
        """Find nothing."""
        return _NoMatch(0, np.empty(0, np.int32), None)

    peek = match

    def insert(
        self, tokens: Int32, pages: Int32, namespace: str | None = None, *, after: object = None
    ) -> _NothingAdopted:
        """Adopt nothing."""
        return _NothingAdopted(len(pages), None)

    def lock(self, node: object) -> None:
        """Do nothing."""

    def unlock(self, node: object) -> None:
        """Do nothing."""

    def evict(self, num_pages: int) -> Int32:
        """Return nothing."""
        return np.empty(0, np.int32)


class KVSpace:
    """Gives requests rows and pages, and takes them back.

    Invariant: every page is free, or owned by the cache, or private to exactly one request with a row; a lease is
    held by exactly the requests with a row, and covers their published pages.

    Args:
        make_cache: makes an empty cache, where computed pages are kept for others, and ends the one it made before.
        allocator: where fresh pages come from.
        page_size: positions per page.
        num_rows: requests that can hold a row at the same time.
        follows_waiting: whether the order of the queue reads how much of each request is cached.

    Raises:
        ValueError: requests are to be followed, and the cache has no watches.
    """

    __slots__ = (
        "_allocator", "_cache", "_follows_waiting", "_free_rows", "_group", "_make_cache", "_num_recalling", "_tiers",
        "epoch", "page_size",
    )  # fmt: skip

    def __init__(
        self,
        *,
        make_cache: Callable[[], PrefixCache],
        allocator: PageAllocator,
        page_size: int,
        num_rows: int,
        follows_waiting: bool = False,
    ) -> None:
        self._make_cache = make_cache
        self._follows_waiting = follows_waiting
        self._cache = make_cache()  # written by: kv
        self._tiers = self._cache if isinstance(self._cache, TieredCache) else None  # written by: kv
        self._group = self._new_group()  # written by: kv
        self._num_recalling = 0  # written by: kv
        self._allocator = allocator
        self._free_rows = list(range(num_rows - 1, -1, -1))  # written by: kv
        self.page_size = page_size
        self.epoch = 0
        """Changes whenever what is cached changes."""  # written by: kv

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return self._allocator.num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return self._allocator.num_free

    @property
    def num_cached(self) -> int:
        """Pages that the cache owns."""
        return self._cache.num_pages

    @property
    def num_available(self) -> int:
        """Pages that can be had: free ones, and cached ones that no request is using."""
        return self._allocator.num_free + self._cache.num_evictable

    @property
    def num_free_rows(self) -> int:
        """Requests that can still be given a row."""
        return len(self._free_rows)

    @property
    def num_recalling(self) -> int:
        """Waiting requests whose KV may be on its way back from another memory."""
        return self._num_recalling

    def follow(self, request: Request) -> None:
        """Keep `num_matched` of a request that begins to wait true, if the order of the queue reads it."""
        if self._group is not None:
            watch = self._group.watch(request, self._reusable(request), request.namespace)
            request.watch = watch
            request.num_matched = watch.num_tokens

    def changed(self) -> list[Request]:
        """Return the followed requests of which more or less is cached than when this was last asked."""
        if self._group is None:
            return []
        requests = self._group.changed()
        for request in requests:
            self.probe(request)
        return requests

    def probe(self, request: Request) -> None:
        """Refresh `num_matched` of a waiting request."""
        watch: Any = request.watch
        if watch is not None:
            request.num_matched = watch.num_tokens
        elif request.matched_epoch != self.epoch:
            request.matched_epoch = self.epoch
            request.num_matched = self._cache.peek(self._reusable(request), request.namespace).num_tokens

    def recall(self, request: Request, *, num_reserved: int) -> bool:
        """Bring back KV of a waiting request from other memories; return whether to admit it later, when it is there.

        Pages to load it to are taken when `admit` would accept the request, so that they are there for it to have.

        Args:
            request: waiting.
            num_reserved: as for `admit`.
        """
        tiers = self._tiers
        if tiers is None or (request.is_recalled and request.recall is None):
            return False
        if not request.is_recalled:
            request.is_recalled = True
            request.recall = tiers.recall(self._reusable(request), request.namespace)
            if request.recall is None:
                return False
            self._num_recalling += 1

        def take(n: int) -> Int32 | None:
            num_matched = self._cache.peek(self._reusable(request), request.namespace).num_tokens
            num_missing = -(-request.num_known // self.page_size) - num_matched // self.page_size
            return self._take(n) if self.num_available >= max(n, num_missing + num_reserved) else None

        recall: Any = request.recall
        is_coming = tiers.advance(recall, take)
        if recall.is_over:
            self._end_recall(request)
            self.epoch += 1  # what has arrived can be matched
        return is_coming

    def forget(self, request: Request) -> None:
        """Stop watching and bringing back KV of a request that waits no more."""
        watch: Any = request.watch
        if watch is not None:
            watch.close()
            request.watch = None
        self._end_recall(request)

    def _end_recall(self, request: Request) -> None:
        if request.recall is not None and self._tiers is not None:
            self._tiers.cancel(request.recall)
            self._num_recalling -= 1
        request.recall = None

    def poll(self) -> None:
        """Let copies between memories go on while the engine is idle."""
        if self._tiers is not None:
            self._tiers.poll()

    def close(self) -> None:
        """Write down what is to outlive the process; no request may hold a row."""
        if self._tiers is not None:
            self._tiers.close()

    def admit(self, request: Request, *, max_tokens: int, num_reserved: int) -> int:
        """Give a waiting request a row, its cached prefix and pages for the next `max_tokens` positions, or decline.

        The last known token is never taken from the cache, because its logits are needed.

        Args:
            request: waiting.
            max_tokens: positions it may compute in its first step, >= 1.
            num_reserved: pages that must still be available afterwards, beyond those that complete its known tokens.

        Returns:
            The number of positions it can compute, after `num_matched` cached ones; 0: declined, nothing has changed.
        """
        if not self._free_rows:
            return 0
        match = self._cache.match(self._reusable(request), request.namespace)
        lease = self._cache.lock(match.node)
        count = min(max_tokens, request.num_known - match.num_tokens)
        num_matched_pages = len(match.pages)
        to_complete = -(-request.num_known // self.page_size) - num_matched_pages
        if self.num_available < to_complete + num_reserved:
            self._cache.unlock(lease)
            return 0
        fresh = self._take(-(-(match.num_tokens + count) // self.page_size) - num_matched_pages)
        self.forget(request)
        if request.num_cached < 0:
            request.num_cached = match.num_tokens
        capacity = -(-request.max_length // self.page_size)
        if len(request.pages) != capacity:
            request.pages = np.empty(capacity, np.int32)
            request.private = np.empty(capacity, np.bool_)
        request.row = self._free_rows.pop()
        request.lease = lease
        request.num_matched = request.num_computed = match.num_tokens
        request.num_published = request.num_pages = num_matched_pages
        request.pages[:num_matched_pages] = match.pages
        request.private[:num_matched_pages] = False
        self._append(request, fresh)
        return count

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Give a running request pages for its first `num_tokens` positions, or decline and change nothing."""
        num_missing = -(-num_tokens // self.page_size) - request.num_pages
        if num_missing > self.num_available:
            return False
        if num_missing > 0:
            self._append(request, self._take(num_missing))
        return True

    def add_page_to_each(self, requests: Sequence[Request]) -> bool:
        """Give each running request one more page if so many are free, else change nothing: `grow` may evict."""
        if len(requests) > self._allocator.num_free:
            return False
        for request, page in zip(requests, self._allocator.alloc(len(requests)).tolist(), strict=True):
            request.pages[request.num_pages] = page
            request.private[request.num_pages] = True
            request.num_pages += 1
        return True

    def publish(self, request: Request) -> None:
        """Let the cache adopt the computed whole pages that it lacks; duplicates stay private until release."""
        first, end = request.num_published, request.num_computed // self.page_size
        if end <= first:
            return
        insertion = self._cache.insert(
            request.tokens[first * self.page_size : end * self.page_size],
            request.pages[first:end],
            request.namespace,
            after=request.lease,
        )
        request.private[first + insertion.num_existing : end] = False
        lease = self._cache.lock(insertion.node)
        self._cache.unlock(request.lease)
        request.lease = lease
        request.num_published = end
        self.epoch += 1

    def release(self, request: Request) -> None:
        """Publish, then take back row, lease and private pages. Nothing of the request may be in flight."""
        assert request.num_in_flight == 0
        self.publish(request)
        held = request.pages[: request.num_pages]
        self._allocator.free(held[request.private[: request.num_pages]])
        self._cache.unlock(request.lease)
        self._free_rows.append(request.row)
        request.row = -1
        request.is_recalled = False
        request.lease = None
        request.num_pages = 0
        request.num_published = 0

    def held_pages(self) -> Int32:
        """[num_pages - num_free] ids of the pages that somebody owns, for audits: reads the whole pool."""
        return self._allocator.held_pages()

    def violation(self, holders: Iterable[Request]) -> str | None:
        """Say how the invariant is broken, given all requests with a row; None: it holds."""
        holders = list(holders)
        private = [request.pages[: request.num_pages][request.private[: request.num_pages]] for request in holders]
        owned = np.concatenate([*private, np.empty(0, np.int32)])
        total = self.num_free + self.num_cached + len(owned)
        if total != self.num_pages:
            return (
                f"{self.num_free} free + {self.num_cached} cached + {len(owned)} private pages are {total}, "
                f"not {self.num_pages}"
            )
        if len(np.unique(owned)) != len(owned):
            return "a page is private to two requests"
        if not holders and not self._num_recalling and self._cache.num_locked:
            return f"{self._cache.num_locked} cached pages are locked, but no request holds a lease"
        return None

    def heal(self) -> None:
        """Forget all cached prefixes and make every page free. No request may wait or hold a row."""
        self._cache = self._make_cache()
        self._tiers = self._cache if isinstance(self._cache, TieredCache) else None
        self._group = self._new_group()
        self._allocator.free(self._allocator.held_pages())
        self.epoch += 1

    def _new_group(self) -> WatchGroup | None:
        if not self._follows_waiting:
            return None
        if not isinstance(self._cache, WatchedCache):
            raise ValueError(f"make_cache must make a cache with watches, got {type(self._cache).__name__}")
        return self._cache.watch_group()

    def _reusable(self, request: Request) -> Int32:
        return request.tokens[: request.num_known - 1]

    def _append(self, request: Request, fresh: Int32) -> None:
        end = request.num_pages + len(fresh)
        request.pages[request.num_pages : end] = fresh
        request.private[request.num_pages : end] = True
        request.num_pages = end

    def _take(self, n: int) -> Int32:
        """Allocate n available pages, evicting cached ones as needed."""
        num_lacking = n - self._allocator.num_free
        if num_lacking > 0:
            self._allocator.free(self._cache.evict(num_lacking))
            self.epoch += 1
        return self._allocator.alloc(n)
