"""Random traffic through a router, and a router that looks at everything for each decision, as its oracle."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from random import Random
from typing import Any, Protocol

from pagewood.schedpolicy.orders.order import Order
from pagewood.schedpolicy.routing.load import Report
from pagewood.schedpolicy.routing.placement import Departure, Placement, Ticket
from pagewood.schedpolicy.routing.replicas import Role
from pagewood.schedpolicy.testing.requests import FakeRequest

BLOCK_SIZE = 4


@dataclass(slots=True, kw_only=True, eq=False)
class FakeRouted(FakeRequest):
    """A request for a router."""

    block_hashes: tuple[int | bytes, ...] = ()


class AnyRouter(Protocol):
    """The calls of a router that `RouterTraffic` makes; see `routing.router.Router`."""

    def join(self, replica: Any, *, num_places: int, role: Role = ..., position: int | None = ...) -> None:
        """Add a replica."""
        ...

    def drain(self, replica: Any, *, drains: bool = ...) -> None:
        """Stop or start sending to a replica."""
        ...

    def leave(self, replica: Any, now_s: float, *, has_died: bool) -> Departure[Any]:
        """Remove a replica."""
        ...

    def report(self, replica: Any, report: Report) -> None:
        """Take over a report."""
        ...

    def follow(self, replica: Any, start: int, end: int, events: Any) -> bool:
        """Follow events."""
        ...

    def restore(self, replica: Any, position: int, hashes: Any) -> None:
        """Take over a snapshot."""
        ...

    def route(self, request: Any, now_s: float) -> list[Placement[Any]]:
        """Accept a request."""
        ...

    def dispatch(self, now_s: float) -> list[Placement[Any]]:
        """Send what can be sent."""
        ...

    def computed(self, ticket: Ticket, now_s: float) -> bool:
        """Note a computed prompt."""
        ...

    def unaid(self, ticket: Ticket, now_s: float) -> bool:
        """Note that no other replica computes a prompt."""
        ...

    def end(self, ticket: Ticket, now_s: float) -> bool:
        """Note an answer."""
        ...

    def move(self, ticket: Ticket, now_s: float) -> bool:
        """Let a request wait again."""
        ...

    def cancel(self, arrival: int, now_s: float) -> Ticket | None:
        """Forget a request."""
        ...


@dataclass(slots=True, kw_only=True)
class _Replica:
    role: Role
    num_places: int
    rank: float
    position: int | None  # written by: routing
    blocks: set[Any] = field(default_factory=set[Any])  # written by: routing
    is_draining: bool = False  # written by: routing
    is_full: bool = False  # written by: routing
    slowness: float = 1.0  # written by: routing
    reported_s: float = -inf  # written by: routing
    foreign: tuple[int, int] = (0, 0)  # written by: routing
    history: list[tuple[float, int, int]] = field(default_factory=list[tuple[float, int, int]])  # written by: routing


@dataclass(slots=True, kw_only=True, eq=False)
class _Request:
    request: FakeRouted
    replica: Any = None  # written by: routing
    helper: Any = None  # written by: routing
    own: int = 0  # written by: routing
    help: int = 0  # written by: routing
    attempt: int = 0  # written by: routing
    sent: int = 0
    """Number of its placement."""  # written by: routing
    placed_at: int = 0
    """The same, or later if its replica drained and does no longer."""  # written by: routing
    num_moves: int = 0  # written by: routing
    num_deaths: int = 0  # written by: routing


class NaiveRouter:
    """Takes the decisions of `Router` without quotas, from complete lists: loads are sums, matches compare blocks."""

    def __init__(
        self,
        *,
        order: Order[Any],
        rng: Random,
        request_tokens: int,
        max_excess_tokens: float,
        min_apart_tokens: int,
        max_moves: int,
        max_deaths: int,
    ) -> None:
        """Take the arguments of `Router`; blocks have `BLOCK_SIZE` tokens."""
        self.order = order
        self.rng = rng
        self.request_tokens = request_tokens
        self.max_excess_tokens = max_excess_tokens
        self.min_apart_tokens = min_apart_tokens
        self.max_moves = max_moves
        self.max_deaths = max_deaths
        self.replicas: dict[Any, _Replica] = {}
        self.requests: dict[int, _Request] = {}
        self.num_placements = 0

    def join(self, replica: Any, *, num_places: int, role: Role = Role.BOTH, position: int | None = 0) -> None:
        """Add a replica."""
        self.replicas[replica] = _Replica(role=role, num_places=num_places, rank=self.rng.random(), position=position)

    def drain(self, replica: Any, *, drains: bool = True) -> None:
        """Stop or start sending to a replica."""
        was_draining, self.replicas[replica].is_draining = self.replicas[replica].is_draining, drains
        if was_draining and not drains:  # its requests count as sent last, in the order in which they were
            for one in sorted(self._on(replica), key=lambda one: one.placed_at):
                self.num_placements += 1
                one.placed_at = self.num_placements

    def leave(self, replica: Any, now_s: float, *, has_died: bool) -> Departure[Any]:
        """Remove a replica."""
        unaided: list[Placement[Any]] = []
        for one in sorted(self.requests.values(), key=lambda one: one.sent):
            if one.helper is not None and one.helper == replica:
                one.helper = None
                self._charge(one, now_s, one.request.num_tokens - one.request.num_matched)
                unaided.append(Placement(request=one.request, ticket=self._ticket(one)))
        waiting: list[FakeRouted] = []
        ended: list[FakeRouted] = []
        for one in sorted(self._on(replica), key=lambda one: one.placed_at):
            one.num_deaths += has_died
            self._unplace(one, now_s)
            if one.num_deaths >= self.max_deaths:
                del self.requests[one.request.arrival]
                ended.append(one.request)
            else:
                self._wait(one)
                waiting.append(one.request)
        del self.replicas[replica]
        return Departure(waiting=tuple(waiting), ended=tuple(ended), unaided=tuple(unaided))

    def report(self, replica: Any, report: Report) -> None:
        """Take over a report."""
        state = self.replicas[replica]
        if report.at_s < state.reported_s:
            return
        state.reported_s, state.is_full, state.slowness = report.at_s, report.is_full, report.slowness
        then = [change for change in state.history if change[0] <= report.at_s]
        state.foreign = (
            max(0, report.num_requests - sum(change[1] for change in then)),
            max(0, report.num_prompt_tokens - sum(change[2] for change in then)),
        )

    def follow(self, replica: Any, start: int, end: int, events: Any) -> bool:
        """Follow events that are maps."""
        state = self.replicas[replica]
        if state.position is not None and start > state.position:
            state.position, state.blocks = None, set()
        if state.position is None or start < state.position:
            return state.position is not None
        for event in events:
            match event["type"]:
                case "BlockStored":
                    state.blocks |= set(event["block_hashes"])
                case "BlockRemoved":
                    state.blocks -= set(event["block_hashes"])
                case _:
                    state.blocks = set()
        state.position = end
        return True

    def restore(self, replica: Any, position: int, hashes: Any) -> None:
        """Take over a snapshot."""
        self.replicas[replica].position, self.replicas[replica].blocks = position, set(hashes)

    def route(self, request: FakeRouted, now_s: float) -> list[Placement[Any]]:
        """Accept a request."""
        one = self.requests[request.arrival] = _Request(request=request)
        self._wait(one)
        return self.dispatch(now_s)

    def dispatch(self, now_s: float) -> list[Placement[Any]]:
        """Send what can be sent, one request after the other."""
        placements: list[Placement[Any]] = []
        while (placement := self._first(now_s)) is not None:
            placements.append(placement)
        return placements

    def computed(self, ticket: Ticket, now_s: float) -> bool:
        """Note a computed prompt."""
        one = self._valid(ticket)
        if one is not None:
            one.helper = self._end_help(one, now_s)
            self._charge(one, now_s, 0)
        return one is not None

    def unaid(self, ticket: Ticket, now_s: float) -> bool:
        """Note that no other replica computes a prompt."""
        one = self._valid(ticket)
        if one is not None and one.helper is not None:
            one.helper = self._end_help(one, now_s)
            self._charge(one, now_s, one.request.num_tokens - one.request.num_matched)
        return one is not None

    def end(self, ticket: Ticket, now_s: float) -> bool:
        """Note an answer."""
        one = self._valid(ticket)
        if one is not None:
            self._unplace(one, now_s)
            del self.requests[ticket.arrival]
        return one is not None

    def move(self, ticket: Ticket, now_s: float) -> bool:
        """Let a request wait again."""
        one = self._valid(ticket)
        if one is not None:
            self._unplace(one, now_s)
            self._wait(one)
        return one is not None

    def cancel(self, arrival: int, now_s: float) -> Ticket | None:
        """Forget a request."""
        one = self.requests.pop(arrival, None)
        if one is None:
            return None
        if one.replica is None:
            self.order.remove(one.request)
            return None
        ticket = self._ticket(one)
        self._unplace(one, now_s)
        return ticket

    def matched(self, replica: Any, request: FakeRouted) -> int:
        """Return the tokens of a request that a replica has cached."""
        num_blocks = 0
        while num_blocks < len(request.block_hashes) and (
            request.block_hashes[num_blocks] in self.replicas[replica].blocks
        ):
            num_blocks += 1
        return min(BLOCK_SIZE * num_blocks, request.num_tokens)

    def loads(self, replica: Any) -> tuple[int, int]:
        """Return the requests of a replica, and the prompt tokens that it has to compute."""
        state = self.replicas[replica]
        return (
            state.foreign[0] + sum(change[1] for change in state.history),
            state.foreign[1] + sum(change[2] for change in state.history),
        )

    def _first(self, now_s: float) -> Placement[Any] | None:
        """Send the first request that can be sent, or the first that can displace another."""
        waiting = list(self.order.ordered(now_s))
        if not waiting:
            return None
        best = self._best(waiting[0], lambda role: role is not Role.PREFILL)
        if best is not None:
            return self._send(self.requests[waiting[0].arrival], best, now_s, None)
        movable = [
            one
            for one in self.requests.values()
            if one.replica is not None and not self.replicas[one.replica].is_draining and one.num_moves < self.max_moves
        ]
        if not movable:
            return None
        victim = min(movable, key=lambda one: (one.request.priority, -one.placed_at))
        for request in waiting:
            if request.priority > victim.request.priority:
                replica, ticket = victim.replica, self._ticket(victim)
                victim.num_moves += 1
                self._unplace(victim, now_s)
                placement = self._send(self.requests[request.arrival], replica, now_s, ticket)
                self._wait(victim)
                return placement
        return None

    def _best(self, request: FakeRouted, has_role: Callable[[Role], bool]) -> Any:
        keys: dict[Any, float] = {}
        for name, state in self.replicas.items():
            num_requests, num_tokens = self.loads(name)
            if has_role(state.role) and not state.is_draining and not state.is_full and num_requests < state.num_places:
                keys[name] = state.slowness * (num_tokens + self.request_tokens * (num_requests + 1))
        least = min(keys.values(), default=0.0)
        near = [name for name, key in keys.items() if key <= least + self.max_excess_tokens]
        return min(
            near,
            key=lambda name: (
                keys[name] + (request.num_tokens - self.matched(name, request)), self.replicas[name].rank,
            ),
            default=None,
        )  # fmt: skip

    def _send(self, one: _Request, replica: Any, now_s: float, displaced: Ticket | None) -> Placement[Any]:
        request, state = one.request, self.replicas[replica]
        request.num_matched = self.matched(replica, request)
        self.num_placements += 1
        one.replica, one.attempt = replica, one.attempt + 1
        one.sent = one.placed_at = self.num_placements
        one.own = num_uncached = request.num_tokens - request.num_matched
        if state.role is Role.DECODE and num_uncached > self.min_apart_tokens:
            one.helper = self._best(request, lambda role: role is Role.PREFILL)
        if one.helper is not None:
            one.own, one.help = 0, request.num_tokens - self.matched(one.helper, request)
            self.replicas[one.helper].history.append((now_s, 1, one.help))
        state.history.append((now_s, 1, one.own))
        self.order.admit(request)
        return Placement(request=request, ticket=self._ticket(one), prefill=one.helper, displaced=displaced)

    def _unplace(self, one: _Request, now_s: float) -> None:
        one.helper = self._end_help(one, now_s)
        self.replicas[one.replica].history.append((now_s, -1, -one.own))
        one.replica = None
        self.order.stop(one.request)

    def _end_help(self, one: _Request, now_s: float) -> None:
        if one.helper is not None:
            self.replicas[one.helper].history.append((now_s, -1, -one.help))

    def _charge(self, one: _Request, now_s: float, num_tokens: int) -> None:
        self.replicas[one.replica].history.append((now_s, 0, num_tokens - one.own))
        one.own = num_tokens

    def _wait(self, one: _Request) -> None:
        one.request.num_matched = max((self.matched(name, one.request) for name in self.replicas), default=0)
        self.order.add(one.request)

    def _on(self, replica: Any) -> Iterator[_Request]:
        return (one for one in list(self.requests.values()) if one.replica == replica)

    def _valid(self, ticket: Ticket) -> _Request | None:
        one = self.requests.get(ticket.arrival)
        return one if one is not None and one.replica is not None and one.attempt == ticket.attempt else None

    def _ticket(self, one: _Request) -> Ticket:
        return Ticket(arrival=one.request.arrival, attempt=one.attempt, replica=one.replica)


@dataclass(slots=True, kw_only=True)
class RouterTraffic:
    """Random calls of two routers that should agree: everything that a fleet can do.

    Replicas join, drain, leave, die, report late, and publish events, of which some are lost until a snapshot. Requests
    arrive, are computed, end, are moved and cancelled, and answers of replicas that have lost a request come late.

    Invariant: `tickets` has every ticket ever made, with whether it is valid.
    """

    router: AnyRouter
    oracle: AnyRouter
    rng: Random
    roles: tuple[Role, ...] = (Role.BOTH,)
    max_replicas: int = 5
    now_s: float = 0.0  # written by: step
    num_arrivals: int = 0  # written by: _arrive
    num_joined: int = 0  # written by: _join
    positions: dict[str, int] = field(default_factory=dict[str, int])  # written by: step and its parts
    blocks: dict[str, set[int]] = field(default_factory=dict[str, set[int]])  # written by: step and its parts
    tickets: dict[Ticket, FakeRouted] = field(default_factory=dict[Ticket, FakeRouted])  # written by: step, _check
    twins: dict[int, FakeRouted] = field(default_factory=dict[int, FakeRouted])
    """The copies of the requests that the oracle gets, since routers write to requests."""  # written by: _arrive
    waiting: dict[int, FakeRouted] = field(default_factory=dict[int, FakeRouted])  # written by: step and its parts
    placed: dict[int, Ticket] = field(default_factory=dict[int, Ticket])  # written by: step and its parts
    answered: set[int] = field(default_factory=set[int])  # written by: _end

    def step(self) -> None:
        """Advance the time, do one random action, and compare.

        Raises:
            AssertionError: The routers differ, or a request is lost, answered twice, or sent where no replica is.
        """
        self.now_s += self.rng.choice((0.0, 0.5, 4.0))
        actions = [self._arrive, self._arrive, self._arrive]
        if len(self.positions) < self.max_replicas:
            actions.append(self._join)
        if self.positions:
            actions += [self._events, self._events, self._report, self._drain, self._leave]
        if self.tickets:
            actions += [self._computed, self._unaid, self._end, self._end, self._end, self._move]
        if self.num_arrivals:
            actions.append(self._cancel)
        self.rng.choice(actions)()
        self._sent(self.router.dispatch(self.now_s), self.oracle.dispatch(self.now_s))

    def _sent(self, placements: list[Placement[Any]], expected: list[Placement[Any]]) -> None:
        mine, theirs = _plain(placements), _plain(expected)
        assert mine == theirs, f"placements must be {theirs}, got {mine}"
        for placement in placements:
            arrival = placement.request.arrival
            assert self.waiting.pop(arrival, None) is placement.request, f"request {arrival} does not wait"
            assert placement.replica in self.positions, f"replica {placement.replica} has left"
            assert placement.prefill is None or placement.prefill in self.positions, (
                "a replica that has left must compute"
            )
            if placement.displaced is not None:
                victim = self.tickets[placement.displaced]
                assert self.placed.pop(victim.arrival) == placement.displaced, "a displaced ticket must be valid"
                assert victim.priority < placement.request.priority, "a request displaces one of lower priority"
                self.waiting[victim.arrival] = victim
            self.placed[arrival] = placement.ticket
            self.tickets[placement.ticket] = placement.request

    def _join(self) -> None:
        name, self.num_joined = f"replica {self.num_joined}", self.num_joined + 1
        num_places, role = self.rng.choice((1, 2, 4)), self.rng.choice(self.roles)
        self.positions[name], self.blocks[name] = 0, set()
        for router in (self.router, self.oracle):
            router.join(name, num_places=num_places, role=role)

    def _arrive(self) -> None:
        family, length = self.rng.randrange(3), self.rng.choice((0, 1, 3, 6))
        request = FakeRouted(
            arrival=self.num_arrivals,
            arrived_s=self.now_s,
            priority=self.rng.choice((0, 0, 1, 2)),
            tenant=self.rng.choice("ab"),
            num_tokens=BLOCK_SIZE * length + self.rng.choice((1, 3, 9)),
            block_hashes=tuple(100 * family + block for block in range(length)),
        )
        self.num_arrivals += 1
        self.waiting[request.arrival] = request
        twin = self.twins[request.arrival] = replace(request)
        self._sent(self.router.route(request, self.now_s), self.oracle.route(twin, self.now_s))

    def _events(self) -> None:
        name = self.rng.choice(list(self.positions))
        start, held, events = self.positions[name], self.blocks[name], list[dict[str, object]]()
        for _ in range(self.rng.randint(0, 3)):
            family, length = self.rng.randrange(3), self.rng.randint(1, 6)
            hashes = [100 * family + block for block in range(length)]
            kind = self.rng.choice(("BlockStored", "BlockStored", "BlockRemoved", "AllBlocksCleared"))
            if kind == "BlockStored":
                held |= set(hashes)
            elif kind == "BlockRemoved":
                held -= set(hashes[-2:])
                hashes = hashes[-2:]
            else:
                held.clear()
            events.append({"type": kind} if kind == "AllBlocksCleared" else {"type": kind, "block_hashes": hashes})
        self.positions[name] += 1
        if self.rng.random() < 0.2:
            return  # lost
        for router in (self.router, self.oracle):
            for _ in range(self.rng.choice((1, 1, 2))):  # sometimes twice
                if not router.follow(name, start, start + 1, events) and start % 2:
                    router.restore(name, start + 1, sorted(held))

    def _report(self) -> None:
        report = Report(
            at_s=max(0.0, self.now_s - self.rng.choice((0.0, 0.5, 9.0))),
            num_requests=self.rng.choice((0, 1, 3)),
            num_prompt_tokens=self.rng.choice((0, 10, 100)),
            slowness=self.rng.choice((1.0, 1.0, 4.0)),
            is_full=self.rng.random() < 0.1,
        )
        name = self.rng.choice(list(self.positions))
        for router in (self.router, self.oracle):
            router.report(name, report)

    def _drain(self) -> None:
        name, drains = self.rng.choice(list(self.positions)), self.rng.random() < 0.4
        for router in (self.router, self.oracle):
            router.drain(name, drains=drains)

    def _leave(self) -> None:
        if self.rng.random() < 0.5:
            return
        name, has_died = self.rng.choice(list(self.positions)), self.rng.random() < 0.7
        del self.positions[name], self.blocks[name]
        departure, expected = (
            router.leave(name, self.now_s, has_died=has_died) for router in (self.router, self.oracle)
        )
        assert _plain(departure.unaided) == _plain(expected.unaided), f"placements after the loss of {name} differ"
        for mine, theirs in ((departure.waiting, expected.waiting), (departure.ended, expected.ended)):
            assert [one.arrival for one in mine] == [one.arrival for one in theirs], f"departures of {name} differ"
        gone = {arrival for arrival, ticket in self.placed.items() if ticket.replica == name}
        told = {request.arrival for request in (*departure.waiting, *departure.ended)}
        assert gone == told, f"requests {sorted(gone ^ told)} are lost"
        for arrival in gone:
            self.waiting[arrival] = self.tickets[self.placed.pop(arrival)]
        for request in departure.ended:
            del self.waiting[request.arrival]

    def _computed(self) -> None:
        ticket = self.rng.choice(list(self.tickets))
        is_valid = self.placed.get(ticket.arrival) == ticket
        assert self.router.computed(ticket, self.now_s) == self.oracle.computed(ticket, self.now_s) == is_valid

    def _unaid(self) -> None:
        ticket = self.rng.choice(list(self.placed.values()) or list(self.tickets))
        is_valid = self.placed.get(ticket.arrival) == ticket
        assert self.router.unaid(ticket, self.now_s) == self.oracle.unaid(ticket, self.now_s) == is_valid

    def _end(self) -> None:
        """Let a replica answer, sometimes one that has lost the request."""
        ticket = self.rng.choice(list(self.tickets))
        counts = self.router.end(ticket, self.now_s)
        assert counts == self.oracle.end(ticket, self.now_s)
        assert counts == (self.placed.get(ticket.arrival) == ticket), f"{ticket} is answered twice, or never"
        if counts:
            assert ticket.arrival not in self.answered, f"request {ticket.arrival} is answered twice"
            self.answered.add(ticket.arrival)
            del self.placed[ticket.arrival]

    def _move(self) -> None:
        ticket = self.rng.choice(list(self.tickets))
        request, is_valid = self.tickets[ticket], self.placed.get(ticket.arrival) == ticket
        if is_valid:
            for one in (request, self.twins[request.arrival]):
                one.num_tokens += 2
                one.num_generated += 2
            self.waiting[request.arrival] = request
            del self.placed[request.arrival]
        assert self.router.move(ticket, self.now_s) == self.oracle.move(ticket, self.now_s) == is_valid

    def _cancel(self) -> None:
        arrival = self.rng.randrange(self.num_arrivals)
        self.waiting.pop(arrival, None)
        ticket = self.placed.pop(arrival, None)
        assert self.router.cancel(arrival, self.now_s) == self.oracle.cancel(arrival, self.now_s) == ticket


def _plain(placements: Iterable[Placement[Any]]) -> list[object]:
    return [
        (one.request.arrival, one.request.num_matched, one.ticket, one.prefill, one.displaced) for one in placements
    ]


def check_router(
    make_router: Callable[..., AnyRouter],
    make_order: Callable[[], Order[Any]],
    rng: Random,
    *,
    num_steps: int = 40,
    roles: tuple[Role, ...] = (Role.BOTH,),
) -> RouterTraffic:
    """Check that a router takes the decisions of `NaiveRouter` in random traffic, and loses or repeats no request.

    Args:
        make_router: Makes an empty router from the arguments of `Router`, for blocks of `BLOCK_SIZE` tokens.
        make_order: Makes the empty order of the requests that wait.
        rng: Generator for the traffic.
        num_steps: Length of the traffic.
        roles: Roles of the replicas.

    Returns:
        The traffic, at its end.

    Raises:
        AssertionError: The router takes another decision.
    """
    seed = rng.random()
    limits: dict[str, Any] = {
        "request_tokens": rng.choice((0, 1, 8)),
        "max_excess_tokens": rng.choice((0.0, 16.0, inf)),
        "min_apart_tokens": rng.choice((0, 8)),
        "max_moves": rng.choice((0, 1, 3)),
        "max_deaths": rng.choice((1, 2)),
    }
    traffic = RouterTraffic(
        router=make_router(block_size=BLOCK_SIZE, order=make_order(), rng=Random(seed), **limits),
        oracle=NaiveRouter(order=make_order(), rng=Random(seed), **limits),
        rng=rng,
        roles=roles,
    )
    for _ in range(num_steps):
        traffic.step()
    return traffic
