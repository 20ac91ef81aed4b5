import math
import sys
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewood.schedpolicy import NewTokenRatio, StepReserve


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
    Runner, num_generated=st.integers(0, 300), max_new_tokens=st.integers(0, 300), num_tokens=st.integers(300, 500)
)
parts = st.lists(st.integers(0, 100), max_size=80)


def learned(*percents: int, **arguments: Any) -> NewTokenRatio:
    """Return a ratio to which requests have ended at the given percents of their limit."""
    ratio = NewTokenRatio(**arguments)
    for percent in percents:
        ratio.on_end(Runner(num_generated=percent, max_new_tokens=100))
    return ratio


def reserved(ratio: NewTokenRatio, *running: Runner) -> int:
    return ratio.reserved_tokens(running, page_size=1)


def test_nothing_known_means_that_all_of_the_limit_is_used():
    ratio = NewTokenRatio()
    assert ratio.ratio == 1
    assert reserved(ratio, Runner(0, 200, 10)) == 200
    assert reserved(ratio, Runner(50, 200, 60), Runner(50, 200, 80)) == 2 * 150
    assert reserved(ratio, Runner(200, 200, 210)) == 0


def test_it_learns_from_early_ends_and_forgets_them():
    ratio = learned(*[10] * 60)
    # Of 64 requests, four of them imagined, four go beyond a tenth.
    assert ratio.ratio == pytest.approx(0.10 + 0.90 * 4 / 64)
    for _ in range(64):
        ratio.on_end(Runner(num_generated=100, max_new_tokens=100))
    assert ratio.ratio == 1


def test_a_request_that_may_generate_nothing_says_nothing():
    assert learned(10).ratio < 1
    ratio = NewTokenRatio()
    ratio.on_end(Runner(num_generated=0, max_new_tokens=0))
    assert ratio.ratio == 1


def test_requests_that_run_count_so_that_answers_do_not_seem_short_because_the_short_ones_end_first():
    ratio = learned(*[10] * 6)
    alone, beside_others = ratio.survival(()), ratio.survival([Runner(20, 100)] * 8)
    assert alone[11] == pytest.approx(4 / 10)
    assert beside_others[11] == pytest.approx(12 / 18)
    assert ratio.survival([Runner(5, 100)] * 8)[11] == alone[11]  # these may still end at a tenth


def test_a_request_that_has_outlived_the_others_is_expected_to_use_all_of_its_limit():
    ratio = learned(*[10] * 60)
    assert reserved(ratio, Runner(0, 1000, 10)) < 200
    assert reserved(ratio, Runner(100, 1000, 110)) == 900


def test_requests_that_start_together_need_their_outputs_at_the_same_time_and_others_make_room():
    ratio = NewTokenRatio()
    assert reserved(ratio, *[Runner(0, 160, 10)] * 4) == 4 * 160
    # When the last ends in 160 steps, the others have ended. The most is needed when the first has 40 to go.
    staggered = [Runner(done, 160, 10 + done) for done in (0, 40, 80, 120)]
    assert reserved(ratio, *staggered) == 4 * 40


