import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewood.schedpolicy import NewTokenRatio


@dataclass(frozen=True, slots=True)
class Runner:
    num_generated: int
    max_new_tokens: int
    num_tokens: int = 100
    arrival: int = 0
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Queued:
    num_tokens: int
    num_matched: int
    max_new_tokens: int
    num_generated: int = 0
    arrival: int = 0
    arrived_s: float = 0.0
    priority: int = 0


runners = st.builds(
    Runner, num_generated=st.integers(0, 300), max_new_tokens=st.integers(1, 300), num_tokens=st.integers(1, 500)
)
events = st.lists(st.none() | st.lists(runners, max_size=4), max_size=40)  # a step, or a preemption with survivors


def test_it_decays_from_init_to_its_floor_in_decay_steps():
    ratio = NewTokenRatio(init=0.5, min_factor=0.2, decay_steps=4)
    seen = [ratio.ratio]
    for _ in range(6):
        ratio.on_step()
        seen.append(ratio.ratio)
    assert seen == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1, 0.1, 0.1])


def test_defaults_are_those_of_sglang():
    ratio = NewTokenRatio()
    assert ratio.ratio == 0.7
    for _ in range(600):
        ratio.on_step()
    assert ratio.ratio == pytest.approx(0.7 * 0.14)


def test_it_holds_for_sixty_steps_by_default():
    ratio = NewTokenRatio()
    ratio.on_preempt([])
    for _ in range(60):
        ratio.on_step()
        assert ratio.ratio == 0.7
    ratio.on_step()
    assert ratio.ratio < 0.7


def test_a_preemption_raises_it_to_what_the_survivors_generated_and_holds_it():
    ratio = NewTokenRatio(init=0.1, min_factor=0.1, decay_steps=10, hold_steps=3)
    ratio.on_preempt([Runner(num_generated=100, max_new_tokens=200), Runner(num_generated=60, max_new_tokens=200)])
    assert ratio.ratio == pytest.approx((100 + 20 + 60 + 20) / 401)
    for _ in range(3):
        ratio.on_step()
    assert ratio.ratio == pytest.approx(200 / 401)
    ratio.on_step()
    assert ratio.ratio == pytest.approx(200 / 401 - 0.09 / 10)


def test_a_preemption_without_survivors_still_holds():
    ratio = NewTokenRatio(init=0.5, hold_steps=1)
    ratio.on_preempt([])
    ratio.on_step()
    assert ratio.ratio == 0.5
    ratio.on_step()
    assert ratio.ratio < 0.5


def test_requests_that_start_together_get_what_those_before_them_generated():
    ratio = NewTokenRatio(init=0.5, min_factor=0.1, decay_steps=10)
    for _ in range(10):
        ratio.on_step()
    assert ratio.ratio == pytest.approx(0.05)
    ratio.on_idle()
    assert ratio.ratio == 0.5  # nothing has ended yet
    for _ in range(400):
        ratio.on_end(Runner(num_generated=40, max_new_tokens=50))
    ratio.on_end(Runner(num_generated=0, max_new_tokens=0))  # asks for no tokens, so it says nothing
    ratio.on_idle()
    assert ratio.ratio == pytest.approx(0.8, abs=1e-4)
    for _ in range(400):
        ratio.on_end(Runner(num_generated=1, max_new_tokens=50))
    ratio.on_idle()
    assert ratio.ratio == pytest.approx(0.8, abs=1e-4)  # it falls by steps only


@given(st.floats(0.01, 1), st.floats(0, 1), st.integers(1, 20), st.integers(0, 5), events)
def test_it_stays_in_bounds_falls_only_by_steps_and_never_while_held(
    init: float, min_factor: float, decay_steps: int, hold_steps: int, events: list[list[Runner] | None]
):
    ratio = NewTokenRatio(init=init, min_factor=min_factor, decay_steps=decay_steps, hold_steps=hold_steps)
    num_steps_since_preempt = hold_steps
    for survivors in events:
        before = ratio.ratio
        if survivors is None:
            ratio.on_step()
            num_steps_since_preempt += 1
            assert ratio.ratio <= before
            if num_steps_since_preempt <= hold_steps:
                assert ratio.ratio == before
        else:
            ratio.on_preempt(survivors)
            num_steps_since_preempt = 0
            assert ratio.ratio >= before
        assert init * min_factor <= ratio.ratio <= 1


