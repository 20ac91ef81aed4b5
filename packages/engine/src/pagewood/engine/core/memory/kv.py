"""The KV memory of the running requests: rows, page lists and leases over a prefix cache and a page allocator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any, Literal

import numpy as np

from pagewood.engine.api import CachedPrefix, FinishReason
from pagewood.engine.core.cache_keys import Key
from pagewood.engine.core.memory.adapters import AdapterPool
from pagewood.engine.core.memory.caches import (
    CountingTiers,
    ExplainingCache,
    KeepingCache,
    Match,
    PrefixCache,
    ReleasingCache,
    SharedCache,
    TieredCache,
)
from pagewood.engine.core.memory.page_groups import PageAllocator, PageGroups
from pagewood.engine.core.memory.retention import Retention
from pagewood.engine.core.memory.states import Computed, SnapshotCache, StatePlaces
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.reasons import Notes, Reason
from pagewood.engine.core.request import Request

_SPARE_NEEDS, _SPARE_TOKENS, _SPARE_SHARE = 2, 1024, 256
"""An eviction frees more pages than are needed, so that most requests need none: _SPARE_NEEDS times as many as this
request needs, and those of _SPARE_TOKENS at least, but at most 1 / _SPARE_SHARE of all pages, which is what this costs
the cache. In a large pool that share alone would let one request wait for evictions that dozens of later ones need."""
_NO_PAGES: Int32 = np.empty(0, np.int32)
_CAUSES: dict[str, Literal["complete", "page_rounding", "evicted", "never_seen", "snapshot_evicted", "no_snapshot"]] = {
    "COMPLETE": "complete",
    "SNAPSHOT_EVICTED": "snapshot_evicted",
    "NO_SNAPSHOT": "no_snapshot",
    "PAGE_ROUNDING": "page_rounding",
    "EVICTED": "evicted",
    "NEVER_SEEN": "never_seen",
}
"""Causes that a client may know. That another namespace has more is none of its business."""


class KVSpace:
    """Gives requests rows and pages, and takes them back.

    Invariant: every page is free, or owned by the cache, or private to exactly one request with a row. Exactly the
    requests with a row hold a lease, and it covers their published pages.

    Args:
        make_cache: makes an empty cache, which keeps computed pages for other requests, and ends the cache that it made
            before.
        allocator: where fresh pages come from; `PageGroups` where layers have windows.
        page_size: positions per page.
        num_rows: requests that can hold a row at the same time.
        free_rows: rows that no request has, if other spaces give them to their requests too; None: all `num_rows`.
        retention: retains prefixes that are likely to return; None: they are evicted like others.
        adapters: have a slot for each request with a row; None: there are none.
        states: have a place for each request with a row; None: no layer is recurrent.
        notes: gets the reasons of evictions, and every admitted request is then explained; None: no reasons are kept.
    """

    __slots__ = (
        "_allocator", "_free_rows", "_make_cache", "_notes", "_retention", "adapters", "cache", "epoch", "groups",
        "num_evicted", "page_size", "snapshots", "states", "tiers",
    )  # fmt: skip

    def __init__(
        self,
        *,
        make_cache: Callable[[], PrefixCache],
        allocator: PageAllocator,
        page_size: int,
        num_rows: int,
        free_rows: list[int] | None = None,
        retention: Retention | None = None,
        adapters: AdapterPool | None = None,
        states: StatePlaces | None = None,
        notes: Notes | None = None,
    ) -> None:
        self._notes = notes
        self.states = states
        """The places of states; None: no layer is recurrent."""
        self.adapters = adapters
        """The slots of adapters; None: there are none."""
        self._make_cache = make_cache
        self._retention = retention
        self.cache = make_cache()  # written by: kv
        self.tiers = self.cache if isinstance(self.cache, TieredCache) else None
        """The cache, if it has lower tiers."""  # written by: kv
        self.snapshots: SnapshotCache | None = self._snapshots_of(self.cache)
        """The cache, if prefixes need a snapshot and it keeps them."""  # written by: kv
        self._allocator = allocator
        self.groups = allocator if isinstance(allocator, PageGroups) else None
        """The frames of pages; None: a page is its memory in all layers."""
        self._free_rows = list(range(num_rows - 1, -1, -1)) if free_rows is None else free_rows  # written by: kv
        self.page_size = page_size
        self.epoch = 0
        """Increases whenever pages are added to or removed from the cache."""  # written by: kv
        self.num_evicted = 0
        """Cached pages that were evicted to make room."""  # written by: kv

    @property
    def num_pages(self) -> int:
        """Pages in total."""
        return self._allocator.num_pages

    @property
    def num_ids(self) -> int:
        """The ids of pages are below it."""
        return self.num_pages if self.groups is None else self.groups.num_ids

    @property
    def num_free(self) -> int:
        """Pages without an owner."""
        return self._allocator.num_free

    @property
    def num_cached(self) -> int:
        """Pages that the cache owns; where layers have windows, as many as their memory makes up."""
        num_pages = self.cache.num_pages
        return num_pages if self.groups is None else self.groups.num_cached(num_pages)

    @property
    def num_locked(self) -> int:
        """Cached pages that cannot be evicted."""
        return self.cache.num_locked

    @property
    def num_free_by_rank(self) -> tuple[int, ...]:
        """Nothing: pages are not divided among ranks by request."""
        return ()

    @property
    def num_available(self) -> int:
        """Free pages, and cached ones that no request is using."""
        num_evictable = self.cache.num_evictable
        if self.groups is not None:
            return self.groups.num_available(num_evictable)
        return self._allocator.num_free + num_evictable

    @property
    def num_free_rows(self) -> int:
        """Requests that can still be given a row."""
        return len(self._free_rows)

    def place(self, request: Request, *, stays: bool = False, near: Sequence[int] = ()) -> KVSpace:
        """Return where a waiting request gets its memory."""
        return self

    def beside(self, request: Request, others: Sequence[Request]) -> Sequence[Request]:
        """Return those of some requests whose pages could become those of `request`: all."""
        return others

    def num_near(self, request: Request) -> Sequence[int]:
        """Return what `place` needs to know of lower tiers: nothing, since there is one place."""
        return ()

    @property
    def tier_counters(self) -> Any:
        """The counts of the lower tiers, which caches with the same tiers share; None: there are none."""
        return self.tiers.counters if isinstance(self.tiers, CountingTiers) else None

    def tier_counts(self) -> dict[str, int]:
        """Return the counts of the lower tiers by their names; empty if there are none."""
        counters = self.tier_counters
        return {} if counters is None else {one.name: getattr(counters, one.name) for one in fields(counters)}

    def peek(self, request: Request) -> int:
        """Return how many leading tokens of a waiting request are cached, without counting it as a use."""
        if self.snapshots is not None:
            return self.snapshots.peek(request.reusable_tokens(), request.key, needs_snapshot=True).num_tokens
        match = self.cache.peek(request.reusable_tokens(), request.key)
        return match.num_tokens if self.groups is None else self.groups.num_usable(match.pages) * self.page_size

    @property
    def shared(self) -> SharedCache | None:
        """The cache, if it can say what lower tiers have; None too with a decision log, which does not keep that."""
        return self.cache if self._notes is None and isinstance(self.cache, SharedCache) else None

    @property
    def can_probe(self) -> bool:
        """Whether `cached_share` knows of all tiers."""
        return self.tiers is None or self.shared is not None

    def probe(self, request: Request) -> object:
        """Ask the cache how much of a request it has, for `cached_share`."""
        shared = self.shared
        return self if shared is None else shared.probe(request.reusable_tokens(), request.key)

    def cached_share(self, request: Request) -> float | None:
        """Return the share of the whole pages of a probed request that is cached; None: a tier may still answer."""
        return self.found_share(request, request.probe)

    def found_share(self, request: Request, probe: object) -> float | None:
        """Return the same for what `probe` has returned."""
        num_possible, shared = self.num_reusable(request), self.shared
        num_found = self.peek(request) if shared is None else shared.num_found(probe)
        if num_found is None:
            return None
        return min(1.0, num_found / num_possible) if num_possible else 1.0

    def num_reusable(self, request: Request) -> int:
        """Return the tokens of a request that may come from the cache, whole pages."""
        return len(request.reusable_tokens()) // self.page_size * self.page_size

    def num_missing(self, request: Request, num_matched: int) -> int:
        """Return the pages that a waiting request needs at most for its known tokens, beyond its cached prefix."""
        num_pages = num_matched // self.page_size
        num_missing = -(-request.num_known // self.page_size) - num_pages
        if self.groups is None:
            return num_missing
        return self.groups.num_needed(num_missing, num_in_windows=min(num_pages, self.groups.reach))

    def has_room(self, request: Request, num_matched: int) -> bool:
        """Return whether a waiting request would get all pages for its known tokens, and a place for its state."""
        has_state = self.states is None or self.states.has_room(self.snapshots)
        return has_state and self.num_missing(request, num_matched) <= self.num_available

    def num_to_complete(self, request: Request) -> int:
        """Return the pages that a running request still needs at most for tokens already known."""
        num_missing = max(0, -(-request.num_known // self.page_size) - request.num_pages)
        if self.groups is None or not num_missing:
            return num_missing
        return self.groups.num_needed(num_missing, num_in_windows=request.num_pages - request.num_passed)

    def take(self, n: int, *, num_available: int) -> Int32 | None:
        """Return `[n]` pages for a prefix, owned by the caller, or None if fewer than `num_available` are available.

        Where layers have windows, only those that a hit at the end of the prefix reads have memory in all layers.
        """
        num_needed = n if self.groups is None else self.groups.num_for_hit(n)
        num_available = max(num_available, num_needed)
        if self.num_available < num_available and not self._regain(num_available):
            return None
        if self.groups is not None and n > self.groups.num_free_ids + self.cache.num_evictable:
            return None  # there may be fewer ids than a prefix has pages, if most of these need no memory
        self._make_room(num_needed)
        if self.groups is None:
            return self._allocator.alloc(n)
        if n > self.groups.num_free_ids:
            self._allocator.free(self.cache.evict(n - self.groups.num_free_ids))
            self.epoch += 1
        return self.groups.alloc_for_hit(n)

    def take_state(self) -> int | None:
        """Return a free place for the state at the end of a prefix, or None. The caller then owns the place."""
        return None if self.states is None or self.snapshots is None else self.states.lend(self.snapshots)

    def states_of(self, grant: Computed) -> tuple[tuple[int, int], Sequence[tuple[int, int]]]:
        """Return the places of states of a grant; see `StatePlaces.of_grant`."""
        assert self.states is not None
        return self.states.of_grant(grant, self.snapshots)

    def note_recalled(self) -> None:
        """Note that a recall has given pages to the cache."""
        self.epoch += 1

    def poll(self) -> None:
        """Let copies between tiers continue, and take back what they no longer need, while no request runs."""
        if self.tiers is not None:
            self.tiers.poll()

    def close(self) -> None:
        """Store the KV that must survive the process; no request may hold a row."""
        if self.tiers is not None:
            self.tiers.close()

    def admit(self, request: Request, *, max_tokens: int, num_reserved: int) -> int:
        """Give a waiting request a row, its cached prefix and pages for the next `max_tokens` positions, or decline.

        Args:
            request: waiting.
            max_tokens: positions it may compute in its first step, >= 1.
            num_reserved: pages that must still be available afterwards, beyond those that complete its known tokens.

        Returns:
            The number of positions that it can compute, after `num_matched` cached ones; 0 if declined, in which case
            nothing has changed.
        """
        if not self._free_rows:
            return 0
        match, window = self._match(request)
        lease = self.cache.lock(match.node)
        count = min(max_tokens, request.num_known - match.num_tokens)
        if request.images is not None and not (count := request.images.whole(match.num_tokens, count)):
            self._let_go(window)
            self.cache.unlock(lease)
            return 0
        num_matched_pages = len(match.pages)
        num_fresh = -(-(match.num_tokens + count) // self.page_size) - num_matched_pages
        num_needed = max(num_fresh, self.num_missing(request, match.num_tokens)) + num_reserved
        if not self._has(num_needed) or not self._has_state(request, lease, match.num_tokens):
            self._let_go(window)
            self.cache.unlock(lease)
            return 0
        if (request.explains or self._notes is not None) and request.num_cached < 0:
            request.cached_prefix = self._explained(request, match.num_tokens)
        if request.num_cached < 0:
            request.num_cached = match.num_tokens
        capacity = -(-request.max_length // self.page_size)
        if len(request.pages) != capacity:
            request.pages = np.empty(capacity, np.int32)
        request.row = self._free_rows.pop()
        request.lease = lease
        request.num_matched = request.num_computed = match.num_tokens
        request.num_published = request.num_pages = num_matched_pages
        request.num_passed = num_matched_pages - len(window)
        request.pages[:num_matched_pages] = match.pages
        self._append(request, num_fresh)
        if self.adapters is not None:
            self.adapters.hold(request)
        return count

    def touch(self, request: Request) -> None:
        """Count the cached prefix of a waiting request as used, as `admit` does if it declines."""
        match, window = self._match(request)
        self.cache.unlock(self.cache.lock(match.node))
        self._let_go(window)

    def grow(self, request: Request, num_tokens: int, *, num_reserved: int = 0) -> bool:
        """Give a running request pages for its first `num_tokens` positions, or decline and change nothing.

        Args:
            request: holds a row.
            num_tokens: positions that it must have pages for.
            num_reserved: pages that must still be available if it is given any.
        """
        num_missing = -(-num_tokens // self.page_size) - request.num_pages
        if num_missing > 0:
            if not self._has(num_missing + num_reserved):
                return False
            self._append(request, num_missing)
        return True

    def add_page_to_each(self, requests: Sequence[Request]) -> bool:
        """Give each running request one more page without evicting, or decline and change nothing."""
        if len(requests) > self._allocator.num_free:
            return False
        for request, page in zip(requests, self._allocator.alloc(len(requests)).tolist(), strict=True):
            end = request.num_pages
            request.pages[end] = page
            request.num_pages = end + 1
        return True

    def publish(self, request: Request) -> None:
        """Let the cache adopt the computed whole pages that it lacks; duplicates stay private until release.

        KV of several weights is not offered, and that of a request that would not fit beside its duplicates only at
        its release.
        """
        if request.renewed_key is not None:
            return
        if request.num_computed // self.page_size > request.num_published:
            if self._fits_beside_duplicates(request):
                self._offer(request)
        elif self.groups is not None and request.num_computed >= request.num_prompt:  # its end is in no new page
            self.groups.mark_end(request.pages[: request.num_prompt // self.page_size])
        if self.states is not None and self.snapshots is not None:
            self.states.offer(request, self.snapshots)

    def pass_windows(self, requests: Iterable[Request]) -> None:
        """Give back the frames of pages that are behind the windows of requests that have been computed further."""
        groups = self.groups
        if groups is None:
            return
        for request in requests:
            # What may still be computed, also in steps in flight, begins at `num_computed` or later.
            first = (request.num_computed + 1 - groups.window) // self.page_size
            if first > request.num_passed and request.row >= 0:
                self._pass(request, first)

    def release(self, request: Request) -> None:
        """Publish, then take back row, lease and private pages. No step in flight may use them."""
        assert request.num_in_flight == 0
        has_one_key = request.renewed_key is None
        if has_one_key and request.num_computed // self.page_size > request.num_published:
            self._offer(request)
        if self.states is not None:
            if has_one_key and self.snapshots is not None:
                self.states.offer(request, self.snapshots)
            self.states.end(request)
        if self.groups is not None:
            self.groups.mark_end(request.pages[: request.num_published])
            self._pass(request, request.num_pages)
        self._allocator.free(private_pages(request))
        self.cache.unlock(request.lease)
        if request.retain_s is not None and request.finish is not None and has_one_key:
            self._remember(request)
        if not has_one_key:
            request.key, request.renewed_key = request.renewed_key, None
        if self.adapters is not None:
            self.adapters.drop(request)
        self._free_rows.append(request.row)
        request.row = -1
        request.lease = None
        request.num_pages = 0
        request.num_published = 0
        request.num_passed = 0
        request.duplicates = ()

    @property
    def num_retained(self) -> int:
        """Cached pages that are kept from eviction because they are likely to return."""
        return 0 if self._retention is None else self._retention.num_pages

    def retain(self, tokens: Int32, key: Key, seconds: float, *, of_request: bool = False) -> int | None:
        """Retain the cached prefix of some tokens; return its length, or None if retention is off.

        Args:
            tokens: `[num_tokens] int32`.
            key: of the prefix.
            seconds: how long, at most.
            of_request: whether it is what a request has computed, so that a continuation of it may end it.
        """
        if self._retention is None:
            return None
        return self._retention.keep(self.cache, tokens, key, seconds, of_request=of_request, ended=self._drop_ended)

    def drop(self, tokens: Int32, key: Key) -> int:
        """Drop what only the cached prefix of some tokens needs; return how many pages that are."""
        match = self.cache.peek(tokens, key)
        if self._retention is not None and len(match.pages):
            self._retention.drop(self.cache, match.pages)
        return self._drop(match.node)

    def held_pages(self) -> Int32:
        """Return `[num_pages - num_free]` ids of the pages that are not free; reads the whole pool, for audits."""
        return self._allocator.held_pages()

    def held_frames(self) -> Int32:
        """Return the ids by which runners know the memory of the pages that are not free, for audits."""
        return self.held_pages() if self.groups is None else self.groups.held_frames()

    def violation(self, holders: Iterable[Request], *, is_recalling: bool = False) -> str | None:
        """Return a description of how the invariant is broken, or None if it holds.

        Args:
            holders: all requests with a row.
            is_recalling: whether copies from lower tiers may lock cached pages.
        """
        holders = list(holders)
        owned = np.concatenate([*map(private_pages, holders), np.empty(0, np.int32)])
        num_free = self.num_free if self.groups is None else self.num_ids - len(self.held_pages())
        total = num_free + self.cache.num_pages + len(owned)
        if total != self.num_ids:
            return (
                f"{num_free} free + {self.cache.num_pages} cached + {len(owned)} private pages are {total}, "
                f"not {self.num_ids}"
            )
        if len(np.unique(owned)) != len(owned):
            return "a page is private to two requests"
        if not holders and not is_recalling and self.cache.num_locked != self.num_retained:
            return (
                f"{self.cache.num_locked} cached pages are locked and {self.num_retained} retained, but no request "
                "holds a lease"
            )
        if self.states is not None:
            return self.states.violation(holders, self.snapshots)
        if self.groups is not None:
            users = [request.pages[request.num_passed : request.num_pages] for request in holders]
            return self.groups.violation(users, self.num_retained)
        return None

    def flush(self) -> int:
        """Drop the cached pages that no request uses, in host memory too; return how many the device had."""
        if self._retention is not None:
            self._retention.clear(self.cache)
        pages = self.cache.evict(self.cache.num_evictable) if self.tiers is None else self.tiers.clear()
        self._allocator.free(pages)
        self._reclaim()
        self.epoch += 1
        return len(pages)

    def empty(self) -> bool:
        """Give up all cached pages, those that lower tiers want after they were copied; return whether all are free.

        No request may hold a row. If pages are still read, the caller tries again later.
        """
        if self._retention is not None:
            self._retention.clear(self.cache)
        self._allocator.free(self.cache.evict(self.num_ids))
        if isinstance(self.cache, KeepingCache):
            self.cache.finish_copies()
        self._reclaim()
        self.epoch += 1
        return not len(self._allocator.held_pages())

    def heal(self) -> None:
        """Forget all cached prefixes and free every page. No request may wait or hold a row."""
        self.cache = self._make_cache()
        self.tiers = self.cache if isinstance(self.cache, TieredCache) else None
        self.snapshots = self._snapshots_of(self.cache)
        if self.states is not None:
            self.states.reset()
        if self._retention is not None:
            self._retention.reset()
        self._allocator.free(self._allocator.held_pages())
        self.epoch += 1

    def _snapshots_of(self, cache: PrefixCache) -> SnapshotCache | None:
        return cache if self.states is not None and isinstance(cache, SnapshotCache) else None

    def _has_state(self, request: Request, lease: Any, num_matched: int) -> bool:
        """Give a request that is being admitted a place for its states; return False if there is none."""
        if self.states is None:
            return True
        num_cached = self.cache.peek(request.reusable_tokens(), request.key).num_tokens
        return self.states.begin(request, self.snapshots, lease, start=num_matched, num_cached=num_cached)

    def _reclaim(self) -> None:
        """Take back the places of states that the cache has."""
        if self.states is not None and self.snapshots is not None:
            self.states.reclaim(self.snapshots)

    def _has(self, num_needed: int) -> bool:
        """Return whether pages are available, if need be after ending retentions."""
        if self._allocator.num_free >= num_needed or self.num_available >= num_needed:
            return True
        self._finish_copies()
        return self.num_available >= num_needed or self._regain(num_needed)

    def _finish_copies(self) -> None:
        """Wait for copies to lower tiers where layers have windows: the frames that they read are in use until then."""
        if self.groups is not None and isinstance(self.cache, KeepingCache):
            self.cache.finish_copies()

    def _match(self, request: Request) -> tuple[Match, Int32]:
        """Return the cached prefix that a waiting request can use, and the pages in its windows, which it uses now."""
        tokens = request.reusable_tokens()
        if self.snapshots is not None:
            return self.snapshots.match(tokens, request.key, needs_snapshot=True), _NO_PAGES
        match = self.cache.match(tokens, request.key)
        if self.groups is None:
            return match, _NO_PAGES
        num_usable = self.groups.num_usable(match.pages)
        if num_usable < len(match.pages):
            match = self.cache.match(tokens[: num_usable * self.page_size], request.key)
        window = self.groups.window_of(match.pages)
        self.groups.mark_end(window)
        self.groups.use(window)
        return match, window

    def _let_go(self, window: Int32) -> None:
        if self.groups is not None:
            self.groups.let_go(window)

    def _pass(self, request: Request, end: int) -> None:
        """Give back the frames in windows of the pages before `end`, to copies in the cache that have none if need be.

        Otherwise a prefix whose frames were taken could not be used again, however often it is computed.
        """
        assert self.groups is not None
        first, request.num_passed = request.num_passed, end
        ranges = [(max(start, first), min(stop, end)) for start, stop in request.duplicates]
        if any(start < stop for start, stop in ranges):
            cached = self.cache.peek(request.cached_ids(0, request.num_published * self.page_size), request.key).pages
            for start, stop in ranges:
                if start < stop <= len(cached):
                    self.groups.give(request.pages[start:stop], cached[start:stop])
        self.groups.let_go(request.pages[first:end])

    def _append(self, request: Request, num_fresh: int) -> None:
        """Allocate pages directly into the list of a request, evicting if there are too few; they must be available."""
        if num_fresh > self._allocator.num_free:
            if self._notes is not None:
                self._notes.note(Reason.EVICTED, request, None, num_fresh - self._allocator.num_free)
            self._make_room(num_fresh)
        end = request.num_pages + num_fresh
        self._allocator.alloc(num_fresh, out=request.pages[request.num_pages : end])
        request.num_pages = end

    def _offer(self, request: Request) -> None:
        """Insert the computed whole pages of a request that are not published, and move the lease to their end."""
        page_size, first = self.page_size, request.num_published
        end = request.num_computed // page_size
        insertion = self.cache.insert(
            request.cached_ids(first * page_size, end * page_size),
            request.pages[first:end],
            request.key,
            after=request.lease,
            relock=True,
        )
        request.lease = insertion.node
        if self.groups is not None:
            self.groups.adopt(request.pages[first + insertion.num_existing : end])
            if request.num_computed >= request.num_prompt > first * page_size:
                self.groups.mark_end(request.pages[: request.num_prompt // page_size])
        if insertion.num_existing:
            request.duplicates += ((first, first + insertion.num_existing),)
        request.num_published = end
        self.epoch += 1

    def _fits_beside_duplicates(self, request: Request) -> bool:
        """Return whether a request still fits into memory, alone and whole, if it publishes what it has computed.

        Pages that the cache has without a state are computed again. The cache can evict its own ones until the lease of
        the request reaches beyond them.
        """
        if self.snapshots is None:
            return True
        end = request.num_computed // self.page_size
        known = self.cache.peek(request.cached_ids(0, end * self.page_size), request.key).num_tokens // self.page_size
        num_duplicates = sum(last - first for first, last in request.duplicates)
        num_duplicates += max(0, known - request.num_published)
        num_needed = -(-request.max_length // self.page_size)
        if self.groups is not None:
            num_needed = self.groups.num_needed(num_needed)
        return not num_duplicates or num_needed + num_duplicates <= self.num_pages

    def _explained(self, request: Request, num_matched: int) -> CachedPrefix:
        """Return why no more than `num_matched` tokens of a request are cached, as if there was no other key."""
        tokens = request.reusable_tokens()
        if not isinstance(self.cache, ExplainingCache):
            return CachedPrefix(
                cause="no_cache",
                num_reusable_tokens=len(tokens),
                num_tokens=num_matched,
                first_difference=num_matched,
                num_possible_tokens=len(tokens),
            )
        needs = {} if self.snapshots is None else {"needs_snapshot": True}
        found = self.cache.explain(tokens, request.key, searches_others=False, **needs)
        if num_matched < found.num_tokens:
            return CachedPrefix(
                cause="window_evicted",
                num_reusable_tokens=len(tokens),
                num_tokens=num_matched,
                first_difference=found.first_difference,
                num_possible_tokens=found.num_tokens,
            )
        cause, num_possible = _CAUSES.get(found.cause.name), found.num_possible_tokens
        if cause is None:
            is_in_page = found.first_difference > num_matched or len(tokens) - num_matched < self.page_size
            cause, num_possible = "page_rounding" if is_in_page else "never_seen", found.first_difference
        return CachedPrefix(
            cause=cause,
            num_reusable_tokens=len(tokens),
            num_tokens=num_matched,
            first_difference=found.first_difference,
            num_possible_tokens=num_possible,
            evicted_by=found.evicted_by,
            evicted_s=found.evicted_at_s,
        )

    def _remember(self, request: Request) -> None:
        """Retain or drop the published prefix of a request that has ended, as the request says."""
        tokens = request.cached_ids(0, request.num_published * self.page_size)
        if not request.retain_s:
            self.drop(tokens, request.key)
        elif request.finish is not FinishReason.ERROR:
            self.retain(tokens, request.key, request.retain_s, of_request=True)

    def _regain(self, num_needed: int) -> bool:
        """End retentions until a number of pages is available; return whether it is."""
        self._expire()
        while self._retention is not None and self.num_available < num_needed:
            ended = self._retention.shrink(self.cache)
            if ended is None:
                return False
            self._drop_ended(ended)
        return self._retention is not None

    def _expire(self) -> None:
        """End the retentions whose time is over."""
        if self._retention is not None:
            for node in self._retention.expire(self.cache):
                self._drop_ended(node)

    def _drop_ended(self, node: Any) -> None:
        """Drop a prefix whose retention has ended, unless it can move to lower tiers: then it is evicted as others are.

        It is not unlocked as if it had just been used, because a client could keep more than the bound by that.
        """
        if self.tiers is None:
            self._drop(node)

    def _drop(self, node: Any) -> int:
        """Drop what no other sequence needs of a prefix; return how many pages that were."""
        if not isinstance(self.cache, ReleasingCache):
            return 0
        pages = self.cache.release(node, keeps_longer=True)
        self._allocator.free(pages)
        self.epoch += len(pages) > 0
        return len(pages)

    def _make_room(self, n: int) -> None:
        """Evict cached pages until n pages are free; they must be available."""
        self._expire()
        if n <= self._allocator.num_free:
            return
        spare = min(max(_SPARE_NEEDS * n, _SPARE_TOKENS // self.page_size), self._allocator.num_pages // _SPARE_SHARE)
        if self.groups is not None:
            self._trim(n + spare, ends=False)
        while n > self._allocator.num_free:
            evicted = self.cache.evict(n - self._allocator.num_free + spare)
            self.num_evicted += len(evicted)
            self._allocator.free(evicted)
            if self.groups is None or not len(evicted):
                break
        if self.groups is not None:
            if self.num_available < n:  # eviction has begun copies of what was available
                self._finish_copies()
            self._trim(n, ends=True)
        self.epoch += 1

    def _trim(self, n: int, *, ends: bool) -> None:
        """Free idle frames until n pages are free; lower tiers get those near the end of a prefix first."""
        assert self.groups is not None
        pages = self.groups.to_trim(n, ends=ends)
        if isinstance(self.cache, KeepingCache):
            self.cache.keep(self.groups.ends_of(pages))
        self.groups.drop_windows(pages)


def private_pages(request: Request) -> Int32:
    """Return the pages that a request owns: duplicates of published ones, and those not published yet."""
    rest = request.pages[request.num_published : request.num_pages]
    if not request.duplicates:
        return rest
    return np.concatenate([*(request.pages[start:end] for start, end in request.duplicates), rest])
