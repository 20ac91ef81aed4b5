"""A simulated fleet behind the router of this package, with everything that happens to a fleet."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random

from pagewood.schedpolicy.admission.quotas import Quotas
from pagewood.schedpolicy.routing.autoscaler import FleetLoad
from pagewood.schedpolicy.routing.load import Report
from pagewood.schedpolicy.routing.placement import Placement, Ticket
from pagewood.schedpolicy.routing.prefix_index import MAX_BLOCKS
from pagewood.schedpolicy.routing.replicas import Role
from pagewood.schedpolicy.routing.router import Router
from pagewood.schedpolicy.simulation.cache import BlockCache
from pagewood.schedpolicy.simulation.fleet import MAX_REPLICAS, Fleet
from pagewood.schedpolicy.simulation.metrics import Observations
from pagewood.schedpolicy.simulation.operations import Operations
from pagewood.schedpolicy.simulation.policies import Policies
from pagewood.schedpolicy.simulation.recorder import record_of
from pagewood.schedpolicy.simulation.replica import OnRequest, Replica
from pagewood.schedpolicy.simulation.request import SimRequest
from pagewood.schedpolicy.simulation.routed_request import RoutedSimRequest
from pagewood.schedpolicy.simulation.trace import Trace

_ANY_NUMBER = 1 << 30
"""More deaths than any request sees: in the simulator no request is to blame for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetObservations:
    """What happened to a fleet.

    Attributes:
        replicas: The observations of each replica, in the order in which they started; those that have left included.
            A request is recorded by the replica that answered it, or by the last entry if no replica did.
        num_deaths: Replicas that died.
        num_resumed: How often a request went on elsewhere: after a death, a drain, or for a more urgent one.
        num_displaced: Number of these in which a more urgent request took its place.
        replica_s: Time that replicas existed, their starts included, all together.
        most_replicas: The greatest number of replicas at one time.
    """

    replicas: list[Observations]
    num_deaths: int
    num_resumed: int
    num_displaced: int
    replica_s: float
    most_replicas: int


class _Member:
    """A live replica."""

    __slots__ = ("computed", "ended", "is_full", "name", "num_events", "replica", "role", "started_s")

    def __init__(
        self, name: int, role: Role, started_s: float, make_replica: Callable[[OnRequest, OnRequest], Replica]
    ) -> None:
        self.name = name
        self.role = role
        self.started_s = started_s
        self.computed: list[SimRequest] = []  # in the last step; written by: routed
        self.ended: list[SimRequest] = []  # in the last step; written by: routed
        self.replica = make_replica(self.computed.append, self.ended.append)
        self.num_events = 0  # written by: routed
        self.is_full = False  # written by: routed


def simulate_routed(
    trace: Trace,
    fleet: Fleet,
    operations: Operations,
    *,
    make_policies: Callable[[int], Policies],
    router: Router[RoutedSimRequest] | None = None,
) -> FleetObservations:
    """Run a trace to its end behind a router.

    The same arguments give the same observations.

    Args:
        trace: The requests.
        fleet: The replicas.
        operations: What happens to them.
        make_policies: Makes the policies of a replica, given its number. A replica that starts in place of another has
            a number of its own.
        router: Empty, for blocks of the fleet's page size; by default one with the default order.

    Raises:
        ValueError: `operations` leaves no replica that decodes, or requests wait for replicas that will never come.
    """
    return _Run(trace, fleet, operations, make_policies, router).run()


def default_router(
    page_size: int, seed: int, *, quotas: Quotas | None = None, max_blocks: int = MAX_BLOCKS
) -> Router[RoutedSimRequest]:
    """Return a router with defaults for everything else; it ends no request, however many of its replicas die."""
    return Router(
        block_size=page_size,
        rng=Random(f"router/{seed}"),
        quotas=quotas,
        max_deaths=_ANY_NUMBER,
        max_blocks=max_blocks,
    )


