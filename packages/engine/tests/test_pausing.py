"""Requests that are paused alone, pauses of the whole engine that abort, and flushes that wait."""

from __future__ import annotations

import random

import pytest

from echo_bench import PAGE, EchoBench, expected, submit
from pagewood.engine.api import (
    Abort,
    FinishReason,
    Flush,
    Grammar,
    Pause,
    PauseRequest,
    Resume,
    ResumeRequest,
    SetPriority,
)
from pagewood.engine.testing.echo_grammar import EchoCompiler

LONG, OTHER = [1] * 20, [2] * 20


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("retract", [False, True])
def test_a_running_request_stops_alone_and_goes_on_where_it_stopped(overlap: bool, retract: bool) -> None:
    bench = EchoBench(overlap=overlap)
    bench.step(submit("a", LONG), submit("b", OTHER))
    bench.steps(5)
    bench.step(PauseRequest(request_id="a", retract=retract))
    bench.steps(2)  # a step in flight, and then the one that takes its memory
    num_tokens, (held,) = len(bench.tokens("a")), bench.state.held
    assert (held.row < 0) == retract
    bench.steps(10)
    assert len(bench.tokens("a")) == num_tokens
    assert len(bench.tokens("b")) > num_tokens
    arrival = held.arrival
    bench.step(ResumeRequest(request_id="a"))
    assert held in (bench.state.running if not retract or held.row >= 0 else bench.state.waiting)
    bench.until(lambda: bench.finish("a"))
    assert (bench.tokens("a"), held.arrival) == (expected(LONG), arrival)
    bench.until(lambda: bench.finish("b"))
    assert bench.tokens("b") == expected(OTHER)
    num_computed = bench.engine.counters().num_tokens
    num_again = num_computed - 2 * (20 + 30 - 1)
    assert 0 <= num_again <= PAGE  # at most the tokens of a partial last page
    bench.step()
    bench.check_empty()


def test_a_waiting_request_keeps_its_place_while_others_pass_it() -> None:
    bench = EchoBench(max_running=1)
    bench.step(submit("a", LONG, max_tokens=3), submit("b", [3] * 8, max_tokens=3), submit("c", [4] * 8))
    bench.step(PauseRequest(request_id="b"))
    bench.until(lambda: bench.tokens("c"))
    assert not bench.tokens("b")
    bench.step(submit("d", [5] * 8))
    bench.step(ResumeRequest(request_id="b"))
    bench.step(Abort(request_id="c"))
    bench.until(lambda: bench.finish("b"))  # before d, which came later
    assert not bench.tokens("d")
    assert bench.tokens("b") == expected([3] * 8, 3)


def test_a_request_is_paused_while_its_grammar_is_compiled() -> None:
    bench = EchoBench(compiler=EchoCompiler(random.Random(1), 50))
    bench.step(submit("a", LONG, max_tokens=6, grammar=Grammar.lark("0 6 999 0")))
    assert bench.state.compiling
    bench.step(PauseRequest(request_id="a"))
    bench.until(lambda: bench.state.held)
    bench.steps(5)
    assert not bench.tokens("a")
    bench.step(ResumeRequest(request_id="a"))
    bench.until(lambda: bench.finish("a"))
    assert len(bench.tokens("a")) == 6


def test_a_pause_that_is_taken_back_while_the_grammar_is_compiled_does_nothing() -> None:
    bench = EchoBench(compiler=EchoCompiler(random.Random(1), 50))
    bench.step(submit("a", LONG, max_tokens=6, grammar=Grammar.lark("0 6 999 0")))
    bench.step(PauseRequest(request_id="a"), ResumeRequest(request_id="a"))
    bench.until(lambda: bench.finish("a"))
    assert len(bench.tokens("a")) == 6


