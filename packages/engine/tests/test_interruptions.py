"""Requests that give way to a higher priority, that wait too long, and engines that pause."""

from typing import Any

import pytest

from echo_bench import EchoBench, expected, submit
from pagewood.engine.api import Abort, EngineConfig, FinishReason, Flush, Pause, Resume

LONG, OTHER, URGENT = [1] * 20, [2] * 20, [3] * 8


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_of_much_higher_priority_takes_the_place_of_the_least_deserving(overlap: bool) -> None:
    bench = EchoBench(preemption_threshold=5, overlap=overlap)
    bench.step(submit("a", LONG), submit("b", OTHER, priority=1))
    bench.steps(4)
    bench.step(submit("urgent", URGENT, priority=6, max_tokens=3))
    bench.steps(6)
    assert bench.finish("urgent") is FinishReason.LENGTH
    assert bench.engine.counters().num_preempted == 1
    assert len(bench.tokens("a")) < len(bench.tokens("b"))  # a left, because its priority is lower by more than 5
    bench.steps(60)
    assert (bench.tokens("a"), bench.tokens("b")) == (expected(LONG), expected(OTHER))


@pytest.mark.parametrize(("threshold", "priority"), [(None, 99), (6, 6), (5, 5)])
def test_a_lower_priority_alone_is_no_reason(threshold: int | None, priority: int) -> None:
    bench = EchoBench(preemption_threshold=threshold)
    bench.step(submit("a", LONG), submit("b", OTHER))
    bench.steps(4)
    bench.step(submit("urgent", URGENT, priority=priority))
    bench.steps(15)
    assert bench.engine.counters().num_preempted == 0
    assert not bench.tokens("urgent")


def test_ever_higher_priorities_cannot_preempt_the_same_request_again_and_again() -> None:
    bench = EchoBench(preemption_threshold=0, max_running=1)
    bench.step(submit("a", LONG))
    bench.steps(3)
    for number in range(1, 8):
        bench.step(submit(f"urgent-{number}", [number + 3] * 8, priority=number, max_tokens=2))
        bench.steps(6)
    counters = bench.engine.counters()
    # It has at most 50 tokens, and must grow by half from 21 or more: so three times at most, and there were 7 reasons.
    assert 1 <= counters.num_preempted <= 3
    assert counters.num_spared >= 3
    bench.steps(60)
    assert bench.tokens("a") == expected(LONG)
    for number in range(1, 8):
        assert bench.tokens(f"urgent-{number}") == expected([number + 3] * 8, 2)


def test_memory_is_given_too() -> None:
    bench = EchoBench(preemption_threshold=0, max_running=4, schedule_conservativeness=0.01)
    bench.step(*(submit(name, [number] * 34) for number, name in enumerate("abc", 1)))
    bench.steps(4)
    bench.step(submit("urgent", [9] * 30, priority=1, max_tokens=4))
    bench.steps(8)
    assert bench.finish("urgent") is FinishReason.LENGTH
    bench.steps(120)
    assert [bench.tokens(name) for name in "abc"] == [expected([number] * 34) for number in (1, 2, 3)]


@pytest.mark.parametrize("overlap", [False, True])
def test_memory_that_is_kept_for_the_outputs_of_those_that_can_leave_does_not_count(overlap: bool) -> None:
    """They hold a page each, but all of memory is kept for them: their outputs may have 63 tokens."""
    bench = EchoBench(preemption_threshold=5, schedule_conservativeness=1.0, overlap=overlap, max_running=4)
    bench.step(submit("a", [1], max_tokens=63), submit("b", [2], max_tokens=63))
    bench.steps(2)
    prompt = list(range(10, 40))
    bench.step(submit("urgent", prompt, priority=6, max_tokens=20))
    bench.steps(4)
    assert bench.tokens("urgent")
    assert bench.engine.counters().num_preempted == 1  # beside the other there is room
    bench.steps(100)
    assert bench.tokens("urgent") == expected(prompt, 20)
    assert bench.tokens("b") == expected([2], 63)


