"""The router: it chooses a replica for each request, and keeps requests while no replica has a place."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from operator import attrgetter
from random import Random
from typing import Any, Generic

from pagewood.schedpolicy.admission.quotas import Quotas
from pagewood.schedpolicy.counts import require_count, require_real
from pagewood.schedpolicy.orders.ageing import Ageing
from pagewood.schedpolicy.orders.multilevel import MultilevelOrder
from pagewood.schedpolicy.orders.order import Order
from pagewood.schedpolicy.orders.shares import fair_share
from pagewood.schedpolicy.routing.held import HeldByQuota
from pagewood.schedpolicy.routing.load import Report
from pagewood.schedpolicy.routing.placement import Departure, Placement, R, Ticket
from pagewood.schedpolicy.routing.prefix_index import MAX_BLOCKS, BlockHash, PrefixIndex
from pagewood.schedpolicy.routing.replicas import Pool, ReplicaName, ReplicaState, Role
from pagewood.schedpolicy.verdict import FITS, Verdict

_AGE_AFTER_S = 10.0


class _Routed(Generic[R]):
    """A request that has not ended. Invariant: `replica` is None while it waits."""

    __slots__ = (
        "attempt",
        "is_held",
        "num_deaths",
        "num_helper_tokens",
        "num_moves",
        "num_own_tokens",
        "prefill",
        "replica",
        "request",
        "runs",
        "runs_at",
        "runs_of",
    )  # fmt: skip

    def __init__(self, request: R) -> None:
        self.request = request
        self.replica: ReplicaState | None = None  # written by: router
        self.prefill: ReplicaState | None = None
        """The replica that computes its prompt now, if it is another one."""  # written by: router
        self.attempt = 0  # written by: router
        self.num_moves = 0
        """How often it has been displaced."""  # written by: router
        self.num_deaths = 0  # written by: router
        self.num_own_tokens = 0
        """Prompt tokens of it that count as load of `replica`."""  # written by: router
        self.num_helper_tokens = 0
        """Prompt tokens of it that count as load of `prefill`."""  # written by: router
        self.runs: list[tuple[int, int]] = []
        """What the index last said of its blocks."""  # written by: router
        self.runs_of: Sequence[BlockHash] = ()
        """The blocks of which it said that."""  # written by: router
        self.runs_at = -1
        """`PrefixIndex.num_changes` at that time."""  # written by: router
        self.is_held = False
        """Whether it waits for its tenant's quota."""  # written by: router


