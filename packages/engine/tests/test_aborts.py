"""An abort by its exact id ends a request in every stage, and its pages are back one step later."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from echo_bench import PAGE, EchoBench, expected, submit
from pagewood.engine.api import Abort, FinishReason, Flush, Grammar, Pause, PauseRequest, Refusal, Resume
from pagewood.engine.core.masks.constrain import Compiling
from pagewood.engine.grammar.matcher import Matcher
from pagewood.kvpool.tiers import ArrayPages, HostTier, Lanes, ThreadLane, TieredIndex
from pagewood.kvpool.tiers.transfers.transfer import Transfer
from pagewood.radixcache import RadixCache

LONG = [1] * 20
NAME = "request-1"


class NeverCompiles:
    """A compiler that is never done."""

    def compile(self, grammar: Grammar, *, end_tokens: frozenset[int], priority: int = 0) -> Compiling:
        return self

    def prefer(self, priority: int) -> None: ...

    def done(self) -> bool:
        return False

    def result(self) -> Matcher | Refusal:
        raise AssertionError

    def close(self) -> None: ...


class GatedLane(ThreadLane):
    """A lane whose copies wait for a gate."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__("gated", max_bytes_in_flight=2**20)
        self.gate = gate

    def submit(self, work: Callable[[Transfer], None], num_bytes: int, *, priority: int = 0) -> Transfer | None:
        def gated(transfer: Transfer) -> None:
            assert self.gate.wait(10)
            work(transfer)

        return super().submit(gated, num_bytes, priority=priority)


@dataclass
class Case:
    """A bench with the request in one stage."""

    bench: EchoBench
    is_in_stage: bool


def waiting() -> Case:
    bench = EchoBench(max_running=1)
    bench.step(submit("other", [2] * 8), submit(NAME, LONG))
    return Case(bench, len(bench.state.waiting) == 1)


def compiling() -> Case:
    bench = EchoBench(compiler=NeverCompiles())
    bench.step(submit(NAME, LONG, grammar=Grammar.lark("0 6 999 0")))
    return Case(bench, len(bench.state.compiling) == 1)


def mid_chunk() -> Case:
    bench = EchoBench(chunked_prefill_size=4, overlap=False)
    bench.step(submit(NAME, LONG))
    bench.step()
    (request,) = bench.state.running
    return Case(bench, request.num_computed == 8)


def running() -> Case:
    bench = EchoBench(overlap=False)
    bench.step(submit(NAME, LONG))
    bench.steps(5)
    (request,) = bench.state.running
    return Case(bench, request.num_generated > 3 and not request.num_in_flight)


def in_flight() -> Case:
    bench = EchoBench(overlap=True)
    bench.step(submit(NAME, LONG))
    bench.steps(5)
    (request,) = bench.state.running
    return Case(bench, request.num_in_flight == 1)


def mid_chunk_in_flight() -> Case:
    bench = EchoBench(overlap=True, chunked_prefill_size=4)
    bench.step(submit(NAME, LONG))
    bench.step()
    (request,) = bench.state.running
    return Case(bench, request.num_in_flight == 1 and request.num_computed < 20)


def draining() -> Case:
    bench = EchoBench(overlap=True)
    bench.step(submit(NAME, LONG))
    bench.steps(5)
    bench.inbox.put(Abort(request_id=NAME))
    bench.engine._take_commands(bench.pending)  # pyright: ignore[reportPrivateUsage]
    return Case(bench, len(bench.state.draining) == 1)


def paused_in_place() -> Case:
    bench = EchoBench()
    bench.step(submit(NAME, LONG))
    bench.steps(3)
    bench.step(PauseRequest(request_id=NAME))
    bench.step()
    return Case(bench, [request.row >= 0 for request in bench.state.held] == [True])


def paused_and_retracted() -> Case:
    bench = EchoBench()
    bench.step(submit(NAME, LONG))
    bench.steps(3)
    bench.step(PauseRequest(request_id=NAME, retract=True))
    bench.steps(2)
    return Case(bench, [request.row for request in bench.state.held] == [-1])


def paused_before_its_memory_is_back() -> Case:
    bench = EchoBench(overlap=True)
    bench.step(submit(NAME, LONG))
    bench.steps(3)
    bench.step(PauseRequest(request_id=NAME, retract=True))
    return Case(bench, [request.row >= 0 for request in bench.state.held] == [True])


def of_a_paused_engine() -> Case:
    bench = EchoBench()
    bench.step(submit(NAME, LONG))
    bench.steps(3)
    bench.step(Pause(request_id="pause"))
    bench.step()
    return Case(bench, len(bench.state.running) == 1)


def parked() -> Case:
    prompt = [*range(1, 49), *range(1, 11)]
    bench = EchoBench(chunked_prefill_size=8)
    bench.step(submit("other", prompt, max_tokens=2))
    bench.step(submit(NAME, prompt, max_tokens=2))
    return Case(bench, len(bench.state.waiting) == 1 and not bench.state.waiting.num_candidates)


