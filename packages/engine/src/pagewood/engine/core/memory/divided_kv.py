"""KV memory that is divided among ranks by request: a pool of pages, and a prefix cache, for each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias, cast

import numpy as np

from pagewood.engine.core.cache_keys import Key
from pagewood.engine.core.memory.adapters import AdapterPool
from pagewood.engine.core.memory.caches import SharedCache, TieredCache
from pagewood.engine.core.memory.kv import KVSpace
from pagewood.engine.core.memory.page_groups import PageAllocator
from pagewood.engine.core.memory.states import Computed
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.request import Request


class PageRange:
    """Hands out pages whose ids begin at a number. Invariant: they are those of an allocator, and `first` more.

    Args:
        pages: hands out ids from 0 on.
        first: the lowest id.
    """

    __slots__ = ("_first", "_pages")

    def __init__(self, pages: PageAllocator, *, first: int) -> None:
        self._pages = pages
        self._first = np.int32(first)

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return self._pages.num_pages

    @property
    def num_free(self) -> int:
        """Pages that `alloc` can hand out."""
        return self._pages.num_free

    def alloc(self, n: int, *, out: Int32 | None = None) -> Int32:
        """Return `[n]` page ids, written to `out` if it is given; the caller owns them."""
        pages = self._pages.alloc(n, out=out)
        pages += self._first
        return pages

    def free(self, pages: Int32) -> None:
        """Take pages back."""
        self._pages.free(pages - self._first)

    def held_pages(self) -> Int32:
        """Return the ids of the pages that are not free."""
        return self._pages.held_pages() + self._first


class SharedCaches:
    """What the caches of several ranks say together of their lower tiers; see `SharedCache`.

    Args:
        caches: at least one.
    """

    __slots__ = ("_caches",)

    def __init__(self, caches: Sequence[SharedCache]) -> None:
        self._caches = tuple(caches)

    def keys_of(self, tokens: Int32, namespace: Key = None) -> list[bytes]:
        """Return the keys of the whole pages of these tokens, which are the same for all."""
        return self._caches[0].keys_of(tokens, namespace)

    def unstored(self) -> set[bytes]:
        """Return the keys of the pages that some of them are copying to tiers which other engines may use."""
        return set[bytes]().union(*(cache.unstored() for cache in self._caches))


class DividedKV:
    """Gives requests rows and pages of one rank each, and takes them back; see `KVSpace` for what it does not explain.

    A request is on one rank from its admission until its memory is released; if it was preempted, it may come back on
    another. Each rank has a space of its own: pages, places of states, cached prefixes, and what is evicted, reserved
    and refused there. Rows are common to all. Lower tiers are common to ranks whose caches have the same counters: to
    those of a host.

    Invariant: the pages of rank r have the ids `[r * num_pages / R, (r + 1) * num_pages / R)`, and all pages of a
    request are of its rank.

    Args:
        spaces: of the ranks, in their order, with equal numbers of pages and the same free rows; all or none of them
            have lower tiers.
    """

    __slots__ = ("spaces",)

    groups = None

    def __init__(self, spaces: Sequence[KVSpace]) -> None:
        self.spaces = tuple(spaces)

    @property
    def adapters(self) -> AdapterPool | None:
        """The slots of adapters, which all spaces share."""
        return self.spaces[0].adapters

    @property
    def tiers(self) -> TieredCache | None:
        """The cache of the first rank, if it has lower tiers; then those of the others have some too."""
        return self.spaces[0].tiers

    @property
    def _of_tiers(self) -> tuple[KVSpace, ...]:
        """A space of each of the lower tiers that some ranks have in common."""
        return tuple({id(space.tier_counters): space for space in reversed(self.spaces)}.values())

    def num_near(self, request: Request) -> Sequence[int]:
        """Return how many leading tokens of a waiting request each rank has, or can copy from tiers near it.

        Returns:
            `[R]`; empty where all have the same tiers, so that any can copy the same.
        """
        if len(self._of_tiers) == 1:
            return ()
        tokens = request.reusable_tokens()
        caches = [space.shared for space in self.spaces]
        return [0 if cache is None else cache.num_near(tokens, request.key) for cache in caches]

    @property
    def page_size(self) -> int:
        """Positions per page."""
        return self.spaces[0].page_size

    @property
    def num_pages(self) -> int:
        """Pages of all ranks."""
        return sum(space.num_pages for space in self.spaces)

    @property
    def num_ids(self) -> int:
        """The ids of pages are below it."""
        return self.num_pages

    @property
    def num_free(self) -> int:
        """Pages without an owner."""
        return sum(space.num_free for space in self.spaces)

    @property
    def num_free_by_rank(self) -> tuple[int, ...]:
        """The same, of each rank."""
        return tuple(space.num_free for space in self.spaces)

    @property
    def num_cached(self) -> int:
        """Pages that caches own."""
        return sum(space.num_cached for space in self.spaces)

    @property
    def num_locked(self) -> int:
        """Cached pages that cannot be evicted."""
        return sum(space.num_locked for space in self.spaces)

    @property
    def num_available(self) -> int:
        """Free pages, and cached ones that no request is using."""
        return sum(space.num_available for space in self.spaces)

    @property
    def num_evicted(self) -> int:
        """Cached pages that were evicted to make room."""
        return sum(space.num_evicted for space in self.spaces)

    @property
    def num_retained(self) -> int:
        """Cached pages that are kept from eviction because they are likely to return."""
        return sum(space.num_retained for space in self.spaces)

    @property
    def num_free_rows(self) -> int:
        """Requests that can still be given a row."""
        return self.spaces[0].num_free_rows

    @property
    def epoch(self) -> int:
        """Increases whenever pages are added to or removed from a cache."""
        return sum(space.epoch for space in self.spaces)

    def place(self, request: Request, *, stays: bool = False, near: Sequence[int] = ()) -> KVSpace:
        """Choose the rank of a waiting request; return its space, and correct `num_matched`.

        It is the rank with its longest cached prefix, among equal ones the one with most pages available. Ranks without
        room for its known tokens come behind those that have it, because it could wait long for a prefix there.

        Args:
            request: waiting.
            stays: whether its prefix is being copied to the rank where it was placed last, so that it stays there.
            near: what `num_near` returned when it was queued; it counts as cached.
        """
        if stays:
            space = self._of(request)
            request.num_matched = space.peek(request)
            return space
        matched = [space.peek(request) for space in self.spaces]

        def worth(rank: int) -> tuple[bool, int, int]:
            space, num_matched = self.spaces[rank], matched[rank]
            num_near = max(num_matched, near[rank] if near else 0)
            return space.has_room(request, num_matched), num_near, space.num_available

        request.kv_rank = rank = max(range(len(self.spaces)), key=worth)
        request.num_matched = matched[rank]
        return self.spaces[rank]

    def beside(self, request: Request, others: Sequence[Request]) -> Sequence[Request]:
        """Return those of some requests that are on the rank of `request`: only their pages could become its own."""
        return [other for other in others if other.kv_rank == request.kv_rank]

    def peek(self, request: Request) -> int:
        """Return how many leading tokens of a waiting request are cached on the rank that has most of them."""
        return max(space.peek(request) for space in self.spaces)

    @property
    def shared(self) -> SharedCaches | None:
        """What all have copied to lower tiers; see `KVSpace.shared`."""
        found = [space.shared for space in self._of_tiers]
        caches = tuple(cache for cache in found if cache is not None)
        return SharedCaches(caches) if len(caches) == len(found) else None

    @property
    def can_probe(self) -> bool:
        """Whether `cached_share` knows of all tiers."""
        return self.spaces[0].can_probe

    def probe(self, request: Request) -> object:
        """Ask the rank with its longest cached prefix, because lower tiers add most to that; each, if theirs differ."""
        if len(self._of_tiers) > 1:
            return tuple(space.probe(request) for space in self.spaces)
        return (max(self.spaces, key=lambda space: space.peek(request)).probe(request),) * len(self.spaces)

    def cached_share(self, request: Request) -> float | None:
        """Return the share of the whole pages of a probed request that a rank can have; None: a tier may answer yet."""
        probes = cast("tuple[object, ...]", request.probe)
        shares = [space.found_share(request, probe) for space, probe in zip(self.spaces, probes, strict=True)]
        known = [share for share in shares if share is not None]
        return max(known) if len(known) == len(shares) else None

    def num_reusable(self, request: Request) -> int:
        """Return the tokens of a request that may come from the cache, whole pages."""
        return self.spaces[0].num_reusable(request)

    def num_missing(self, request: Request, num_matched: int) -> int:
        """Return the pages that a waiting request needs at most for its known tokens, beyond its cached prefix."""
        return self.spaces[0].num_missing(request, num_matched)

    def num_to_complete(self, request: Request) -> int:
        """Return the pages that a running request still needs at most for tokens already known."""
        return self._of(request).num_to_complete(request)

    def grow(self, request: Request, num_tokens: int, *, num_reserved: int = 0) -> bool:
        """Give a running request pages for its first `num_tokens` positions, or decline and change nothing."""
        return self._of(request).grow(request, num_tokens, num_reserved=num_reserved)

    def add_page_to_each(self, requests: Sequence[Request]) -> bool:
        """Give each running request one more page without evicting, or decline and change nothing."""
        parts = [[request for request in requests if request.kv_rank == rank] for rank in range(len(self.spaces))]
        if any(len(part) > space.num_free for part, space in zip(parts, self.spaces, strict=True)):
            return False
        return all(space.add_page_to_each(part) for part, space in zip(parts, self.spaces, strict=True))

    def states_of(self, grant: Computed) -> tuple[tuple[int, int], Sequence[tuple[int, int]]]:
        """Return the places of states of a grant, on the rank of its request; see `StatePlaces.of_grant`."""
        return self._of(grant.request).states_of(grant)

    def publish(self, request: Request) -> None:
        """Let the cache of its rank adopt the computed whole pages that it lacks."""
        self._of(request).publish(request)

    def pass_windows(self, requests: Iterable[Request]) -> None:
        """Do nothing: no layer has a window."""

    def release(self, request: Request) -> None:
        """Publish, then take back row, lease and private pages. No step in flight may use them."""
        self._of(request).release(request)

    def retain(self, tokens: Int32, key: Key, seconds: float) -> int | None:
        """Retain the cached prefix of some tokens, where it is longest; see `KVSpace.retain`."""
        longest = max(self.spaces, key=lambda space: space.cache.peek(tokens, key).num_tokens)
        return longest.retain(tokens, key, seconds)

    def drop(self, tokens: Int32, key: Key) -> int:
        """Drop what only the cached prefixes of some tokens need; return how many pages that are."""
        return sum(space.drop(tokens, key) for space in self.spaces)

    def flush(self) -> int:
        """Drop the cached pages that no request uses; return how many there were."""
        return sum(space.flush() for space in self.spaces)

    def empty(self) -> bool:
        """Give up all cached pages; return whether all are free. No request may hold a row."""
        are_empty = [space.empty() for space in self.spaces]
        return all(are_empty)

    def heal(self) -> None:
        """Forget all cached prefixes and free every page. No request may wait or hold a row."""
        for space in self.spaces:
            space.heal()

    def tier_counts(self) -> dict[str, int]:
        """Return the counts of all lower tiers."""
        total = Counter[str]()
        for space in self._of_tiers:
            total.update(space.tier_counts())
        return dict(total)

    def poll(self) -> None:
        """Let copies between tiers continue, and take back what they no longer need, while no request runs."""
        for space in self.spaces:
            space.poll()

    def close(self) -> None:
        """Store the KV that must survive the process; no request may hold a row."""
        for space in self.spaces:
            space.close()

    def held_pages(self) -> Int32:
        """Return the ids of the pages that are not free; reads all pools, for audits."""
        return np.concatenate([space.held_pages() for space in self.spaces])

    def held_frames(self) -> Int32:
        """Return the ids by which runners know the memory of the pages that are not free, for audits."""
        return self.held_pages()

    def violation(self, holders: Iterable[Request], *, is_recalling: bool = False) -> str | None:
        """Return a description of how the invariant is broken, or None if it holds; see `KVSpace.violation`."""
        holders, first = list(holders), 0
        for rank, space in enumerate(self.spaces):
            own, end = [request for request in holders if request.kv_rank == rank], first + space.num_pages
            for request in own:
                pages = request.pages[: request.num_pages]
                if len(pages) and not first <= pages.min() <= pages.max() < end:
                    return f"rank {rank}: a request has a page that is not in [{first}, {end})"
            found = space.violation(own, is_recalling=is_recalling)
            if found is not None:
                return f"rank {rank}: {found}"
            first = end
        return None

    def _of(self, request: Request) -> KVSpace:
        return self.spaces[request.kv_rank]


AnyKV: TypeAlias = KVSpace | DividedKV
"""The KV memory of one engine."""
