"""The bound of `PreemptionGuard`, under streams of ever higher priorities and under random ones."""

import math
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewood.schedpolicy import PreemptionGuard, worth_preempting
from pagewood.schedpolicy.testing import FakeRequest


def waiting(arrival: int, priority: int) -> FakeRequest:
    return FakeRequest(arrival=arrival, priority=priority)


@dataclass(slots=True)
class Chosen:
    """The lengths with which each request was chosen."""

    lengths: dict[int, list[int]]
    final: dict[int, int]


def run(rng: Random, guard: PreemptionGuard[FakeRequest] | None, *, rises: bool, num_rounds: int) -> Chosen:
    """Let candidates preempt four requests that generate in between; a preempted request goes on at once."""
    running = [FakeRequest(arrival=index, num_tokens=rng.randint(1, 200), priority=0) for index in range(4)]
    lengths: dict[int, list[int]] = {one.arrival: [] for one in running}
    for number in range(num_rounds):
        priority = 20 * (number + 1) if rises else rng.randint(-20, 60)
        candidate, num_missing = waiting(100 + number, priority), rng.randint(1, 400)
        if guard is None:
            victims = worth_preempting(candidate, running, num_missing=num_missing)
        else:
            victims = guard.choose(candidate, running, num_missing=num_missing)
        for victim in victims:
            lengths[victim.arrival].append(victim.num_tokens)
        for one in running:
            one.num_tokens += rng.randint(0, 3)
            one.priority = rng.randint(0, 5)
    return Chosen(lengths, {one.arrival: one.num_tokens for one in running})


@given(st.randoms(use_true_random=False), st.booleans(), st.sampled_from((0.25, 0.5, 1.0, 3.0)))
def test_preemptions_and_repeated_work_are_bounded(rng: Random, rises: bool, growth: float) -> None:
    chosen = run(rng, PreemptionGuard(growth=growth), rises=rises, num_rounds=150)
    for arrival, lengths in chosen.lengths.items():
        if lengths:
            final = chosen.final[arrival]
            assert len(lengths) <= 1 + math.log(final / lengths[0]) / math.log(1 + growth) + 1e-9
            assert sum(lengths) <= final * (1 + growth) / growth + 1e-9


def test_without_the_guard_rising_priorities_exceed_the_bound() -> None:
    chosen = run(Random(0), None, rises=True, num_rounds=150)
    assert max(sum(lengths) / chosen.final[arrival] for arrival, lengths in chosen.lengths.items()) > 3 * 3


@given(st.randoms(use_true_random=False))
def test_without_growth_it_is_worth_preempting(rng: Random) -> None:
    seed = rng.randrange(2**32)
    plain = run(Random(seed), None, rises=False, num_rounds=30)
    assert run(Random(seed), PreemptionGuard(growth=0), rises=False, num_rounds=30) == plain


def test_a_request_that_was_never_chosen_gives_way_instead() -> None:
    guard = PreemptionGuard[FakeRequest]()
    one, two = FakeRequest(arrival=0, num_tokens=100), FakeRequest(arrival=1, num_tokens=100)
    assert guard.choose(waiting(5, 20), [one, two]) == [two]
    assert guard.choose(waiting(6, 40), [one, two]) == [one]
    assert guard.num_spared == 0
    for _ in range(3):
        assert guard.choose(waiting(7, 60), [one, two]) == []
    assert guard.num_spared == 1
    assert guard.choose(waiting(8, 5), [one, two]) == []  # its priority is too low in any case
    assert guard.num_spared == 1
    two.num_tokens = 149
    assert guard.choose(waiting(9, 60), [one, two]) == []
    two.num_tokens = 150
    assert guard.choose(waiting(9, 60), [one, two]) == [two]
    assert guard.num_spared == 2


def test_the_memory_is_bounded() -> None:
    guard = PreemptionGuard[FakeRequest](max_remembered=2)
    requests = [FakeRequest(arrival=index, num_tokens=10) for index in range(3)]
    for request in requests:
        assert guard.choose(waiting(9, 20), [request]) == [request]
    assert guard.choose(waiting(9, 20), requests) == [requests[0]]  # forgotten; the others are spared


@pytest.mark.parametrize("growth", [-0.1, math.inf, math.nan, None, "1", True])
def test_bad_arguments_are_refused(growth: Any) -> None:
    with pytest.raises(ValueError, match="growth must be"):
        PreemptionGuard(growth=growth)
    with pytest.raises(ValueError, match="max_remembered must be >= 1, got 0"):
        PreemptionGuard(max_remembered=0)
