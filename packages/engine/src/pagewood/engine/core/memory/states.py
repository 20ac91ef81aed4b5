"""The places of recurrent states: one for each request with a row, and copies, which the cache keeps as snapshots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from pagewood.engine.core.cache_keys import Key
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.request import Request

ZEROS = -1
"""The place of the state before the first position."""


class SnapshotMatch(Protocol):
    """A cached prefix that ends with a snapshot, if that was asked for."""

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
        """Handle for `lock`."""
        ...


@runtime_checkable
class SnapshotCache(Protocol):
    """A prefix cache that keeps places of states at the ends of prefixes; it owns those that it has adopted."""

    @property
    def num_snapshots(self) -> int:
        """Places that it owns."""
        ...

    def match(self, tokens: Int32, namespace: Key = None, *, needs_snapshot: bool = False) -> SnapshotMatch:
        """Return the longest cached prefix, if need be with a snapshot at its end; this counts as a use."""
        ...

    def peek(self, tokens: Int32, namespace: Key = None, *, needs_snapshot: bool = False) -> SnapshotMatch:
        """Return the same; this does not count as a use."""
        ...

    def attach(self, node: Any, snapshot: int) -> bool:
        """Adopt a place for a prefix; False: it has one already."""
        ...

    def snapshot(self, node: Any) -> int | None:
        """Return the place of a prefix, which still belongs to the cache."""
        ...

    def evict_snapshots(self, num_snapshots: int) -> Int32:
        """Return places that are not needed any more, and up to this number in all."""
        ...


class Computed(Protocol):
    """Positions of a request that a step computes."""

    @property
    def request(self) -> Request:
        """Whose they are."""
        ...

    @property
    def start(self) -> int:
        """The first."""
        ...

    @property
    def num_tokens(self) -> int:
        """Their number."""
        ...

    @property
    def num_promised(self) -> int:
        """Tokens that it may yield."""
        ...


@dataclass(slots=True, kw_only=True)
class _Held:
    """What a request with a row holds."""

    own: int
    source: int
    """The place that its next step reads."""  # written by: states
    wanted: tuple[int, ...]
    """Lengths of prefixes of which a copy is wanted, ascending."""
    copies: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Lengths of prefixes and the places of their copies, which the cache does not have yet."""
    # contents written by: states