def test_nobody_leaves_if_all_that_can_would_not_be_enough() -> None:
    """Two keep their memory, because their priority is too near; the third has too little."""
    bench = EchoBench(preemption_threshold=5, schedule_conservativeness=1.0, max_running=4)
    bench.step(
        submit("a", [1] * 40, priority=3, max_tokens=24),
        submit("b", [2] * 20, priority=3, max_tokens=19),
        submit("low", [4] * 4, max_tokens=20),
    )
    bench.steps(3)
    assert bench.tokens("low")
    bench.step(submit("urgent", list(range(20)), priority=6, max_tokens=20))
    bench.steps(8)
    assert bench.engine.counters().num_preempted == 0
    assert not bench.tokens("urgent")


def test_nobody_leaves_for_a_request_that_has_ended() -> None:
    bench = EchoBench(preemption_threshold=0)
    bench.step(submit("a", LONG), submit("b", OTHER))
    bench.steps(4)
    bench.step(submit("urgent", URGENT, priority=1))
    bench.step(Abort(request_id="urgent"))
    bench.steps(5)
    assert bench.engine.counters().num_preempted == 0


def test_lower_priorities_can_go_first() -> None:
    bench = EchoBench(preemption_threshold=0, max_running=1, low_priority_first=True)
    bench.step(submit("a", LONG, priority=3), submit("b", OTHER, priority=2))
    bench.steps(3)
    assert bench.tokens("b")
    bench.step(submit("urgent", URGENT, priority=1, max_tokens=2))
    bench.steps(5)
    assert bench.finish("urgent") is FinishReason.LENGTH
    assert not bench.tokens("a")


def test_a_request_that_never_ran_is_refused_when_it_has_waited_too_long() -> None:
    bench = EchoBench(max_running=1, max_queue_s=10.0)
    bench.step(submit("a", LONG), submit("b", OTHER))
    bench.now_s = 9.9
    bench.steps(2)
    assert "b" not in bench.deltas
    bench.now_s = 10.0
    bench.step()
    (last,) = bench.deltas["b"]
    assert last.finish is FinishReason.REFUSED
    assert last.refusal is not None
    assert (last.refusal.code, last.carry) == ("queue_timeout", b"b")
    bench.steps(40)
    assert bench.tokens("a") == expected(LONG)


def test_a_preempted_request_may_wait_as_long_as_it_must() -> None:
    bench = EchoBench(max_running=1, max_queue_s=10.0, preemption_threshold=0)
    bench.step(submit("a", LONG))
    bench.steps(3)
    bench.step(submit("urgent", URGENT, priority=1, max_tokens=20))
    bench.steps(5)
    assert bench.engine.counters().num_preempted == 1
    bench.now_s = 100.0
    bench.steps(60)
    assert bench.tokens("a") == expected(LONG)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("retract", [False, True])
def test_a_paused_engine_computes_nothing_and_goes_on_where_it_stopped(overlap: bool, retract: bool) -> None:
    bench = EchoBench(overlap=overlap)
    bench.step(submit("a", LONG))
    bench.steps(5)
    bench.step(Pause(request_id="pause", retract=retract))
    assert bench.finish("pause") is FinishReason.STOP
    bench.steps(2)
    num_steps, num_tokens = bench.engine.counters().num_steps, len(bench.tokens("a"))
    bench.step(submit("b", OTHER))
    bench.steps(5)
    counters = bench.engine.counters()
    assert (counters.num_steps, len(bench.tokens("a"))) == (num_steps, num_tokens)
    assert (counters.num_running, counters.num_waiting) == ((0, 2) if retract else (1, 1))
    bench.step(Flush(request_id="flush"))
    assert (bench.deltas["flush"][0].num_cached_tokens > 0) == retract
    bench.step(Resume(request_id="resume"))
    bench.steps(80)
    assert (bench.tokens("a"), bench.tokens("b")) == (expected(LONG), expected(OTHER))


def test_a_paused_engine_takes_aborts() -> None:
    bench = EchoBench()
    bench.step(submit("a", LONG), submit("b", OTHER))
    bench.steps(3)
    bench.step(Pause(request_id="pause"))
    bench.step(Abort(request_id="a"), Abort(request_id="b"))
    assert (bench.finish("a"), bench.finish("b")) == (FinishReason.ABORT, FinishReason.ABORT)
    bench.steps(2)
    assert bench.engine.counters().num_draining == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preemption_threshold": -1}, "preemption_threshold must be >= 0"),
        ({"low_priority_first": True, "schedule_policy": "priority_low"}, "low_priority_first must be false with"),
        ({"max_queue_s": 0.0}, "max_queue_s must be"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)
