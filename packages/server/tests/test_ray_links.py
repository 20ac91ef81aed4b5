"""Engines that come and go, without Ray: links between an engine and processes with requests, and their joining."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import cast

import pytest

from pagewood.engine.api import Abort, Delta, EngineConfig, FinishReason, Flush, SetPriority, Submit
from pagewood.server.http.errors import ApiError
from pagewood.server.messages import wire
from pagewood.server.ray.calls import ReplicaLeftError
from pagewood.server.ray.joining import Joining
from pagewood.server.ray.link import LEASE_S, Link, Links, LostEngineError
from pagewood.server.replicas.dispatcher import Dispatcher
from pagewood.server.replicas.fleet_status import FleetStatus
from pagewood.server.replicas.making import make_router
from pagewood.server.replicas.replica import Replica
from pagewood.server.replicas.roster import Roster, Seat
from pagewood.server.requests.status import EngineState

pytestmark = pytest.mark.anyio

MODEL = wire.Model(max_length=64, vocab_size=8)
SEAT = Seat(number=0, incarnation=0)


def flush(name: str) -> bytes:
    return wire.encode(Flush(request_id=name))


def pulse(seat: Seat = SEAT) -> wire.Pulse:
    return wire.Pulse(incarnation=seat.incarnation, replica=seat.number, model=MODEL, counters={})


class LinkedEngine:
    """Links, and what the engine gets from them."""

    def __init__(self) -> None:
        self.got: list[wire.ToEngine] = []
        self.now_s = 0.0
        self.links = Links(lambda frame: self.got.append(wire.engine_commands.decode(frame)), clock=lambda: self.now_s)


async def test_an_answer_goes_over_the_link_of_its_request_with_the_seat_of_that_link() -> None:
    engine = LinkedEngine()
    engine.links.take(pulse())
    first = engine.links.open("first", Seat(number=4, incarnation=2))
    second = engine.links.open("second", Seat(number=0, incarnation=7))
    ended = engine.links.tell("first", 0, flush("a"))
    engine.links.tell("second", 0, flush("b"))
    assert ended is not None
    assert not ended.is_set()
    engine.links.take(wire.Step(tuple(Delta(name, finish=FinishReason.STOP) for name in ("a", "b", "of nobody"))))
    assert ended.is_set()
    for link, name, seat in ((first, "a", (4, 2)), (second, "b", (0, 7))):
        last, step = map(wire.from_engine.decode, await link.take())
        assert isinstance(last, wire.Pulse)
        assert isinstance(step, wire.Step)
        assert [one.request_id for one in step.deltas] == [name]
        assert {(one.replica, one.incarnation) for one in (last, step)} == {seat}


async def test_commands_come_in_the_order_of_their_numbers_and_those_about_a_request_open_none() -> None:
    engine = LinkedEngine()
    engine.links.open("first", SEAT)
    for number in (3, 1, 2):
        assert engine.links.tell("first", number, wire.encode(SetPriority(request_id="a", priority=number))) is None
    assert engine.got == []
    assert engine.links.tell("first", 0, flush("a")) is not None
    assert engine.got == [Flush(request_id="a"), *(SetPriority(request_id="a", priority=one) for one in (1, 2, 3))]


async def test_what_came_over_a_link_ends_with_it_also_when_nothing_is_heard_of_the_other_side() -> None:
    engine = LinkedEngine()
    links = {name: engine.links.open(name, SEAT) for name in ("closed", "silent", "heard")}
    ended = [engine.links.tell(name, 0, flush(name)) for name in links]
    engine.links.close("closed")
    engine.now_s = LEASE_S + 1
    engine.links.note_waiting("heard", 3)
    engine.links.expire()
    assert engine.links.num_waiting == 3
    assert engine.got[3:] == [Abort(request_id="closed"), Abort(request_id="silent")]
    assert [one is not None and one.is_set() for one in ended] == [True, True, False]
    assert engine.links.tell("silent", 1, flush("late")) is None
    with pytest.raises(LostEngineError, match="nothing was heard"):
        await links["silent"].take()
    engine.links.take(pulse())
    engine.links.fail(LostEngineError("it has died"))
    assert len(await links["heard"].take()) == 1  # what was queued comes first
    with pytest.raises(LostEngineError, match="it has died"):
        await links["heard"].take()


def submit(name: str, *, num_tokens: int) -> bytes:
    return wire.encode(Submit(request_id=name, tokens=bytes(4 * num_tokens)))


async def others_of(link: Link) -> list[tuple[int, int]]:
    """Return what a link has heard of the requests of the others since the last call."""
    async with asyncio.timeout(10):
        messages = map(wire.from_engine.decode, await link.take())
    return [(one.num_requests, one.num_prompt_tokens) for one in messages if isinstance(one, wire.OtherLoad)]


async def test_a_process_hears_what_the_engine_has_of_the_requests_of_others() -> None:
    engine = LinkedEngine()
    engine.links.take(pulse())
    first = engine.links.open("first", SEAT)
    assert await others_of(first) == [], "it is alone"
    engine.links.tell("first", 0, submit("a", num_tokens=30))
    engine.links.tell("first", 1, submit("b", num_tokens=5))
    engine.links.tell("first", 2, flush("c"))  # it takes no place
    second = engine.links.open("second", Seat(number=3, incarnation=1))
    assert await others_of(second) == [(2, 35)]
    engine.links.tell("second", 0, submit("d", num_tokens=7))
    assert await others_of(first) == [(1, 7)]
    engine.links.take(wire.Step((Delta("a", first=True, num_prompt_tokens=30),)))  # no token yet
    engine.links.take(wire.Step((Delta("a", tokens=(1,), num_output_tokens=1),)))
    engine.links.take(wire.Step((Delta("b", finish=FinishReason.STOP, num_output_tokens=1), Delta("d", tokens=(1,)))))
    assert await others_of(second) == [(2, 5), (1, 0)]
    engine.links.take(wire.Step((Delta("a", finish=FinishReason.STOP, num_output_tokens=2),)))
    assert await others_of(second) == [(0, 0)]
    engine.links.take(pulse())
    assert (await others_of(first), await others_of(second)) == ([(1, 7)], [(0, 0)]), "each pulse repeats it"
    engine.links.close("second")
    assert await others_of(first) == [(0, 0)]


class Fleet:
    """The side with the requests. It stands for the requests, for Ray, and for the detokenizer, all at once."""

    def __init__(self) -> None:
        self.roster = Roster(most=3)
        self.dispatcher = Dispatcher(make_router(EngineConfig()), self.roster.replicas, num_places=2)
        self.status = FleetStatus(replicas=self.roster.statuses, router=self.dispatcher, is_elastic=True)
        self.dispatcher.attach(self)
        self.roster.attach(self.dispatcher, self.status)
        self.moved: list[tuple[str, bool]] = []
        self.said: dict[str, asyncio.Queue[bytes | Exception]] = {}
        self.seats: dict[str, Seat] = {}
        self.told: list[tuple[str, int]] = []
        self.notes: dict[str, int] = {}
        self.closed: list[str] = []
        self.num_heard = 0
        self.kind = "ours"
        self.refusal: Exception | None = None
        self.changed = cast("Callable[[Sequence[str]], None]", None)
        joining = Joining(self.roster, self, self, kind="ours", is_wanted=lambda: False)
        self.task = asyncio.create_task(joining.run())

    def move(self, request_ids: Iterable[str], error: ApiError, *, is_planned: bool) -> None:
        for request_id in request_ids:
            self.moved.append((request_id, is_planned))
            self.dispatcher.renamed(request_id, new_id=f"{request_id}'")

    def may_move(self, request_id: str) -> bool:
        return True

    def is_sent(self, request_id: str) -> bool:
        return False

    def take(self, answers: wire.Answers) -> None: ...

    def send(self, frame: bytes) -> None:
        message = wire.from_engine.decode(frame)
        if isinstance(message, wire.OtherLoad):
            self.dispatcher.others_changed(message)
            self.num_heard += 1
            return
        assert isinstance(message, wire.Pulse)
        self.status.take(message)
        self.dispatcher.pulsed(message)

    async def watch(self, changed: Callable[[Sequence[str]], None]) -> None:
        self.changed = changed

    async def link(self, replica: str, seat: Seat) -> AsyncGenerator[list[bytes]]:
        self.seats[replica] = seat
        said = self.said[replica] = asyncio.Queue()
        said.put_nowait(wire.encode(pulse(seat)))
        try:
            yield [self.kind.encode()]
            while isinstance(frame := await said.get(), bytes):
                yield [frame]
            raise frame
        finally:
            self.closed.append(replica)

    async def tell(self, replica: str, number: int, frame: bytes) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.told.append((replica, number))

    async def note_waiting(self, replica: str, num: int) -> None:
        self.notes[replica] = num

    async def wake(self) -> None: ...

    async def have(self, *names: str) -> None:
        """Let there be these engines, and wait until all have joined."""
        await until(lambda: bool(self.changed))
        self.changed(names)
        await until(lambda: all(name in self.seats and self.replica(name).is_joined for name in names))

    def replica(self, name: str) -> Replica:
        return self.roster.replicas[self.seats[name].number]

    def route(self, name: str) -> None:
        """Let a request come from a tokenizer."""
        sizes = {"num_prompt": 4, "num_output": 0, "max_new_tokens": 4}
        self.dispatcher.take(
            wire.Routed(request_id=name, priority=0, tenant="", block_hashes=b"", submit=name.encode(), **sizes)
        )

    async def hear(self, name: str, *, num_requests: int, num_prompt_tokens: int = 0, incarnation: int = 0) -> None:
        """Let an engine say what it has of the requests of other processes."""
        num_heard, seat = self.num_heard, self.seats[name]
        load = wire.OtherLoad(
            num_requests=num_requests,
            num_prompt_tokens=num_prompt_tokens,
            replica=seat.number,
            incarnation=seat.incarnation + incarnation,
        )
        self.said[name].put_nowait(wire.encode(load))
        await until(lambda: self.num_heard > num_heard)

    def num(self, name: str) -> int:
        """Return how many requests an engine has."""
        return self.roster.num_requests(self.seats[name])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
async def fleet() -> AsyncGenerator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.task.cancel()
    await asyncio.gather(fleet.task, return_exceptions=True)


async def test_requests_go_to_the_engines_that_come_and_wait_while_there_is_none(fleet: Fleet) -> None:
    fleet.route("early")
    assert fleet.status.state is EngineState.STARTING  # the model is not known
    await fleet.have("a", "b")
    for number in range(4):
        fleet.route(f"r{number}")
    assert (fleet.num("a"), fleet.num("b"), fleet.roster.num_waiting) == (2, 2, 1)
    await until(lambda: fleet.notes == {"a": 1, "b": 1})
    for name in "ab":
        numbers = [number for replica, number in fleet.told if replica == name]
        assert numbers == [*range(len(numbers))]


async def test_the_requests_of_an_engine_that_leaves_move_and_its_link_closes_then(fleet: Fleet) -> None:
    await fleet.have("a", "b")
    fleet.route("r0")
    fleet.route("r1")
    await fleet.have("b", "c")
    await until(lambda: fleet.closed == ["a"])
    assert [is_planned for _, is_planned in fleet.moved] == [True]  # so no request is suspected
    await fleet.have("b", "c", "d")
    assert fleet.seats["d"] == Seat(number=fleet.seats["a"].number, incarnation=1)


async def test_the_last_engine_keeps_its_requests_until_another_one_comes(fleet: Fleet) -> None:
    await fleet.have("a")
    fleet.route("r0")
    fleet.changed([])
    await asyncio.sleep(0.2)
    assert (fleet.moved, fleet.num("a")) == ([], 1)
    await fleet.have("b")
    await until(lambda: fleet.closed == ["a"])
    assert fleet.moved == [("r0", True)]


async def test_requests_of_other_processes_take_places_and_are_load(fleet: Fleet) -> None:
    await fleet.have("a", "b")
    await fleet.hear("a", num_requests=1)
    await fleet.hear("b", num_requests=9, incarnation=1)  # of another process
    fleet.route("r0")
    fleet.route("r1")
    fleet.route("r2")
    assert (fleet.num("a"), fleet.num("b")) == (1, 2)
    fleet.route("r3")
    await fleet.hear("a", num_requests=1)
    assert fleet.roster.num_waiting == 1
    await fleet.hear("a", num_requests=0)
    assert (fleet.num("a"), fleet.num("b"), fleet.roster.num_waiting) == (2, 2, 0)


async def test_prompts_of_other_processes_are_load(fleet: Fleet) -> None:
    await fleet.have("a", "b")
    for busy, other in ("ab", "ba"):
        await fleet.hear(busy, num_requests=1, num_prompt_tokens=2000)
        await fleet.hear(other, num_requests=1)
        num = fleet.num(other)
        fleet.route(f"beside {busy}")
        assert fleet.num(other) == num + 1


@pytest.mark.parametrize("by_call", [None, LostEngineError("it has died"), ReplicaLeftError("a")])
async def test_the_requests_of_an_engine_that_is_lost_move(fleet: Fleet, by_call: Exception | None) -> None:
    await fleet.have("a")
    fleet.refusal = by_call
    fleet.route("r0")
    if by_call is None:
        fleet.said["a"].put_nowait(LostEngineError("it has died"))
    await until(lambda: fleet.closed == ["a"])
    assert fleet.moved == [("r0", isinstance(by_call, ReplicaLeftError))]
    assert fleet.status.state is EngineState.READY
    assert fleet.status.detail == "no engine works at the moment; requests wait for one"


async def test_an_engine_of_another_kind_gets_no_requests(fleet: Fleet) -> None:
    await until(lambda: bool(fleet.changed))
    fleet.kind = "theirs"
    fleet.changed(["a"])
    await until(lambda: fleet.closed == ["a"])
    fleet.kind = "ours"
    fleet.changed(["a", "b"])
    await until(lambda: "b" in fleet.seats and fleet.replica("b").is_joined)
    assert fleet.closed == ["a"]
    assert fleet.seats["b"].number == fleet.seats["a"].number