def test_limits_of_the_queue_do_not_end_a_request_that_was_paused() -> None:
    bench = EchoBench(max_running=1, max_queue_s=10.0)
    bench.step(submit("a", LONG), submit("b", OTHER, max_tokens=3), submit("c", [3] * 8))
    bench.step(PauseRequest(request_id="b"))
    bench.now_s = 50.0
    bench.steps(2)
    assert bench.finish("c") is FinishReason.REFUSED
    assert "b" not in bench.deltas
    bench.step(ResumeRequest(request_id="b"))
    bench.until(lambda: bench.finish("b"))
    assert bench.tokens("b") == expected(OTHER, 3)


@pytest.mark.parametrize("overlap", [False, True])
def test_memory_of_a_request_in_place_goes_to_a_request_that_lacks_it(overlap: bool) -> None:
    bench = EchoBench(num_pages=16, max_running=4, overlap=overlap)
    bench.step(submit("a", LONG))
    bench.steps(4)
    bench.step(PauseRequest(request_id="a"))
    bench.step()
    (held,) = bench.state.held
    assert held.row >= 0
    bench.step(submit("b", [6] * 40, max_tokens=20))
    bench.until(lambda: bench.finish("b"))
    assert bench.tokens("b") == expected([6] * 40, 20)
    assert (held.row, held.pause) == (-1, "retract")
    bench.step(ResumeRequest(request_id="a"))
    bench.until(lambda: bench.finish("a"))
    assert bench.tokens("a") == expected(LONG)


def test_memory_of_a_request_in_place_goes_to_a_running_request_that_grows() -> None:
    bench = EchoBench(num_pages=16, max_running=4, schedule_conservativeness=0.01)
    bench.step(submit("a", LONG), submit("b", [6] * 34, max_tokens=30))
    bench.steps(3)
    bench.step(PauseRequest(request_id="a"))
    bench.until(lambda: bench.finish("b"))
    assert bench.engine.counters().num_preempted == 0  # b never left for lack of memory
    assert bench.tokens("b") == expected([6] * 34)


def test_the_row_of_a_request_in_place_goes_to_a_waiting_request() -> None:
    bench = EchoBench(max_running=1)
    bench.step(submit("a", LONG))
    bench.steps(3)
    bench.step(PauseRequest(request_id="a"), submit("b", OTHER, max_tokens=3))
    bench.until(lambda: bench.finish("b"))
    assert bench.tokens("b") == expected(OTHER, 3)


def test_a_request_that_gives_way_and_is_paused_meanwhile_leaves_once() -> None:
    bench = EchoBench(preemption_threshold=0, overlap=True)
    bench.step(submit("a", LONG), submit("b", OTHER, priority=2))
    bench.steps(4)
    bench.step(submit("urgent", [3] * 8, priority=1, max_tokens=3))  # a is to leave, and a step of it is in flight
    bench.step(PauseRequest(request_id="a"))
    bench.until(lambda: bench.finish("urgent"))
    bench.step(ResumeRequest(request_id="a"))
    bench.until(lambda: bench.finish("a") and bench.finish("b"))
    assert (bench.tokens("a"), bench.tokens("b")) == (expected(LONG), expected(OTHER))


def test_repeats_do_not_wait_for_the_prompt_of_a_paused_request() -> None:
    prompt = [*range(1, 49), *range(1, 11)]
    bench = EchoBench(chunked_prefill_size=8)
    bench.step(submit("a", prompt, max_tokens=2))
    bench.step(submit("b", prompt, max_tokens=2))
    assert (len(bench.state.waiting), bench.state.waiting.num_candidates) == (1, 0)  # b is parked
    bench.step(PauseRequest(request_id="a"))
    bench.until(lambda: bench.finish("b"))
    assert bench.tokens("b") == expected(prompt, 2)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("has_grammar", [False, True])
def test_a_request_can_begin_paused(overlap: bool, has_grammar: bool) -> None:
    bench = EchoBench(overlap=overlap, compiler=EchoCompiler(random.Random(1), 50), max_queue_s=5.0)
    grammar = Grammar.lark("0 6 999 0") if has_grammar else None
    bench.step(submit("a", LONG, is_paused=True, grammar=grammar), submit("b", OTHER, max_tokens=4))
    bench.until(lambda: bench.finish("b"))
    bench.now_s += 10.0
    bench.steps(5)
    assert (bench.engine.counters().num_held, bench.state.is_resting, bench.tokens("a")) == (1, True, [])
    bench.step(ResumeRequest(request_id="a"))
    bench.until(lambda: bench.finish("a"))
    assert len(bench.tokens("a")) == (6 if has_grammar else 30)
    bench.step()
    bench.check_empty()