class _Run:
    """One run. Invariant: a request that has not ended is with the router, or on exactly one replica and its ticket."""

    __slots__ = (
        "_events", "_fleet", "_made", "_members", "_most", "_names", "_num_deaths", "_num_displaced", "_num_ended",
        "_num_resumed", "_num_starting", "_operations", "_policies", "_replica_s", "_requests", "_rng",
        "_router", "_sequence", "_trace", "_unserved",
    )  # fmt: skip

    def __init__(
        self,
        trace: Trace,
        fleet: Fleet,
        operations: Operations,
        make_policies: Callable[[int], Policies],
        router: Router[RoutedSimRequest] | None,
    ) -> None:
        if operations.num_prefill >= fleet.num_replicas:
            raise ValueError(f"num_prefill must be < num_replicas ({fleet.num_replicas}), got {operations.num_prefill}")
        self._trace = trace
        self._fleet = fleet
        self._operations = operations
        self._policies = make_policies
        self._router = router or default_router(fleet.page_size, operations.seed)
        self._rng = Random(f"failures/{operations.seed}")
        # Heap of (time, sequence, what to do then); stale entries included.
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._sequence = count()
        self._members: dict[int, _Member] = {}
        self._made: list[Replica] = []
        self._names = count()
        self._requests: dict[int, RoutedSimRequest] = {}
        self._unserved = Observations()
        self._num_starting = 0
        self._num_ended = 0
        self._num_deaths = self._num_displaced = self._num_resumed = 0
        self._replica_s = 0.0
        self._most = 0

    def run(self) -> FleetObservations:
        """Run the trace to its end."""
        operations, fleet, trace = self._operations, self._fleet, self._trace
        num_prefill = operations.num_prefill
        for index in range(fleet.num_replicas):
            role = Role.BOTH if not num_prefill else Role.PREFILL if index < num_prefill else Role.DECODE
            self._join(role, 0.0)
        if operations.restart_every_s is not None:
            self._at(operations.restart_every_s, self._restart_next)
        if operations.scaling is not None:
            self._at(operations.scaling.every_s, self._scale)
        names = trace.page_names(fleet.page_size)
        for arrival, spec in enumerate(trace.requests):
            self._advance(spec.arrived_s)
            num_shared = len(trace.page_keys(spec, fleet.page_size))
            request = RoutedSimRequest(arrival, spec, next(names), num_shared, fleet.page_size)
            self._requests[arrival] = request
            verdict = self._router.can_ever_run(request)
            if not verdict.fits:
                self._refuse(request, spec.arrived_s, verdict.reason)
                continue
            self._send(self._router.route(request, spec.arrived_s), spec.arrived_s)
        now_s = self._advance(inf)
        for member in self._members.values():
            self._replica_s += now_s - member.started_s
        return FleetObservations(
            replicas=[*(replica.observed for replica in self._made), self._unserved],
            num_deaths=self._num_deaths,
            num_resumed=self._num_resumed,
            num_displaced=self._num_displaced,
            replica_s=self._replica_s,
            most_replicas=self._most,
        )

    def _at(self, at_s: float, do: Callable[[float], None]) -> None:
        heappush(self._events, (at_s, next(self._sequence), do))

    def _advance(self, before_s: float) -> float:
        """Let everything happen that happens before a time; with infinity, until all requests have ended."""
        events, num_requests, now_s = self._events, len(self._trace.requests), 0.0
        while events and events[0][0] < before_s and self._num_ended < num_requests:
            now_s, _, do = heappop(events)
            do(now_s)
        if before_s == inf and self._num_ended < num_requests:
            raise ValueError(f"a replica must be left or start, {self._router.num_waiting} requests wait for ever")
        return now_s

    # Replicas

    def _join(self, role: Role, now_s: float, started_s: float | None = None) -> None:
        """Start a replica, which takes requests at once."""
        operations, fleet = self._operations, self._fleet
        name = next(self._names)

        def make_replica(on_computed: OnRequest, on_end: OnRequest) -> Replica:
            return Replica(
                index=name,
                policies=self._policies(name),
                machine=fleet.machine,
                num_pages=fleet.num_pages,
                page_size=fleet.page_size,
                overlaps=fleet.overlaps,
                make_cache=lambda: BlockCache(records_events=True),
                on_computed=on_computed,
                on_end=on_end,
            )

        member = _Member(name, role, now_s if started_s is None else started_s, make_replica)
        self._made.append(member.replica)
        self._members[member.name] = member
        self._most = max(self._most, len(self._members))
        self._router.join(member.name, num_places=operations.num_places, role=role)
        if operations.failures is not None:
            self._at(
                now_s + self._rng.expovariate(1 / operations.failures.mean_s), lambda at_s: self._die(member, at_s)
            )
        self._dispatch(now_s)

    def _start(self, role: Role, now_s: float, after_s: float) -> None:
        """Let a replica start, which takes requests later."""
        if after_s == inf:
            return
        self._num_starting += 1

        def join(at_s: float) -> None:
            self._num_starting -= 1
            self._join(role, at_s, now_s)

        self._at(now_s + after_s, join)

    def _leave(self, member: _Member, now_s: float, *, has_died: bool) -> None:
        """Remove a replica; its requests go on elsewhere."""
        del self._members[member.name]
        self._replica_s += now_s - member.started_s
        for ticket in self._router.requests_of(member.name):
            self._suspend(self._requests[ticket.arrival], now_s, member)
        departure = self._router.leave(member.name, now_s, has_died=has_died)
        for request in departure.ended:
            self._refuse(request, now_s, "its replicas have died")
        for placement in departure.unaided:
            placement.request.helper = None
            self._arrive(placement.request, now_s)
        self._dispatch(now_s)

    def _die(self, member: _Member, now_s: float) -> None:
        if self._members.get(member.name) is member and self._operations.failures is not None:
            self._num_deaths += 1
            self._leave(member, now_s, has_died=True)
            self._start(member.role, now_s, self._operations.failures.restart_s)

    def _restart_next(self, now_s: float) -> None:
        """Drain the replica that has run longest into others, and let a new one start in its place."""
        every_s = self._operations.restart_every_s
        assert every_s is not None
        member = min(self._members.values(), key=lambda member: member.name, default=None)
        if member is not None or self._num_starting:
            self._at(now_s + every_s, self._restart_next)
        if member is not None:
            self._router.drain(member.name)
            self._leave(member, now_s, has_died=False)
            self._start(member.role, now_s, self._operations.restart_s)

    def _scale(self, now_s: float) -> None:
        """Start or drain replicas as the autoscaler decides."""
        scaling, router = self._operations.scaling, self._router
        assert scaling is not None
        self._at(now_s + scaling.every_s, self._scale)
        live = list(self._members.values())
        kv_use = sum(member.replica.kv_use for member in live) / len(live) if live else 0.0
        num = len(live) + self._num_starting
        load = FleetLoad(
            num_replicas=num, num_requests=router.num_placed, num_waiting=router.num_waiting, kv_use=kv_use
        )
        wanted = min(scaling.autoscaler.decide(load, now_s), MAX_REPLICAS)
        for _ in range(wanted - num):
            self._start(Role.BOTH, now_s, scaling.startup_s)
        for member in sorted(live, key=lambda member: router.load(member.name))[: max(0, num - wanted)]:
            router.drain(member.name)
            self._leave(member, now_s, has_died=False)

    # Steps

    def _wake(self, member: _Member) -> None:
        """Note when the steps of a replica end, after a change."""
        end_s = member.replica.end_s
        if end_s < inf:
            heappush(self._events, (end_s, next(self._sequence), lambda at_s: self._finish(member, at_s)))

    def _finish(self, member: _Member, now_s: float) -> None:
        """End the steps of a replica, and tell the router what has come of them."""
        replica, router = member.replica, self._router
        if replica.end_s != now_s or self._members.get(member.name) is not member:
            return
        replica.finish_run()
        for part in member.computed:
            request = self._requests.get(part.arrival)
            if request is not None and request.part is part and request.ticket is not None:
                router.computed(request.ticket, now_s)
        for part in member.ended:
            self._ended(part, now_s)
        member.computed.clear()
        member.ended.clear()
        events = replica.take_events()
        if events:
            router.follow(member.name, member.num_events, member.num_events + 1, events)
            member.num_events += 1
        is_full = replica.num_waiting > 0
        if is_full != member.is_full:
            member.is_full = is_full
            router.report(member.name, Report(at_s=now_s, num_requests=0, is_full=is_full))
        self._wake(member)
        self._dispatch(now_s)

    def _ended(self, part: SimRequest, now_s: float) -> None:
        """Note that a replica is done with a request, or with the prompt of one."""
        request = self._requests[part.arrival]
        ticket = request.ticket
        assert ticket is not None, "a replica answers only what it still has"
        if request.helper is part:
            operations = self._operations
            num_pages = part.num_prompt // self._fleet.page_size if part.num_generated else 0
            request.helper = None
            self._router.computed(ticket, now_s)
            arrive_s = now_s + operations.transfer_s + operations.transfer_token_s * part.num_prompt
            self._at(arrive_s, lambda at_s: self._receive(request, ticket, num_pages, at_s))
        else:
            assert request.part is part, "a replica answers only what it still has"
            counts = self._router.end(ticket, now_s)
            assert counts, "a request is answered once"
            self._forget(request)

    def _receive(self, request: RoutedSimRequest, ticket: Ticket, num_pages: int, now_s: float) -> None:
        """Give a replica the pages of a prompt that another one has computed, and the request."""
        if request.ticket == ticket:
            member = self._members[_name(ticket)]
            member.replica.receive(request.part, num_pages)
            self._arrive(request, now_s)

    # Requests

    def _dispatch(self, now_s: float) -> None:
        if self._router.num_waiting:
            self._send(self._router.dispatch(now_s), now_s)

    def _send(self, placements: Iterable[Placement[RoutedSimRequest]], now_s: float) -> None:
        for placement in placements:
            request, displaced = placement.request, placement.displaced
            if displaced is not None:
                self._num_displaced += 1
                self._suspend(self._requests[displaced.arrival], now_s, None)
            request.ticket = placement.ticket
            if placement.prefill is None:
                self._arrive(request, now_s)
                continue
            spec = replace(request.spec, num_prompt=request.num_tokens, num_output=1, max_new_tokens=1)
            helper = SimRequest(request.arrival, spec, request.part.keys, self._fleet.page_size)
            helper.is_recorded = False
            request.helper, request.helped_by = helper, _name_of(placement.prefill)
            member = self._members[request.helped_by]
            member.replica.arrive(helper, now_s)
            self._wake(member)

    def _arrive(self, request: RoutedSimRequest, now_s: float) -> None:
        """Give a request to the replica of its ticket."""
        assert request.ticket is not None
        member = self._members[_name(request.ticket)]
        member.replica.arrive(request.part, now_s)
        self._wake(member)

    def _suspend(self, request: RoutedSimRequest, now_s: float, dead: _Member | None) -> None:
        """Take a request from its replica, which does not know it any more if it is `dead`."""
        ticket, before = request.ticket, request.part
        assert ticket is not None
        request.ticket = None
        self._num_resumed += 1
        if request.helper is not None:
            self._withdraw_helper(request, now_s)
            return  # the replica of the ticket has not got it yet
        member = dead or self._members[_name(ticket)]
        num_generated, last_token_s = member.replica.progress(before, now_s)
        if dead is None:
            member.replica.withdraw(before, now_s)
            self._wake(member)
        request.part = SimRequest(request.arrival, request.spec, before.keys, self._fleet.page_size)
        request.part.resume(before, num_generated, last_token_s)

    def _withdraw_helper(self, request: RoutedSimRequest, now_s: float) -> None:
        helper, request.helper = request.helper, None
        member = self._members.get(request.helped_by)
        if helper is not None and member is not None:
            member.replica.withdraw(helper, now_s)
            self._wake(member)

    def _refuse(self, request: RoutedSimRequest, now_s: float, reason: str) -> None:
        self._unserved.records.append(record_of(request.part, now_s, replica=-1, refused=reason))
        self._forget(request)

    def _forget(self, request: RoutedSimRequest) -> None:
        request.ticket = None
        del self._requests[request.arrival]
        self._num_ended += 1


def _name(ticket: Ticket) -> int:
    return _name_of(ticket.replica)


def _name_of(replica: object) -> int:
    assert isinstance(replica, int)
    return replica
