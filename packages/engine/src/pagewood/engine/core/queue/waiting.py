"""The waiting requests: their order, how much of each is cached, and which are parked behind another's prompt."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol, runtime_checkable

from pagewood.engine.core.cache_keys import Key
from pagewood.engine.core.memory.caches import PrefixCache
from pagewood.engine.core.memory.divided_kv import AnyKV, DividedKV
from pagewood.engine.core.memory.kv import KVSpace
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.queue.quota_queue import QuotaQueue
from pagewood.engine.core.reasons import Notes, Reason
from pagewood.engine.core.request import Request

_MAX_EXAMINED = 256
"""Requests that one pass looks at, not counting those that it defers or that wait for their tenant."""
_MAX_SET_ASIDE = 1024
"""Requests that one pass parks where tenants have limits, so that a flood of one tenant does not make a step long."""
Claim = tuple[Request, int]
"""A waiting request that will be admitted when a prompt or copies of its prefix are done, and the pages that it needs
then for its known tokens."""
_LOOK_AGAIN_S = 0.02
"""Seconds between two searches for pages that another engine publishes."""
_NEXT_PAGE_S = 2.0
"""A request that waits for such pages is computed if no further one has come for so long."""
_MAX_PRIORITIES = 64
"""Priorities whose preemptions are counted by themselves."""


class Order(Protocol):
    """Decides in which order waiting requests are admitted."""

    def add(self, request: Request) -> None:
        """Add a request: a new one, or one that was preempted."""
        ...

    def remove(self, request: Request) -> None:
        """Remove a request that ended while it waited."""
        ...

    def park(self, request: Request) -> None:
        """Remove a request for now; it keeps its place until it is added again, or stopped because it ended."""
        ...

    def admit(self, request: Request) -> None:
        """Remove a request that was admitted."""
        ...

    def stop(self, request: Request) -> None:
        """Note that an admitted request ended or was preempted, or that a parked one ended."""
        ...

    def update(self, request: Request) -> None:
        """Note that the priority or the match of a request has changed."""
        ...

    def ordered(self, now_s: float) -> Iterator[Request]:
        """Yield the requests in the order of admission; nothing may be added, removed or updated meanwhile."""
        ...


class Deferral(Protocol):
    """Parks requests whose prompt repeats one that is being computed, until the repeated part is cached."""

    def start(self, request: Request) -> None:
        """Note that the prompt of an admitted request is being computed."""
        ...

    def stop(self, request: Request) -> None:
        """Note that a running request has ended or was preempted."""
        ...

    def defer(self, request: Request) -> bool:
        """Park a waiting request if it will match much more of a prompt in progress; return whether it is parked."""
        ...

    def leader_of(self, request: Request) -> Request | None:
        """Return the running request that a parked one waits for; None: it is not parked, or ready."""
        ...

    def num_awaited(self, request: Request) -> int:
        """Return how many leading tokens of a parked request its leader holds once ready; 0 if the leader stopped."""
        ...

    def discard(self, request: Request) -> None:
        """Forget a parked request that has ended."""
        ...

    def ready(self) -> list[Request]:
        """Remove and return the parked requests that need not wait any longer; called once before each pass."""
        ...

    def __contains__(self, request: Request, /) -> bool:
        """Return whether the request is parked."""
        ...

    def __iter__(self) -> Iterator[Request]:
        """Yield the parked requests."""
        ...

    def __len__(self) -> int:
        """Return how many requests are parked."""
        ...


class Lending(Protocol):
    """Decides which running requests have the priority of a parked one, because that waits for them."""

    def lend(self, lender: Request, borrower: Request) -> None:
        """Note that `lender` waits for `borrower` from now on."""
        ...

    def take_back(self, lender: Request) -> None:
        """Note that a request no longer waits for another, or has ended."""
        ...

    def update(self) -> None:
        """Note that the own priority of a parked or a running request has changed."""
        ...

    def stop(self, borrower: Request) -> None:
        """Note that a request does not run any longer."""
        ...

    def settle(self) -> Iterable[tuple[Request, int]]:
        """Yield the requests whose priority must change, with the new one."""
        ...


class Watch(Protocol):
    """The match of one sequence, kept up to date while the cache changes."""

    @property
    def num_tokens(self) -> int:
        """Leading tokens that are cached now."""
        ...

    def close(self) -> None:
        """Stop watching."""
        ...


class WatchGroup(Protocol):
    """Several watches, with a list of those that have changed."""

    def watch(self, owner: Request, tokens: Int32, namespace: Key = None) -> Watch:
        """Return a match that is kept up to date until it is closed."""
        ...

    def changed(self) -> list[Request]:
        """Return the owners of the open watches whose length has changed since the last call."""
        ...


@runtime_checkable
class WatchedCache(PrefixCache, Protocol):
    """A prefix cache that can keep matches up to date."""

    def watch_group(self) -> WatchGroup:
        """Return a group without watches."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class _Entry:
    """What the queue keeps about one request."""

    priority: int | None = None
    """The priority under which it is counted; None: it is not in the order."""  # written by: waiting
    watch: Watch | None = None
    """Keeps `num_matched` up to date; None: it is looked up when the request is examined."""  # written by: waiting
    matched_epoch: int = -1
    """The `KVSpace.epoch` at which `num_matched` was last looked up without a watch."""  # written by: waiting
    searched: KVSpace | None = None
    """For which space the lower tiers have been searched for its prefix, since it was queued; its recall is there."""
    # written by: waiting
    is_coming: bool = False
    """Whether copies of its prefix are awaited."""  # written by: waiting
    near: Sequence[int] | None = None
    """What `num_near` of the KV memory found when it was placed first; None: it was not placed yet."""
    # written by: waiting
    num_found: int = -1
    """Most tokens that were cached when the lower tiers had been searched, if it waits for pages of another engine."""
    # written by: waiting
    looks_again_s: float = -inf
    """When they are searched again."""  # written by: waiting
    gives_up_s: float = -inf
    """When it is computed without further pages of another engine."""  # written by: waiting
    recall: Any = None
    """Copy of its prefix from a lower tier that is in progress; None: no copy is in progress."""  # written by: waiting