class StatePlaces:
    """Gives requests the places of their states, and decides of which prefixes the cache gets copies.

    A step leaves a request's state in its own place. Copies are made by the device while it computes, behind whole
    pages: where a cached prefix went on without one, at the end of a prompt, every `interval` positions of a long one,
    and at the last page of an output, which a next turn continues. A place for a copy is taken from the cache if none
    is free, except for those within a prompt.

    Where a step in flight has drafts, the next one begins at its `start` or before. A copy is first asked for behind
    that, where no step in flight gets to, and again by every step that may compute its position, until one has: the
    last one that did has computed tokens that stayed. What an earlier one has left there, of drafts that were rejected,
    is never read, because the cache gets copies of computed positions only.

    Invariant: every place is free, or owned by the cache, or held by exactly one request with a row.

    Args:
        num_places: at least one for each row, or for each row of a rank's part.
        page_size: positions per page.
        interval: positions between copies within a prompt, a multiple of the page size.
        first: the lowest place, where ranks have places of their own.
    """

    __slots__ = ("_free", "_held", "_interval", "_page_size", "_places")

    def __init__(self, num_places: int, *, page_size: int, interval: int, first: int = 0) -> None:
        if interval < page_size or interval % page_size:
            raise ValueError(f"interval must be a multiple of page_size {page_size}, got {interval}")
        self._places = range(first, first + num_places)
        self._page_size = page_size
        self._interval = interval
        self._free = [*reversed(self._places)]  # contents written by: states
        self._held: dict[Request, _Held] = {}  # contents written by: states

    def begin(self, request: Request, cache: SnapshotCache | None, node: Any, *, start: int, num_cached: int) -> bool:
        """Give a request that gets a row a place, or decline.

        Args:
            request: gets a row.
            cache: has the copies; None: there is no cache.
            node: the locked prefix that it begins with.
            start: its length.
            num_cached: tokens of the longer prefix of which the cache has the pages.
        """
        own = self._take(cache)
        if own is None:
            return False
        source = ZEROS
        if start:
            assert cache is not None
            found = cache.snapshot(node)
            assert found is not None
            source = found
        wanted: tuple[int, ...] = ()
        if cache is not None:
            end = (request.num_known - 1) // self._page_size * self._page_size
            wanted = tuple(sorted({one for one in (num_cached, end) if start < one <= end}))
        self._held[request] = _Held(own=own, source=source, wanted=wanted)
        return True

    def has_room(self, cache: SnapshotCache | None) -> bool:
        """Return whether `begin` may find a place."""
        return bool(self._free) or (cache is not None and cache.num_snapshots > 0)

    def of_grant(
        self, grant: Computed, cache: SnapshotCache | None
    ) -> tuple[tuple[int, int], Sequence[tuple[int, int]]]:
        """Return the places that a grant launched now reads and leaves, and lengths and places of its copies."""
        held = self._held[grant.request]
        places, held.source = (held.source, held.own), held.own
        if cache is None:
            return places, ()
        end, num_computed = grant.start + grant.num_tokens, grant.request.num_computed
        copies = [copy for copy in held.copies if num_computed < copy[0] <= end]
        for length, is_spare in self._lengths(grant, held):
            place = self._take(None if is_spare else cache)
            if place is not None:
                held.copies.append((length, place))
                copies.append((length, place))
        return places, copies

    def offer(self, request: Request, cache: SnapshotCache) -> None:
        """Let the cache adopt the copies of published prefixes of a request, under its key."""
        held = self._held[request]
        end = min(request.num_computed, request.num_published * self._page_size)
        ready = [copy for copy in held.copies if copy[0] <= end]
        held.copies = [copy for copy in held.copies if copy[0] > end]
        for length, place in ready:
            node = cache.peek(request.cached_ids(0, length), request.key).node
            if not cache.attach(node, place):
                self._free.append(place)

    def end(self, request: Request) -> None:
        """Take back what a request holds that gives up its row."""
        held = self._held.pop(request)
        self._free += [held.own, *(place for _, place in held.copies)]

    def lend(self, cache: SnapshotCache) -> int | None:
        """Return a place for a state that comes back from a lower tier, which the cache owns from now on, or None.

        One place stays free, or with a request that frees it when it ends: if the cache owned all, and kept the state
        for a request that waits, that request could never begin.
        """
        num_held = len(self._held)
        num_lacking = max(1, 2 - num_held) - len(self._free)
        if num_lacking > 0:
            self._free += cache.evict_snapshots(num_lacking).tolist()
        return self._free.pop() if self._free and len(self._free) + num_held >= 2 else None

    def reclaim(self, cache: SnapshotCache) -> None:
        """Take back all places of the cache that no request is about to read."""
        self._free += cache.evict_snapshots(cache.num_snapshots).tolist()

    def reset(self) -> None:
        """Free all places; no request has a row, and the cache is a new one."""
        self._held.clear()
        self._free = [*reversed(self._places)]

    def violation(self, holders: Iterable[Request], cache: SnapshotCache | None) -> str | None:
        """Return a description of how the invariant is broken, or None if it holds."""
        if {*holders} != self._held.keys():
            return "those that hold states are not the requests with a row"
        held = [place for one in self._held.values() for place in (one.own, *(copy for _, copy in one.copies))]
        num_cached = 0 if cache is None else cache.num_snapshots
        known, num_places = {*held, *self._free}, len(self._places)
        if len(held) + len(self._free) + num_cached != num_places or len(known) < len(held):
            return (
                f"{len(self._free)} free + {len(held)} held + {num_cached} cached places of states are not "
                f"{num_places}, or one is there twice"
            )
        if not known <= {*self._places}:
            return f"a place of states is not in [{self._places.start}, {self._places.stop})"
        return None

    def _lengths(self, grant: Computed, held: _Held) -> Iterator[tuple[int, bool]]:
        """Return further prefixes that a grant copies the state of: lengths, and whether only to a place to spare."""
        start, end, interval = grant.start, grant.start + grant.num_tokens, self._interval
        wanted = {length for length in held.wanted if start < length <= end}
        last = held.wanted[-1] if held.wanted else 0
        within = {*range((start // interval + 1) * interval, min(end, last) + 1, interval)} - wanted
        first = end - max(1, grant.num_promised)
        length = first - first % self._page_size + self._page_size
        is_output = start >= grant.request.num_prompt
        if is_output and length <= end and all(copy[0] <= start for copy in held.copies):  # otherwise one is pending
            self._let_go(held, grant.request.num_computed)
            wanted.add(length)
        for length in sorted(wanted | within):
            yield length, length in within

    def _let_go(self, held: _Held, num_computed: int) -> None:
        """Free the copies of an output that the last one of computed positions makes superfluous."""
        done = [copy for copy in held.copies if copy[0] <= num_computed]
        for copy in done[:-1]:
            held.copies.remove(copy)
            self._free.append(copy[1])

    def _take(self, cache: SnapshotCache | None) -> int | None:
        if not self._free and cache is not None:
            self._free += cache.evict_snapshots(1).tolist()
        return self._free.pop() if self._free else None