class Router(Generic[R]):
    """Sends requests to replicas, each where it will decode first, and decides their order as late as possible.

    A replica has a number of *places*. A request is sent when one is free: to the replica with the least load, where
    tokens of its prompt that are cached there count as that much less load. Otherwise it waits here, in one order for
    the whole fleet, so that priorities, fair shares and ageing hold over all replicas; quotas are counted once.

    If all places are taken, a request of higher priority takes the place of the request of the lowest priority that was
    sent last. That one waits again, with its tokens so far, at most `max_moves` times.

    It reads no clock and no environment. Two routers that get the same calls and generators take the same decisions.

    Invariants, after `dispatch`:
    - A request waits only if no replica has a place, or its tenant is at its quota.
    - A request that waits, and not for its quota, has no higher priority than any that could be displaced.
    - A request is on one replica at most, and `end` returns True for it once.

    Starvation: with the default order, a request that waits 10 s and has m older ones waiting is among the next
    8 * (m + 1) that get a free place, unless it waits for its quota. It is displaced `max_moves` times at most. So it
    waits at most `max_moves + 1` times, each time within that bound.

    Cost of a decision: one look-up for each block of the prompt that is cached anywhere, and what `Pool.best` says.
    """

    __slots__ = (
        "_block_size", "_by_priority", "_decoders", "_free_slots", "_held", "_index", "_max_deaths", "_max_excess",
        "_max_moves", "_min_apart", "_movable", "_order", "_prefills", "_quotas", "_replicas", "_request_tokens",
        "_rng", "_routed",
    )  # fmt: skip

    def __init__(
        self,
        *,
        block_size: int,
        rng: Random,
        order: Order[R] | None = None,
        quotas: Quotas | None = None,
        request_tokens: int = 256,
        max_excess_tokens: float = 8192,
        min_apart_tokens: int = 256,
        max_moves: int = 3,
        max_deaths: int = 2,
        max_blocks: int = MAX_BLOCKS,
    ) -> None:
        """Start without replicas.

        Args:
            block_size: Tokens per block of the replicas' caches, >= 1.
            rng: Drawn from once for each replica that joins, to decide between equal replicas. Several routers of one
                fleet use different seeds, so that they do not all choose the same replica.
            order: Empty; the order of requests that wait. By default `default_order()`.
            quotas: Without running requests; counts those of the whole fleet. None for no limits.
            request_tokens: Load of a request besides its prompt, in prompt tokens, >= 0.
            max_excess_tokens: Load that a replica may have above the least loaded one for the sake of its cache, >= 0.
            min_apart_tokens: A replica with the role DECODE computes up to this many prompt tokens itself, >= 0.
            max_moves: How often a request is displaced, >= 0.
            max_deaths: After this many deaths of its replica a request is ended, >= 1.
            max_blocks: Blocks of all replicas that are remembered, >= 1; see `PrefixIndex`.

        Raises:
            ValueError: An argument is out of range, or `order` is not empty.
        """
        self._block_size = require_count("block_size", block_size, least=1)
        self._request_tokens = require_count("request_tokens", request_tokens, least=0)
        require_real("max_excess_tokens", max_excess_tokens)
        if not max_excess_tokens >= 0:
            raise ValueError(f"max_excess_tokens must be >= 0, got {max_excess_tokens}")
        self._max_excess = max_excess_tokens
        self._min_apart = require_count("min_apart_tokens", min_apart_tokens, least=0)
        self._max_moves = require_count("max_moves", max_moves, least=0)
        self._max_deaths = require_count("max_deaths", max_deaths, least=1)
        if order is not None and len(order):
            raise ValueError(f"order must be empty, got {len(order)} requests")
        self._order: Order[R] = default_order() if order is None else order
        self._quotas = quotas
        self._held = None if quotas is None else HeldByQuota[R](quotas)
        self._rng = rng
        self._index = PrefixIndex(block_size=block_size, max_blocks=max_blocks)
        self._decoders = Pool(request_tokens=request_tokens)
        self._prefills = Pool(request_tokens=request_tokens)
        self._replicas: dict[ReplicaName, ReplicaState] = {}  # written by: join, leave
        self._free_slots: list[int] = []  # those below the number of replicas ever joined; written by: join, leave
        self._routed: dict[int, _Routed[R]] = {}  # by arrival; written by: route, end, cancel, leave
        # Waiting requests in the order, by priority; written by: _wait, _leave_order.
        self._by_priority = Counter[int]()
        # Requests on replicas that can be displaced, by priority, in the order of sending; written by: _note_movable.
        self._movable: dict[int, dict[int, _Routed[R]]] = {}

    @property
    def num_waiting(self) -> int:
        """Requests that wait here."""
        return len(self._order) + (0 if self._held is None else len(self._held))

    @property
    def num_held(self) -> int:
        """Number of these that wait for their tenant's quota."""
        return 0 if self._held is None else len(self._held)

    @property
    def num_placed(self) -> int:
        """Requests on replicas."""
        return len(self._routed) - self.num_waiting

    @property
    def index(self) -> PrefixIndex:
        """What the replicas have cached, by slot; to read."""
        return self._index

    @property
    def replicas(self) -> tuple[ReplicaName, ...]:
        """The replicas, in the order in which they joined."""
        return tuple(self._replicas)

    def load(self, replica: ReplicaName) -> tuple[int, int]:
        """Return the requests of a replica, and their prompt tokens that are not computed yet."""
        load = self._state(replica).load
        return load.num_requests, load.num_tokens

    def own_load(self, replica: ReplicaName) -> tuple[int, int]:
        """Return the part of `load` that this router has sent."""
        load = self._state(replica).load
        return load.num_own_requests, load.num_own_tokens

    def requests_of(self, replica: ReplicaName) -> list[Ticket]:
        """Return the tickets of the requests that a replica answers."""
        state = self._state(replica)
        return [self._ticket(self._routed[arrival]) for arrival in state.placed]

    def join(self, replica: ReplicaName, *, num_places: int, role: Role = Role.BOTH, position: int | None = 0) -> None:
        """Add a replica; call `dispatch` afterwards.

        Args:
            replica: Its name, unique.
            num_places: Requests that it may have at once, >= 1: as many as it runs at once, so that none waits there.
            role: What it does.
            position: Number of its first event; None if it is unknown what it has cached, until `restore`.

        Raises:
            ValueError: The name is taken, or an argument is out of range.
        """
        if replica in self._replicas:
            raise ValueError(f"replica must be new, got {replica!r}")
        require_count("num_places", num_places, least=1)
        slot = self._free_slots.pop() if self._free_slots else len(self._replicas)
        self._index.open(slot, position=position)
        state = ReplicaState(name=replica, slot=slot, role=role, num_places=num_places, rank=self._rng.random())
        self._replicas[replica] = state
        self._pool(state).refresh(state)

    def drain(self, replica: ReplicaName, *, drains: bool = True) -> None:
        """Send no more requests to a replica, or with `drains=False` send some again; call `dispatch` afterwards.

        Its requests go on. `move` takes them away before they end.
        """
        state = self._state(replica)
        if state.is_draining == drains:
            return
        state.is_draining = drains
        self._pool(state).refresh(state)
        for arrival in state.placed:
            self._note_movable(self._routed[arrival])

    def leave(self, replica: ReplicaName, now_s: float, *, has_died: bool) -> Departure[R]:
        """Remove a replica; its requests wait again, with their tokens so far. Call `dispatch` afterwards.

        Args:
            replica: Its name.
            now_s: The time.
            has_died: Whether its requests may have caused this; those that have seen `max_deaths` end.
        """
        state = self._state(replica)
        self._pool(state).remove(state)
        state.is_draining = True
        unaided = [self._unaid(self._routed[arrival], now_s) for arrival in list(state.helped)]
        waiting: list[R] = []
        ended: list[R] = []
        for arrival in list(state.placed):
            routed = self._routed[arrival]
            routed.num_deaths += has_died
            self._unplace(routed, now_s)
            if routed.num_deaths >= self._max_deaths:
                del self._routed[arrival]
                ended.append(routed.request)
            else:
                self._wait(routed)
                waiting.append(routed.request)
        self._index.close(state.slot)
        self._free_slots.append(state.slot)
        del self._replicas[replica]
        return Departure(waiting=tuple(waiting), ended=tuple(ended), unaided=tuple(unaided))

    def report(self, replica: ReplicaName, report: Report) -> None:
        """Take over what a replica says about itself; call `dispatch` afterwards."""
        state = self._state(replica)
        if state.load.report(report):
            state.slowness = report.slowness
            state.is_full = report.is_full
            self._pool(state).refresh(state)

    def follow(self, replica: ReplicaName, start: int, end: int, events: Iterable[object]) -> bool:
        """Follow the KV events [start, end) of a replica; return False if it takes a snapshot to go on.

        See `PrefixIndex.apply`.
        """
        return self._index.apply(self._state(replica).slot, start, end, events)

    def restore(self, replica: ReplicaName, position: int, hashes: Iterable[BlockHash]) -> None:
        """Take over a snapshot of the blocks of a replica; see `PrefixIndex.restore`."""
        self._index.restore(self._state(replica).slot, position, hashes)

    def forget_blocks(self, replica: ReplicaName) -> None:
        """Treat a replica as empty until `restore`: its log has been replaced."""
        self._index.lose(self._state(replica).slot)

    def can_ever_run(self, request: R) -> Verdict:
        """Return whether a request fits its tenant's quota alone; if not, refuse it instead of calling `route`."""
        return FITS if self._quotas is None else self._quotas.can_ever_run(request)

    def route(self, request: R, now_s: float) -> list[Placement[R]]:
        """Accept a request.

        Args:
            request: New.
            now_s: The time.

        Returns:
            What to send now: the request, or nothing if it waits. It is what `dispatch` returns.

        Raises:
            ValueError: Its arrival is taken, or it exceeds its tenant's quota alone.
        """
        if request.arrival in self._routed:
            raise ValueError(f"arrival must be unique, got {request.arrival} again")
        if not (verdict := self.can_ever_run(request)).fits:
            raise ValueError(f"request must fit its tenant's quota, got {verdict.reason}")
        routed = self._routed[request.arrival] = _Routed(request)
        self._wait(routed)
        return self.dispatch(now_s)

    def dispatch(self, now_s: float) -> list[Placement[R]]:
        """Send waiting requests where there are places now.

        Call it after every call that may have made a place.
        """
        placements: list[Placement[R]] = []
        while self._pass(now_s, placements):
            pass
        return placements

    def computed(self, ticket: Ticket, now_s: float) -> bool:
        """Note that the prompt of a request is computed, by whichever replica; return whether the ticket is valid."""
        routed = self._valid(ticket)
        if routed is None:
            return False
        self._end_help(routed, now_s)
        self._charge(routed, 0, now_s)
        return True

    def unaid(self, ticket: Ticket, now_s: float) -> bool:
        """Note that the replica of a request computes its prompt, because the one that should does not.

        Returns:
            Whether the ticket is valid.
        """
        routed = self._valid(ticket)
        if routed is None:
            return False
        if routed.prefill is not None:
            self._unaid(routed, now_s)
        return True

    def end(self, ticket: Ticket, now_s: float) -> bool:
        """Note that a replica has answered a request; call `dispatch` afterwards.

        Returns:
            Whether the answer counts. It does not if the request has ended or was sent to another replica since; then
            the caller must drop what this replica sent.
        """
        routed = self._valid(ticket)
        if routed is None:
            return False
        self._unplace(routed, now_s)
        del self._routed[ticket.arrival]
        return True

    def move(self, ticket: Ticket, now_s: float) -> bool:
        """Let a request wait again, which the caller has stopped on its replica; call `dispatch` afterwards.

        Returns:
            Whether the ticket was valid.
        """
        routed = self._valid(ticket)
        if routed is None:
            return False
        self._unplace(routed, now_s)
        self._wait(routed)
        return True

    def cancel(self, arrival: int, now_s: float) -> Ticket | None:
        """Forget a request; call `dispatch` afterwards.

        Returns:
            The ticket of the replica on which the caller must stop it; None if it waits, or has ended.
        """
        routed = self._routed.pop(arrival, None)
        if routed is None:
            return None
        if routed.replica is not None:
            ticket = self._ticket(routed)
            self._unplace(routed, now_s)
            return ticket
        if routed.is_held:
            assert self._held is not None
            self._held.remove(routed.request)
            self._order.stop(routed.request)
        else:
            self._order.remove(routed.request)
            self._leave_order(routed.request.priority)
            if self._held is not None:
                self._held.has_room(routed.request.tenant)
        return None

    def _pass(self, now_s: float, placements: list[Placement[R]]) -> bool:
        """Send what there are places for, and make one place at most; return whether another pass may send more."""
        held, order = self._held, self._order
        if held is not None and held.has_returning:
            for request in held.take_back():
                self._wait(self._routed[request.arrival])
        if not len(order):
            return False
        admitted: list[_Routed[R]] = []
        over_quota: list[R] = []
        urgent: _Routed[R] | None = None
        least_movable = min(self._movable, default=inf)
        for request in order.ordered(now_s):
            if not len(self._decoders) and not self._num_waiting_above(least_movable):
                break
            routed = self._routed[request.arrival]
            if not len(self._decoders) and request.priority <= least_movable:
                continue
            if held is not None and held.must_wait(request):
                over_quota.append(request)
                held.add(request)
                routed.is_held = True
                self._leave_order(request.priority)
                continue
            if not len(self._decoders):
                urgent = routed
                break
            placements.append(self._place(routed, now_s, None))
            admitted.append(routed)
            least_movable = min(self._movable, default=inf)
        for routed in admitted:
            order.admit(routed.request)
        for request in over_quota:
            order.park(request)
        if urgent is not None:
            placements.append(self._displace(urgent, now_s))
        return urgent is not None or bool(admitted and held is not None and held.has_returning)

    def _num_waiting_above(self, priority: float) -> int:
        return sum(num for one, num in self._by_priority.items() if one > priority)

    def _displace(self, urgent: _Routed[R], now_s: float) -> Placement[R]:
        """Send a request to the place of the last one of the lowest priority, which waits again."""
        least = self._movable[min(self._movable)]
        victim = least[next(reversed(least))]
        state, ticket = victim.replica, self._ticket(victim)
        assert state is not None
        victim.num_moves += 1
        self._unplace(victim, now_s)
        placement = self._place(urgent, now_s, (state, ticket))
        self._order.admit(urgent.request)
        self._wait(victim)
        return placement

    def _place(self, routed: _Routed[R], now_s: float, taken: tuple[ReplicaState, Ticket] | None) -> Placement[R]:
        """Send a request to the best replica, or to that of a request whose place it takes."""
        request = routed.request
        runs = self._runs(routed)
        num_tokens = request.num_tokens
        if taken is None:
            best = self._decoders.best(
                runs, block_size=self._block_size, num_tokens=num_tokens, max_excess=self._max_excess
            )
            assert best is not None, "a replica has a place"
            state, num_matched = best
        else:
            state = taken[0]
            num_blocks = next((num for num, bits in runs if bits >> state.slot & 1), 0)
            num_matched = min(num_blocks * self._block_size, num_tokens)
        request.num_matched = num_matched
        routed.replica = state
        routed.attempt += 1
        self._leave_order(request.priority)
        state.placed[request.arrival] = None
        helper = self._helper(state, runs, num_tokens, num_tokens - num_matched)
        if helper is not None:
            routed.prefill, num_cached = helper
            routed.num_helper_tokens = num_tokens - num_cached
            routed.prefill.helped[request.arrival] = None
            routed.prefill.load.change(now_s, 1, routed.num_helper_tokens)
            self._prefills.refresh(routed.prefill)
        routed.num_own_tokens = num_tokens - num_matched if helper is None else 0
        state.load.change(now_s, 1, routed.num_own_tokens)
        self._decoders.refresh(state)
        if self._quotas is not None and self._held is not None:
            self._quotas.admit(request)
            self._held.has_room(request.tenant)  # perhaps for more than one
        self._note_movable(routed)
        return Placement(
            request=request,
            ticket=self._ticket(routed),
            prefill=None if routed.prefill is None else routed.prefill.name,
            displaced=None if taken is None else taken[1],
        )

    def _helper(
        self, state: ReplicaState, runs: list[tuple[int, int]], num_tokens: int, num_uncached: int
    ) -> tuple[ReplicaState, int] | None:
        """Return the replica that computes the prompt for another, and what it has cached of it; None for no other."""
        if state.role is not Role.DECODE or num_uncached <= self._min_apart:
            return None
        return self._prefills.best(
            runs, block_size=self._block_size, num_tokens=num_tokens, max_excess=self._max_excess
        )

    def _unplace(self, routed: _Routed[R], now_s: float) -> None:
        """Take a request from its replica."""
        request, state = routed.request, routed.replica
        assert state is not None
        self._end_help(routed, now_s)
        state.load.change(now_s, -1, -routed.num_own_tokens)
        routed.num_own_tokens = 0
        routed.replica = None
        del state.placed[request.arrival]
        self._decoders.refresh(state)
        self._note_movable(routed)
        self._order.stop(request)
        if self._quotas is not None and self._held is not None:
            self._quotas.stop(request)
            self._held.has_room(request.tenant)

    def _note_movable(self, routed: _Routed[R]) -> None:
        """Note whether a request can be displaced: not on a draining replica, which gets no other in its place."""
        request, state = routed.request, routed.replica
        is_movable = state is not None and not state.is_draining and routed.num_moves < self._max_moves
        movable = self._movable.get(request.priority)
        if is_movable:
            if movable is None:
                movable = self._movable[request.priority] = {}
            movable[request.arrival] = routed
        elif movable is not None and movable.pop(request.arrival, None) is not None and not movable:
            del self._movable[request.priority]

    def _wait(self, routed: _Routed[R]) -> None:
        """Put a request into the order."""
        request = routed.request
        runs = self._runs(routed)
        request.num_matched = min(runs[0][0] * self._block_size, request.num_tokens) if runs else 0
        self._order.add(request)
        routed.is_held = False
        self._by_priority[request.priority] += 1

    def _runs(self, routed: _Routed[R]) -> list[tuple[int, int]]:
        """Return which replicas have the blocks of a request; the index is asked again only after a change."""
        index, hashes = self._index, routed.request.block_hashes
        if routed.runs_at != index.num_changes or routed.runs_of is not hashes:
            routed.runs, routed.runs_of, routed.runs_at = index.runs(hashes), hashes, index.num_changes
        return routed.runs

    def _leave_order(self, priority: int) -> None:
        """Count a request that is in the order no more."""
        self._by_priority[priority] -= 1
        if not self._by_priority[priority]:
            del self._by_priority[priority]

    def _end_help(self, routed: _Routed[R], now_s: float) -> None:
        """Note that no other replica computes the prompt of a request any more."""
        helper = routed.prefill
        if helper is not None:
            routed.prefill = None
            del helper.helped[routed.request.arrival]
            helper.load.change(now_s, -1, -routed.num_helper_tokens)
            self._prefills.refresh(helper)

    def _unaid(self, routed: _Routed[R], now_s: float) -> Placement[R]:
        """Let the replica of a request compute its prompt, because the one that should has left."""
        self._end_help(routed, now_s)
        request = routed.request
        self._charge(routed, request.num_tokens - request.num_matched, now_s)
        return Placement(request=request, ticket=self._ticket(routed))

    def _charge(self, routed: _Routed[R], num_tokens: int, now_s: float) -> None:
        """Change how many prompt tokens of a request count as load of its replica."""
        state = routed.replica
        assert state is not None
        if num_tokens != routed.num_own_tokens:
            state.load.change(now_s, 0, num_tokens - routed.num_own_tokens)
            routed.num_own_tokens = num_tokens
            self._decoders.refresh(state)

    def _valid(self, ticket: Ticket) -> _Routed[R] | None:
        """Return the request of a ticket, or None if the ticket is not valid any more."""
        routed = self._routed.get(ticket.arrival)
        return None if routed is None or routed.replica is None or routed.attempt != ticket.attempt else routed

    def _ticket(self, routed: _Routed[R]) -> Ticket:
        assert routed.replica is not None
        return Ticket(arrival=routed.request.arrival, attempt=routed.attempt, replica=routed.replica.name)

    def _pool(self, state: ReplicaState) -> Pool:
        return self._prefills if state.role is Role.PREFILL else self._decoders

    def _state(self, replica: ReplicaName) -> ReplicaState:
        state = self._replicas.get(replica)
        if state is None:
            raise KeyError(f"replica must have joined, got {replica!r}")
        return state


def default_order(weights: Mapping[str, float] | None = None) -> Order[Any]:
    """Return an order by priority, within a priority by tenants' fair shares, with ageing over all of them.

    Args:
        weights: Shares of tenants; 1 for those that are not named.
    """
    by_level = MultilevelOrder[Any](attrgetter("priority"), lambda: fair_share(weights=weights, charges_at_stop=True))
    return Ageing[Any](by_level, after_s=_AGE_AFTER_S)