class WaitingQueue:
    """The requests without a row. Invariant: each is in the order or parked; only those in the order have a watch.

    A request is parked behind another's prompt, or because its tenant is at its limit.

    Args:
        order: decides which request is next; must be empty, and from now on only this queue changes it.
        kv: the cache in which requests are matched.
        deferral: parks requests that repeat a prompt in progress; None: requests are never parked.
        lending: lends the priority of a parked request to the one that it waits for; None: each keeps its own.
        is_watching: whether the order compares requests by how much of them is cached.
        quota_queue: for requests whose tenant is at its limit; None: tenants have no limits.
        notes: gets the reasons of decisions; None: no reasons are kept.

    Raises:
        ValueError: `is_watching`, and the cache has no watches, or there is one for each of several ranks.
    """

    __slots__ = (
        "_deferral", "_entries", "_group", "_is_watching", "_kv", "_lending", "_notes", "_num_by_priority", "_order",
        "_parked", "_quota_queue", "_recalling", "_top_parked", "preempted",
    )  # fmt: skip

    def __init__(
        self,
        *,
        order: Order,
        kv: AnyKV,
        deferral: Deferral | None,
        is_watching: bool,
        lending: Lending | None = None,
        quota_queue: QuotaQueue | None = None,
        notes: Notes | None = None,
    ) -> None:
        self._notes = notes
        self._order = order
        self._kv = kv
        self._deferral = deferral
        self._lending = lending
        self._quota_queue = quota_queue
        self._is_watching = is_watching
        self._group = self._new_group()  # written by: waiting
        self._entries: dict[int, _Entry] = {}
        """Arrival number -> entry."""  # written by: waiting
        self._parked: list[Request] = []
        """Parked in this pass, still in the order."""  # written by: waiting
        self._num_by_priority: dict[int, int] = {}
        """Priority -> requests in the order."""  # written by: waiting
        self._recalling: dict[int, Claim] = {}
        """Arrival number -> claim of a request with a recall."""  # written by: waiting
        self._top_parked: float = -inf
        """An upper bound of the priorities of requests that are parked behind a prompt."""  # written by: waiting
        self.preempted: dict[int, int] = {}
        """Priority -> how often a request that had run was queued again, for a bounded number of priorities; the last
        of them counts for all others."""  # written by: waiting

    def __len__(self) -> int:
        """Return how many requests wait."""
        return len(self._entries)

    def __contains__(self, request: Request) -> bool:
        """Return whether a request waits."""
        return request.arrival in self._entries

    @property
    def num_candidates(self) -> int:
        """Waiting requests that are not parked."""
        num_parked = 0 if self._deferral is None else len(self._deferral)
        return len(self._entries) - num_parked - self.num_at_quota

    @property
    def top_priority(self) -> float:
        """The highest priority of the waiting requests that are not parked; -inf if there are none."""
        return max(self._num_by_priority, default=-inf)

    @property
    def num_at_quota(self) -> int:
        """Waiting requests that are parked because their tenant is at its limit."""
        return 0 if self._quota_queue is None else len(self._quota_queue)

    def num_at_quota_of(self, tenants: Collection[str]) -> int:
        """Return how many of these belong to some tenants, and wait until a request of their tenant stops."""
        return 0 if self._quota_queue is None else self._quota_queue.num_of(tenants)

    @property
    def num_recalling(self) -> int:
        """Waiting requests with a recall: their prefix is being copied back from a lower tier."""
        return len(self._recalling)

    def is_parked(self, request: Request) -> bool:
        """Return whether a waiting request waits for the prompt of another one, or for its tenant's other requests."""
        if self.is_at_quota(request):
            return True
        return self._deferral is not None and request in self._deferral

    def is_at_quota(self, request: Request) -> bool:
        """Return whether a waiting request waits because its tenant is at its limit."""
        return self._quota_queue is not None and request in self._quota_queue

    def is_recalling(self, request: Request) -> bool:
        """Return whether the prefix of a waiting request is being copied back from a lower tier."""
        entry = self._entries.get(request.arrival)
        return entry is not None and entry.recall is not None

    def place(self, request: Request) -> KVSpace:
        """Choose where a request of this pass gets its memory, after a look at the tiers near each rank, once."""
        entry = self._entries[request.arrival]
        if entry.near is None:
            entry.near = self._kv.num_near(request)
        return self._kv.place(request, stays=entry.is_coming, near=entry.near)

    def stays(self, request: Request) -> bool:
        """Return whether a waiting request must stay where it was placed, because copies of its prefix go there."""
        return self._entries[request.arrival].is_coming

    def add(self, request: Request) -> None:
        """Queue a request: a new one, or one that was preempted or paused alone."""
        self._entries[request.arrival] = _Entry()
        if self._quota_queue is not None and self._quota_queue.join(request):
            self._order.add(request)
            self._order.park(request)
            if self._notes is not None:
                self._notes.note(Reason.HELD_BACK, request)
        else:
            self._enter(request)

    def remove(self, request: Request) -> None:
        """Drop a request that has ended."""
        is_parked = self.is_parked(request)
        if self._quota_queue is not None:
            self._quota_queue.discard(request)
        if self._deferral is not None and request in self._deferral:
            self._deferral.discard(request)
            self._take_back(request)
        if is_parked:
            self._order.stop(request)
        else:
            self._order.remove(request)
        self._forget(request)

    def stopped(self, request: Request) -> None:
        """Note that a running request has ended or was preempted."""
        self.suspended(request)
        self._order.stop(request)
        if self._quota_queue is not None:
            self._quota_queue.stop(request)

    def suspended(self, request: Request) -> None:
        """Note that a running request is paused alone: nothing is to wait for its prompt."""
        if self._lending is not None:
            self._lending.stop(request)
            request.priority = request.own_priority
        if self._deferral is not None:
            self._deferral.stop(request)

    def resumed(self, request: Request) -> None:
        """Note that a suspended request runs again."""
        if self._deferral is not None:
            self._deferral.start(request)

    def update(self, request: Request) -> None:
        """Note that the priority of a waiting or a running request has changed."""
        if self._lending is not None:
            self._lending.update()
        entry = self._entries.get(request.arrival)
        if entry is None:
            return
        if self._quota_queue is not None and request in self._quota_queue:
            self._quota_queue.update(request)
        elif self.is_parked(request):
            self._top_parked = max(self._top_parked, request.priority)
        else:
            self._order.update(request)
            self._uncount(entry)
            self._count(entry, request.priority)

    def begin_step(self) -> bool:
        """Put the parked requests that need not wait any longer into the order, and settle what priorities are lent.

        Returns:
            Whether the priority of a running request has changed.
        """
        has_changed = False
        if self._entries:
            self._unpark()
        if self._lending is not None:
            for request, priority in self._lending.settle():
                request.priority, has_changed = priority, True
        return has_changed

    def examine(self, now_s: float, *, first: Request | None = None) -> Iterator[Request]:
        """Begin a pass, after `begin_step`: yield requests in the order of admission, with up-to-date `num_matched`.

        Close the pass with `end_pass`. Until then requests may be deferred, recalled and left to wait for their tenant,
        and none may be added or removed.

        Args:
            now_s: time on the engine's clock.
            first: a waiting request that comes before all others, unless it is parked.
        """
        if self._group is not None:
            for request in self._group.changed():
                self.match(request)
                self._order.update(request)
        num_examined = 0
        if first is not None and self.is_parked(first):
            first = None
        ordered = self._order.ordered(now_s)
        for request in ordered if first is None else _with_first(first, ordered):
            self.match(request)
            num_parked = len(self._parked)
            yield request
            num_examined += len(self._parked) == num_parked
            if num_examined == _MAX_EXAMINED or (self._quota_queue is not None and len(self._parked) == _MAX_SET_ASIDE):
                return

    def claims_above(self, priority: int) -> list[Claim]:
        """Return the requests of a higher priority that wait for a prompt or for copies, and the pages they will need.

        Requests of this priority leave them a place and these pages, as if they ran. They wait in order to start
        faster; it must not cost them the memory that they would have had at once.
        """
        claims = {arrival: claim for arrival, claim in self._recalling.items() if claim[0].priority > priority}
        deferral = self._deferral
        if deferral is not None and self._top_parked > priority:
            self._top_parked = max((one.priority for one in deferral), default=-inf)
            for one in deferral:
                if one.priority > priority:
                    claims[one.arrival] = one, self._kv.num_missing(one, deferral.num_awaited(one))
        return list(claims.values())

    def hold_back(self, request: Request, claims: Sequence[Claim] = ()) -> bool:
        """Park a request of this pass if its tenant is at its limit; return whether it is parked now.

        Args:
            request: of this pass.
            claims: those of its priority; they count as running.
        """
        if self._quota_queue is None or not self._quota_queue.take(request, [claimant for claimant, _ in claims]):
            return False
        self._parked.append(request)
        if self._notes is not None:
            self._notes.note(Reason.HELD_BACK, request)
        return True

    def defer(self, request: Request) -> bool:
        """Park a request of this pass if it repeats a prompt in progress; return whether it is parked now.

        A request that must compute its whole prompt would gain nothing.
        """
        if self._deferral is None or not len(request.reusable_tokens()) or not self._deferral.defer(request):
            return False
        self._top_parked = max(self._top_parked, request.priority)
        self._parked.append(request)
        leader = self._deferral.leader_of(request)
        if leader is not None and not self.stays(request):
            request.kv_rank = leader.kv_rank  # where the prompt will be cached that it waits for
        return True

    def parked_on(self, request: Request) -> Request | None:
        """Return the running request that a parked one waits for."""
        return None if self._deferral is None else self._deferral.leader_of(request)

    def recall(self, request: Request, *, num_reserved: int, now_s: float = 0.0) -> bool:
        """Copy the request's prefix back from lower tiers; return whether to admit it later, when the copy is done.

        It is copied to where the request was placed. The pages are taken under the condition under which
        `KVSpace.admit` accepts the request, so it finds them when it is admitted.

        Args:
            request: of this pass.
            num_reserved: as for `KVSpace.admit`.
            now_s: time on the engine's clock, for requests that wait for pages of another engine.
        """
        entry = self._entries[request.arrival]
        entry.is_coming = self._kv.tiers is not None and self._recall(request, entry, num_reserved, now_s)
        return entry.is_coming

    def _recall(self, request: Request, entry: _Entry, num_reserved: int, now_s: float) -> bool:
        space = self._kv.place(request, stays=True)
        tiers = space.tiers
        assert tiers is not None
        if entry.searched is not space:  # there it has found no memory
            self._end_recall(request)
        if entry.recall is None:
            if entry.searched is space and (now_s >= entry.gives_up_s or now_s < entry.looks_again_s):
                return now_s < entry.gives_up_s
            entry.searched = space
            entry.recall = tiers.recall(request.reusable_tokens(), request.key, priority=request.priority)
            if entry.recall is None:
                return self._awaits(request, entry, now_s)

        def take(n: int) -> Int32 | None:
            num_missing = space.num_missing(request, space.peek(request))
            return space.take(n, num_available=num_missing + num_reserved)

        self._recalling[request.arrival] = request, self._kv.num_missing(request, request.num_matched)
        is_coming = tiers.advance(entry.recall, take, take_state=space.take_state, priority=request.priority)
        if entry.recall.is_over:
            num_known = entry.recall.num_known
            self._end_recall(request)
            space.note_recalled()  # the tokens that have arrived can be matched
            return self._awaits(request, entry, now_s, num_known)
        return is_coming

    def end_copies(self) -> None:
        """Let the cache have what was copied back for requests that a pass did not reach.

        They get memory when they are reached, but one before them may wait for the very pages that their copies hold,
        or for the place that is kept for them as long as copies are under way.
        """
        for arrival in [*self._recalling]:
            recall, space = self._entries[arrival].recall, self._entries[arrival].searched
            if recall is not None and not recall.is_over and space is not None and space.tiers is not None:
                space.tiers.advance(recall, lambda n: None)
                if recall.is_over:
                    del self._recalling[arrival]
                    space.note_recalled()

    def _awaits(self, request: Request, entry: _Entry, now_s: float, num_known: int = 0) -> bool:
        """Return whether to look again for pages that another engine publishes, after all found ones have come.

        Args:
            request: of this pass.
            entry: its entry.
            now_s: time on the engine's clock.
            num_known: tokens whose pages are there, although a state that makes them of use may be still to come.
        """
        if not request.awaits_kv or request.num_cached >= 0:  # what it has computed itself is published by no other
            return False
        num_found = self._kv.peek(request)
        if max(num_found, num_known) > entry.num_found:
            entry.num_found, entry.gives_up_s = max(num_found, num_known), now_s + _NEXT_PAGE_S
        if num_found >= self._kv.num_reusable(request):
            entry.gives_up_s = -inf
            return False
        entry.looks_again_s = now_s + _LOOK_AGAIN_S
        self._recalling[request.arrival] = request, self._kv.num_missing(request, num_found)
        return True

    def admitted(self, request: Request) -> None:
        """Note that a request of this pass has a row: its watch and recall end, and others may wait for its prompt."""
        self._end(request)
        if self._deferral is not None:
            self._deferral.start(request)
        if self._quota_queue is not None:
            self._quota_queue.admit(request)

    def end_pass(self, admitted: list[Request]) -> None:
        """End a pass: the admitted and the parked requests leave the order."""
        for request in admitted:
            self._order.admit(request)
            self._uncount(self._entries.pop(request.arrival))
        for request in self._parked:
            self._order.park(request)
            entry = self._entries[request.arrival]
            self._unwatch(entry)
            self._uncount(entry)
            leader = self.parked_on(request)
            if leader is not None and self._lending is not None:
                self._lending.lend(request, leader)
        self._parked.clear()

    def watch_again(self) -> None:
        """Use the watches of a new cache, after the old one was found broken. No request may wait."""
        assert not self._entries
        self._group = self._new_group()

    def _enter(self, request: Request) -> None:
        """Put a request into the order, with a watch if the order reads matches."""
        self._count(self._entries[request.arrival], request.priority)
        if self._group is not None:
            watch = self._group.watch(request, request.reusable_tokens(), request.key)
            self._entries[request.arrival].watch = watch
            request.num_matched = watch.num_tokens
        self._order.add(request)

    def match(self, request: Request) -> None:
        """Refresh `num_matched`, which is up to date when a pass yields a request, until pages are taken for others."""
        entry = self._entries[request.arrival]
        if entry.watch is not None:
            request.num_matched = entry.watch.num_tokens
        elif entry.matched_epoch != self._kv.epoch:
            entry.matched_epoch = self._kv.epoch
            request.num_matched = self._kv.peek(request)

    def num_usable(self, request: Request) -> int:
        """Return how much of `num_matched` can be used: a watch does not know which pages have lost their windows."""
        is_known = self._group is None or self._kv.groups is None
        return request.num_matched if is_known else self._kv.peek(request)

    def count_preempted(self, priority: int) -> None:
        """Count a request that has lost its memory before its end."""
        counts = self.preempted
        if priority not in counts and len(counts) >= _MAX_PRIORITIES:
            priority = next(reversed(counts))
        counts[priority] = counts.get(priority, 0) + 1

    def _unpark(self) -> None:
        ready: list[Request] = []
        if self._deferral is not None:
            ready += self._deferral.ready()
            for request in ready:
                self._take_back(request)
        if self._quota_queue is not None:
            ready += self._quota_queue.ready()
        for request in ready:
            self._enter(request)
            if self._notes is not None:
                self._notes.note(Reason.UNPARKED, request)

    def _take_back(self, request: Request) -> None:
        if self._lending is not None:
            self._lending.take_back(request)

    def _count(self, entry: _Entry, priority: int) -> None:
        entry.priority = priority
        self._num_by_priority[priority] = self._num_by_priority.get(priority, 0) + 1

    def _uncount(self, entry: _Entry) -> None:
        priority, entry.priority = entry.priority, None
        if priority is not None:
            num = self._num_by_priority[priority] = self._num_by_priority[priority] - 1
            if not num:
                del self._num_by_priority[priority]

    def _forget(self, request: Request) -> None:
        self._end(request)
        self._uncount(self._entries.pop(request.arrival))

    def _end(self, request: Request) -> None:
        self._unwatch(self._entries[request.arrival])
        self._end_recall(request)

    def _unwatch(self, entry: _Entry) -> None:
        if entry.watch is not None:
            entry.watch.close()
            entry.watch = None

    def _end_recall(self, request: Request) -> None:
        entry = self._entries[request.arrival]
        if entry.recall is not None and entry.searched is not None and entry.searched.tiers is not None:
            entry.searched.tiers.cancel(entry.recall)
        self._recalling.pop(request.arrival, None)
        entry.recall = None

    def _new_group(self) -> WatchGroup | None:
        if not self._is_watching:
            return None
        if isinstance(self._kv, DividedKV):
            raise ValueError("is_watching must be False where KV memory is divided among ranks, got True")
        if not isinstance(self._kv.cache, WatchedCache):
            raise ValueError(f"make_cache must make a cache with watches, got {type(self._kv.cache).__name__}")
        return self._kv.cache.watch_group()


def _with_first(first: Request, ordered: Iterator[Request]) -> Iterator[Request]:
    yield first
    yield from (request for request in ordered if request is not first)