@given(parts, st.lists(runners, max_size=6), st.integers(1, 32))
def test_the_reserve_covers_the_expected_demand_of_every_step_to_come(
    ended: list[int], running: list[Runner], page_size: int
):
    """By the definition, step by step; parts are rounded so that requests end late rather than early."""
    ratio = learned(*ended)
    survival = ratio.survival(running)
    demand = [0.0] * 302
    for request in running:
        now = min(100, request.num_generated * 100 // max(1, request.max_new_tokens))
        pages_now = math.ceil(request.num_tokens / page_size)
        pages_of_prompt = math.ceil((request.num_tokens - request.num_generated) / page_size)
        for steps in range(302):
            num_generated, chance = request.num_generated + steps, 0.0
            if num_generated <= request.max_new_tokens:
                part = min(99, num_generated * 100 // max(1, request.max_new_tokens))
                chance = survival[part] / survival[now + 1] if part > now else 1.0
            pages_then = math.ceil((request.num_tokens + steps) / page_size)
            demand[steps] += chance * (pages_then - pages_of_prompt) + pages_of_prompt - pages_now
    found = ratio.reserved_tokens(running, page_size=page_size)
    assert found % page_size == 0
    assert found // page_size >= max(demand) - 1e-6
    most = sum(
        math.ceil((one.num_tokens + max(0, one.max_new_tokens - one.num_generated)) / page_size)
        - math.ceil(one.num_tokens / page_size)
        for one in running
    )
    assert found // page_size <= most


@given(parts, st.lists(runners, max_size=4), st.lists(runners, max_size=4), st.integers(1, 32), st.data())
def test_the_reserve_of_a_step_includes_requests_admitted_in_it(
    ended: list[int], running: list[Runner], candidates: list[Runner], page_size: int, data: st.DataObject
):
    lacking = [data.draw(st.integers(0, 3)) for _ in running]
    step = learned(*ended).open(iter(running), page_size=page_size, num_to_complete=sum(lacking))
    for candidate in candidates:
        num_running, num_reserved = step.num_running, step.num_reserved(candidate)
        if not num_running:
            assert num_reserved == 0
        if data.draw(st.booleans()):
            lacking.append(data.draw(st.integers(0, 3)))
            step.admit(candidate, num_to_complete=lacking[-1])
            assert step.num_running == num_running + 1
            if num_running:
                assert step.num_pages == num_reserved + lacking[-1]
            else:
                assert step.num_pages >= lacking[-1]


@given(parts, st.lists(runners, max_size=5), st.lists(runners, max_size=4), st.integers(1, 32), st.integers(0, 4000))
def test_with_room_for_all_limits_nothing_is_estimated_and_the_verdict_is_the_same(
    ended: list[int], running: list[Runner], candidates: list[Runner], page_size: int, num_available: int
):
    """A candidate fits beside the reserve with the number of available pages if it does without."""
    quick, exact = (learned(*ended).open(running, page_size=page_size, num_to_complete=2) for _ in range(2))
    for candidate in candidates:
        num_pages = math.ceil(candidate.num_tokens / page_size)
        found = quick.num_reserved(candidate, num_available=num_available)
        expected = exact.num_reserved(candidate)
        assert found >= expected
        assert (num_pages + found <= num_available) == (num_pages + expected <= num_available)
        if num_pages + expected <= num_available:
            num_available -= num_pages
            for step in (quick, exact):
                step.admit(candidate, num_to_complete=0)


def random_runner(random: Random, arrival: int) -> Runner:
    """Return a running request with a limit of up to 5,000 tokens; a few are at their limit."""
    limit = random.choice([random.randint(0, 300), random.randint(0, 5000)])
    num_generated = random.choice([0, limit, random.randint(0, limit)])
    return Runner(num_generated, limit, num_generated + random.randint(1, 2000), arrival=arrival)


@given(st.integers(0, 1 << 32), st.integers(20, 300), st.sampled_from([1, 16]))
def test_the_same_is_reserved_with_and_without_numpy(seed: int, num_running: int, page_size: int):
    pytest.importorskip("numpy")
    random = Random(seed)
    percents = [random.randint(0, 100) for _ in range(random.randint(0, 80))]
    with_numpy = learned(*percents)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "pagewood.schedpolicy.memory.columns", None)  # cannot be imported
        without = learned(*percents)
    running = [random_runner(random, arrival) for arrival in range(num_running)]
    for _ in range(2):
        steps = [ratio.open(running, page_size=page_size, num_to_complete=2) for ratio in (with_numpy, without)]
        for num_available in (0, 0, 1000, 100_000):
            candidate = random_runner(random, num_running)
            found = [step.num_reserved(candidate, num_available=num_available) for step in steps]
            assert found[0] == found[1]
            if random.random() < 0.5:
                for step in steps:
                    step.admit(candidate, num_to_complete=1)
        assert steps[0].num_pages == steps[1].num_pages
        running = [
            replace(one, num_generated=one.num_generated + 1, num_tokens=one.num_tokens + 1)
            for one in running
            if one.num_generated < one.max_new_tokens
        ]


@given(st.integers(0, 1 << 32), st.integers(1, 60), st.sampled_from([1, 16]), st.booleans())
def test_a_request_that_one_moment_excludes_would_not_fit_and_no_later_answer_changes(
    seed: int, num_running: int, page_size: int, is_without_numpy: bool
):
    """Steps with admissions, ends and preemptions, in which one of two reserves is asked for one moment first."""
    random = Random(seed)
    percents = [random.randint(0, 100) for _ in range(random.choice([0, 3, 80]))]
    scale = random.choice([0.3, 1.0, 1.0, 2.0])
    with pytest.MonkeyPatch.context() as patch:
        if is_without_numpy:
            patch.setitem(sys.modules, "pagewood.schedpolicy.memory.columns", None)  # cannot be imported
        quick, exact = (learned(*percents, scale=scale, hold_steps=1) for _ in range(2))
    running = [random_runner(random, arrival) for arrival in range(num_running)]
    for _ in range(4):
        step, expected = (ratio.open(running, page_size=page_size, num_to_complete=1) for ratio in (quick, exact))
        for _ in range(4):
            num_running += 1
            candidate = random_runner(random, num_running)
            num_pages = math.ceil(candidate.num_tokens / page_size)
            about = exact.open(running, page_size=page_size, num_to_complete=1).num_reserved(candidate) + num_pages
            num_available = random.choice([about + random.randint(-3, 3), random.randint(0, 2 * about)])
            num_reserved = expected.num_reserved(candidate, num_available=num_available)
            if step.exceeds(candidate, num_available=num_available - num_pages):
                assert num_pages + num_reserved > num_available
            else:
                assert step.num_reserved(candidate, num_available=num_available) == num_reserved
            if random.random() < 0.3:
                running.append(candidate)
                for each in (step, expected):
                    each.admit(candidate, num_to_complete=1)
        assert step.num_pages == expected.num_pages
        for ratio in (quick, exact):
            for ended in running[:1]:
                ratio.on_end(ended)
            ratio.on_preempt() if num_running % 3 == 0 else ratio.on_step()
        running = [
            replace(one, num_generated=one.num_generated + 1, num_tokens=one.num_tokens + 1)
            for one in running[1:]
            if one.num_generated < one.max_new_tokens
        ]


def test_a_step_looks_first_at_the_moment_of_the_largest_demand_in_the_last():
    ratio = NewTokenRatio()
    running = [Runner(done, 160, 10 + done) for done in (0, 40, 80, 120)]  # most is needed 40 steps from now
    candidate = Runner(0, 10, 10)

    def opened() -> StepReserve:
        return ratio.open(running, page_size=1, num_to_complete=0)

    most = opened().num_pages
    assert not opened().exceeds(candidate, num_available=most - 1)  # no step has looked before
    step = opened()
    assert step.num_reserved(candidate) == most
    assert opened().exceeds(candidate, num_available=most - 1)
    assert not opened().exceeds(candidate, num_available=most)
    step.admit(candidate, num_to_complete=0)
    assert not opened().exceeds(candidate, num_available=most - 1)  # there was room, and may be more
    assert not ratio.open([], page_size=1, num_to_complete=5).exceeds(candidate, num_available=-1)


def test_candidates_are_alike_if_their_prompts_end_at_the_same_place_of_a_page():
    running = [Runner(index, 300, 100 + index, arrival=index) for index in range(8)]
    candidates = [Runner(0, 100, prompt, arrival=8) for prompt in (32, 16, 33, 17, 47, 31, 32, 16)]
    candidates += [Runner(5, 100, 37), Runner(5, 90, 37), Runner(6, 100, 38), Runner(0, 400, 32), Runner(0, 100, 32)]

    def opened() -> StepReserve:
        return learned(*[40] * 20).open(running, page_size=16, num_to_complete=1)

    step, largest = opened(), 300
    for candidate in candidates:
        largest, alone = max(largest, candidate.max_new_tokens), opened()
        alone.num_reserved(Runner(0, largest))
        assert step.num_reserved(candidate) == alone.num_reserved(candidate)
    longest = Runner(0, 400, 32, arrival=8)
    before = step.num_reserved(longest)
    step.admit(longest, num_to_complete=0)
    assert step.num_reserved(longest) > before


def test_a_larger_limit_extends_the_look_ahead():
    step = NewTokenRatio().open([Runner(98, 100, 98)], page_size=1, num_to_complete=0)
    assert step.num_reserved(Runner(0, 1000, 0)) == 1000 - 98  # the other one's output makes room before that
    step.admit(Runner(0, 1000, 0), num_to_complete=0)
    assert step.num_reserved(Runner(0, 3000, 0)) == 3000 - 98


def test_a_preemption_brings_caution_for_a_while():
    ratio = learned(*[10] * 60, hold_steps=2)
    bold = reserved(ratio, Runner(0, 1000, 10))
    ratio.on_preempt()
    assert ratio.ratio == 1
    for _ in range(2):
        assert reserved(ratio, Runner(0, 1000, 10)) == 1000
        ratio.on_step()
    assert reserved(ratio, Runner(0, 1000, 10)) == bold < 1000


def test_caution_takes_sixty_steps_by_default():
    assert NewTokenRatio().hold_steps == 60


def test_the_scale_multiplies_what_is_reserved():
    running = Runner(0, 100, 10)
    assert reserved(NewTokenRatio(scale=0.5), running) == 50
    assert reserved(NewTokenRatio(scale=2.0), running) == 200


def test_the_reserve_of_a_request_is_clipped_at_4096():
    assert reserved(NewTokenRatio(), Runner(0, 100_000), Runner(90_000, 100_000, 90_100)) == 2 * 4096


def test_pages_that_a_request_holds_are_not_reserved():
    ratio = NewTokenRatio()
    assert ratio.reserved_tokens([Runner(num_generated=0, max_new_tokens=12, num_tokens=20)], page_size=16) == 0
    assert ratio.reserved_tokens([Runner(num_generated=0, max_new_tokens=13, num_tokens=20)], page_size=16) == 16


def test_a_waiting_request_needs_its_uncached_pages():
    ratio = NewTokenRatio()
    assert ratio.wanted_tokens(Queued(num_tokens=40, num_matched=32, max_new_tokens=8), page_size=16) == 16
    assert ratio.wanted_tokens(Queued(num_tokens=40, num_matched=0, max_new_tokens=100_000), page_size=1) == 40 + 4096
    assert ratio.wanted_tokens(Queued(num_tokens=16, num_matched=5, max_new_tokens=0), page_size=16) == 16


def test_a_preempted_request_needs_only_its_remaining_output():
    preempted = Queued(num_tokens=40, num_matched=0, max_new_tokens=30, num_generated=20)
    assert NewTokenRatio().wanted_tokens(preempted, page_size=1) == 50


@given(st.builds(Queued, st.integers(50, 99), st.integers(0, 50), st.integers(0, 99)), st.integers(1, 32))
def test_the_estimate_covers_all_future_tokens(waiting: Queued, page_size: int):
    wanted = NewTokenRatio().wanted_tokens(waiting, page_size=page_size)
    needed = waiting.num_tokens - waiting.num_matched + waiting.max_new_tokens
    assert wanted % page_size == 0
    assert needed <= wanted < needed + 2 * page_size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale": 0.0}, "scale must be > 0 and finite, got 0.0"),
        ({"scale": math.inf}, "scale must be > 0 and finite, got inf"),
        ({"scale": math.nan}, "scale must be > 0 and finite, got nan"),
        ({"hold_steps": -1}, "hold_steps must be >= 0, got -1"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        NewTokenRatio(**arguments)