def test_priorities_and_unknown_ids_are_no_errors() -> None:
    bench = EchoBench()
    bench.step(PauseRequest(request_id="?"), ResumeRequest(request_id="?"), submit("a", LONG, max_tokens=4))
    bench.step(ResumeRequest(request_id="a"), PauseRequest(request_id="a", retract=True))
    bench.step(PauseRequest(request_id="a"), SetPriority(request_id="a", priority=3))
    bench.steps(3)
    assert bench.engine.counters().num_held == 1
    bench.step(ResumeRequest(request_id="a"))
    bench.until(lambda: bench.finish("a"))
    assert bench.tokens("a") == expected(LONG, 4)


def test_a_pause_of_all_with_retract_takes_the_memory_of_those_paused_alone() -> None:
    bench = EchoBench()
    bench.step(submit("a", LONG), submit("b", OTHER))
    bench.steps(3)
    bench.step(PauseRequest(request_id="a"))
    bench.step(Pause(request_id="pause", retract=True))
    bench.steps(2)
    counters = bench.engine.counters()
    assert (counters.num_running, counters.num_held, bench.kv.cache.num_locked) == (0, 1, 0)
    bench.step(Resume(request_id="resume"))
    bench.until(lambda: bench.finish("b"))
    assert bench.engine.counters().num_held == 1  # it stays paused alone
    assert bench.tokens("b") == expected(OTHER)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_pause_that_aborts_ends_every_request_and_answers_last(overlap: bool) -> None:
    bench = EchoBench(overlap=overlap, compiler=EchoCompiler(random.Random(1), 50))
    bench.step(submit("a", LONG), submit("b", OTHER), submit("c", [3] * 8))
    bench.steps(3)
    bench.step(PauseRequest(request_id="b"), submit("d", [4] * 8, grammar=Grammar.lark("0 6 999 0")))
    bench.inbox.put(Pause(request_id="pause", abort=True))
    bench.pending = bench.engine.advance(bench.pending)
    found = [(delta.request_id, delta.finish) for delta in bench.outbox.take() if delta.finish is not None]
    assert sorted(found[:-1]) == [(name, FinishReason.ABORT) for name in "abcd"]
    assert found[-1] == ("pause", FinishReason.STOP)
    bench.steps(2)
    bench.check_empty()
    bench.step(submit("e", LONG, max_tokens=3))
    bench.steps(3)
    assert "e" not in bench.deltas
    bench.step(Resume(request_id="resume"))
    bench.until(lambda: bench.finish("e"))
    assert bench.tokens("e") == expected(LONG, 3)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_flush_can_wait_until_no_request_is_left(overlap: bool) -> None:
    bench = EchoBench(overlap=overlap)
    bench.step(submit("a", LONG), Flush(request_id="now"), Flush(request_id="later", when_idle=True))
    bench.until(lambda: bench.finish("a"))
    assert bench.deltas["now"][0].num_cached_tokens == 0
    bench.steps(3)
    assert bench.deltas["later"][0].num_cached_tokens == 48
    assert bench.engine.counters().num_free_pages == 32
    bench.step(Flush(request_id="idle", when_idle=True))
    assert bench.finish("idle") is FinishReason.STOP


def test_a_flush_that_waits_can_be_taken_back() -> None:
    bench = EchoBench()
    bench.step(submit("a", LONG), Flush(request_id="later", when_idle=True))
    bench.step(Abort(request_id="later"))
    assert bench.finish("later") is FinishReason.ABORT
    bench.until(lambda: bench.finish("a"))
    bench.steps(3)
    assert len(bench.deltas["later"]) == 1
    assert bench.engine.counters().num_cached_pages > 0
