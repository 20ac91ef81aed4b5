from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewood.schedpolicy import choose_victim, worth_preempting


@dataclass(frozen=True, slots=True)
class Runner:
    arrival: int
    priority: int = 0
    num_tokens: int = 10
    num_generated: int = 0
    max_new_tokens: int = 100


@dataclass(frozen=True, slots=True)
class Candidate:
    priority: int
    arrival: int = 99
    arrived_s: float = 0.0
    num_tokens: int = 10
    num_matched: int = 0
    num_generated: int = 0
    max_new_tokens: int = 10


running_lists = st.lists(
    st.builds(Runner, st.integers(0, 50), st.integers(-3, 3), st.integers(1, 30)),
    max_size=8,
    unique_by=lambda runner: runner.arrival,
)


@given(running_lists)
def test_the_victim_is_of_the_lowest_priority_the_newest(running: list[Runner]):
    victim = choose_victim(running)
    if not running:
        assert victim is None
        return
    assert victim in running
    for other in running:
        assert (other.priority, -other.arrival) >= (victim.priority, -victim.arrival)


@given(running_lists)
def test_the_oldest_of_the_highest_priority_is_preempted_last(running: list[Runner]):
    left = list(running)
    while len(left) > 1:
        victim = choose_victim(left)
        assert victim is not None
        left.remove(victim)
    if running:
        highest = max(runner.priority for runner in running)
        oldest = min(runner.arrival for runner in running if runner.priority == highest)
        assert [runner.arrival for runner in left] == [oldest]


@given(running_lists, st.integers(-3, 5), st.integers(0, 3), st.integers(1, 100))
def test_victims_are_far_enough_below_suffice_and_none_could_be_spared(
    running: list[Runner], priority: int, threshold: int, num_missing: int
):
    before = list(running)
    victims = worth_preempting(Candidate(priority), running, threshold, num_missing=num_missing)
    assert running == before
    eligible = [runner for runner in running if priority - runner.priority > threshold]
    assert all(victim in eligible for victim in victims)
    assert len(set(victims)) == len(victims)
    num_given = sum(victim.num_tokens for victim in victims)
    if sum(runner.num_tokens for runner in eligible) < num_missing:
        assert victims == []
    else:
        assert num_given >= num_missing
        assert all(num_given - victim.num_tokens < num_missing for victim in victims)


def test_lower_priorities_yield_first_and_of_these_the_newest():
    running = [Runner(0, priority=0), Runner(1, priority=-1), Runner(2, priority=-1), Runner(3, priority=5)]
    victims = worth_preempting(Candidate(1), running, 0, num_missing=25)
    assert [victim.arrival for victim in victims] == [2, 1, 0]


def test_those_whose_pages_are_not_needed_are_spared():
    running = [Runner(3, num_tokens=5), Runner(2, num_tokens=5), Runner(1, num_tokens=50), Runner(0, num_tokens=50)]
    victims = worth_preempting(Candidate(1), running, 0, num_missing=50)
    assert [victim.arrival for victim in victims] == [1]


def test_nobody_yields_where_all_together_would_not_suffice():
    assert len(worth_preempting(Candidate(1), [Runner(0), Runner(1)], 0, num_missing=20)) == 2
    assert worth_preempting(Candidate(1), [Runner(0), Runner(1)], 0, num_missing=21) == []


def test_a_place_costs_one_victim():
    assert worth_preempting(Candidate(1), [Runner(0), Runner(1)], 0) == [Runner(1)]
    assert worth_preempting(Candidate(1), [Runner(0), Runner(1)], 1) == []
    assert worth_preempting(Candidate(1), [], 0) == []


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="threshold must be >= 0, got -1"):
        worth_preempting(Candidate(1), [], -1)
    with pytest.raises(ValueError, match="num_missing must be >= 1, got 0"):
        worth_preempting(Candidate(1), [], 0, num_missing=0)