@given(st.floats(0.01, 1), st.lists(runners, max_size=5), st.integers(1, 32))
def test_running_requests_reserve_the_pages_of_their_estimated_tokens(
    init: float, running: list[Runner], page_size: int
):
    ratio = NewTokenRatio(init=init)
    expected = 0
    for runner in running:
        num_new = math.ceil(init * max(0, runner.max_new_tokens - runner.num_generated))
        pages_now = {position // page_size for position in range(runner.num_tokens)}
        pages_then = {position // page_size for position in range(runner.num_tokens + num_new)}
        expected += len(pages_then - pages_now) * page_size
    assert ratio.reserved_tokens(iter(running), page_size=page_size) == expected


@given(st.floats(0.01, 1), st.lists(runners, max_size=4), st.lists(runners, max_size=4), st.integers(1, 32), st.data())
def test_the_reserve_of_a_step_includes_requests_admitted_in_it(
    init: float, running: list[Runner], candidates: list[Runner], page_size: int, data: st.DataObject
):
    ratio = NewTokenRatio(init=init)
    lacking = [data.draw(st.integers(0, 3)) for _ in running]
    step = ratio.open(iter(running), page_size=page_size, num_to_complete=sum(lacking))
    for candidate in candidates:
        expected = sum(lacking) + ratio.reserved_tokens([*running, candidate], page_size=page_size) // page_size
        assert step.num_reserved(candidate) == (expected if running else 0)
        if data.draw(st.booleans()):
            lacking.append(data.draw(st.integers(0, 3)))
            step.admit(candidate, num_to_complete=lacking[-1])
            running = [*running, candidate]
    assert step.num_running == len(running)


def test_the_reserve_of_a_request_is_clipped_at_4096():
    running = [Runner(num_generated=0, max_new_tokens=100_000), Runner(num_generated=90_000, max_new_tokens=100_000)]
    assert NewTokenRatio(init=0.5).reserved_tokens(running, page_size=1) == 2 * 2048


def test_pages_that_a_request_holds_are_not_reserved():
    ratio = NewTokenRatio(init=1.0)
    assert ratio.reserved_tokens([Runner(num_generated=0, max_new_tokens=12, num_tokens=20)], page_size=16) == 0
    assert ratio.reserved_tokens([Runner(num_generated=0, max_new_tokens=13, num_tokens=20)], page_size=16) == 16


def test_a_waiting_request_needs_its_uncached_pages():
    ratio = NewTokenRatio(init=0.5)
    assert ratio.wanted_tokens(Queued(num_tokens=40, num_matched=32, max_new_tokens=10), page_size=16) == 16
    assert ratio.wanted_tokens(Queued(num_tokens=40, num_matched=0, max_new_tokens=100_000), page_size=1) == 40 + 2048
    assert ratio.wanted_tokens(Queued(num_tokens=16, num_matched=5, max_new_tokens=0), page_size=16) == 16


def test_a_preempted_request_needs_only_its_remaining_output():
    ratio = NewTokenRatio(init=1.0)
    preempted = Queued(num_tokens=40, num_matched=0, max_new_tokens=30, num_generated=20)
    assert ratio.wanted_tokens(preempted, page_size=1) == 50


@given(st.builds(Queued, st.integers(50, 99), st.integers(0, 50), st.integers(0, 99)), st.integers(1, 32))
def test_the_estimate_covers_all_future_tokens(waiting: Queued, page_size: int):
    wanted = NewTokenRatio(init=1.0).wanted_tokens(waiting, page_size=page_size)
    needed = waiting.num_tokens - waiting.num_matched + waiting.max_new_tokens
    assert wanted % page_size == 0
    assert needed <= wanted < needed + 2 * page_size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"init": 0.0}, r"init must be in \(0, 1\], got 0.0"),
        ({"init": 1.1}, r"init must be in \(0, 1\], got 1.1"),
        ({"min_factor": -0.1}, r"min_factor must be in \[0, 1\], got -0.1"),
        ({"min_factor": 1.1}, r"min_factor must be in \[0, 1\], got 1.1"),
        ({"decay_steps": 0}, "decay_steps must be >= 1, got 0"),
        ({"hold_steps": -1}, "hold_steps must be >= 0, got -1"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        NewTokenRatio(**arguments)