def preempted() -> Case:
    bench = EchoBench(max_running=1, preemption_threshold=0)
    bench.step(submit(NAME, LONG))
    bench.steps(3)
    bench.step(submit("other", [2] * 8, priority=1))
    bench.steps(3)
    return Case(bench, len(bench.state.waiting) == 1 and bench.engine.counters().num_preempted == 1)


def giving_way() -> Case:
    bench = EchoBench(max_running=1, preemption_threshold=0, overlap=True)
    bench.step(submit(NAME, LONG))
    bench.steps(3)
    bench.step(submit("other", [2] * 8, priority=1))
    (request,) = bench.state.running
    return Case(bench, request.request_id == NAME and len(bench.state.waiting) == 1)


STAGES = [
    waiting, compiling, mid_chunk, running, in_flight, mid_chunk_in_flight, draining, paused_in_place,
    paused_and_retracted, paused_before_its_memory_is_back, of_a_paused_engine, parked, preempted, giving_way,
]  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_an_abort_ends_a_request_in_every_stage(stage: Callable[[], Case]) -> None:
    case = stage()
    bench = case.bench
    assert case.is_in_stage, "the case is not what it claims to be"
    request = bench.state.by_id.get(NAME)
    others = [name for name in bench.state.by_id if name != NAME]
    bench.step(Abort(request_id=NAME))
    bench.step()  # a step that was in flight has been retired
    assert bench.finish(NAME) is FinishReason.ABORT
    assert sum(delta.finish is not None for delta in bench.deltas[NAME]) == 1
    assert request is None or (request.row, request.num_pages, request.lease) == (-1, 0, None)
    assert NAME not in bench.state.by_id
    for name in others:
        bench.step(Abort(request_id=name))
    bench.step(Resume(request_id="resume"))
    bench.step()
    bench.check_empty()


@contextmanager
def recalling() -> Generator[tuple[EchoBench, threading.Event]]:
    gate = threading.Event()
    gate.set()
    load = GatedLane(gate)

    def make_caches(memory: NDArray[np.uint64]) -> Callable[[], TieredIndex]:
        device = ArrayPages([[memory.view(np.uint8).reshape(-1, PAGE * 8)]])
        demote, store, fetch = (ThreadLane(name, max_bytes_in_flight=2**20) for name in ("demote", "store", "fetch"))
        return lambda: TieredIndex(
            RadixCache(PAGE),
            device=device,
            host=HostTier(page_bytes=PAGE * 8, num_pages=64),
            page_size=PAGE,
            lanes=Lanes(demote=demote, load=load, store=store, fetch=fetch),
        )

    bench = EchoBench(num_pages=16, make_caches=make_caches)
    bench.answer(submit("first", LONG, max_tokens=10))
    for number in range(2, 6):  # evicts it
        bench.answer(submit(f"evicts {number}", [number] * 40, max_tokens=20))
    gate.clear()
    try:
        yield bench, gate
    finally:
        gate.set()
        bench.engine.close()


def test_an_abort_ends_a_request_whose_prefix_is_recalled() -> None:
    with recalling() as (bench, gate):
        bench.step(submit(NAME, LONG))
        bench.until(lambda: bench.state.waiting.num_recalling == 1)
        bench.step(Abort(request_id=NAME))
        bench.step()
        assert bench.finish(NAME) is FinishReason.ABORT
        assert bench.state.waiting.num_recalling == 0
        assert NAME not in bench.state.by_id
        bench.step(submit("all", [9] * 40, max_tokens=20))  # needs every page but one
        bench.until(lambda: bench.engine.counters().num_preempted == 1)  # the copy still holds some
        gate.set()
        bench.until(lambda: bench.finish("all"), limit=2000)
        assert bench.tokens("all") == expected([9] * 40, 20)
        bench.step()
        bench.check_empty()


def test_an_id_that_begins_another_ends_its_own_request_only() -> None:
    bench = EchoBench(max_running=3)
    bench.step(*(submit(name, LONG, max_tokens=20) for name in ("request-1", "request-11", "request-")))
    bench.steps(2)
    for name in ("request", "request-111", "REQUEST-1", "request-1 ", ""):
        bench.step(Abort(request_id=name))
    assert len(bench.state.by_id) == 3
    bench.step(Abort(request_id="request-1"))
    bench.until(lambda: bench.finish("request-11") and bench.finish("request-"))
    assert bench.finish("request-1") is FinishReason.ABORT
    assert bench.tokens("request-11") == bench.tokens("request-") == expected(LONG, 20)


def test_the_id_of_an_aborted_request_can_be_used_again_at_once() -> None:
    bench = EchoBench(overlap=True)
    bench.step(submit(NAME, LONG))
    bench.steps(3)
    bench.step(Abort(request_id=NAME), submit(NAME, LONG, max_tokens=3))
    bench.deltas.clear()
    bench.until(lambda: bench.finish(NAME))
    assert bench.tokens(NAME)[-1] == expected(LONG, 3)[-1]
    bench.step(Flush(request_id="flush"))
    bench.check_empty()
