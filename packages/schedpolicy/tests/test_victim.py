from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewood.schedpolicy import (
    by_least_output,
    choose_victim,
    choose_victims,
    deserving,
    worth_preempting,
)


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
def test_the_victim_is_the_newest_of_the_lowest_priority(running: list[Runner]):
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


@given(running_lists)
def test_victims_are_chosen_in_the_reverse_order_of_deserving(running: list[Runner]):
    left = sorted(running, key=deserving)
    while left:
        assert choose_victim(left) is left.pop()
    assert deserving(Runner(arrival=7, priority=3)) == (-3, 7)


@given(running_lists, st.integers(-3, 5), st.integers(0, 3), st.integers(1, 100))
def test_victims_are_of_low_priority_suffice_and_none_could_be_spared(
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


def test_lower_priorities_are_preempted_first_and_of_these_the_newest():
    running = [Runner(0, priority=0), Runner(1, priority=-1), Runner(2, priority=-1), Runner(3, priority=5)]
    victims = worth_preempting(Candidate(1), running, 0, num_missing=25)
    assert [victim.arrival for victim in victims] == [2, 1, 0]


def test_requests_whose_pages_are_not_needed_are_spared():
    running = [Runner(3, num_tokens=5), Runner(2, num_tokens=5), Runner(1, num_tokens=50), Runner(0, num_tokens=50)]
    victims = worth_preempting(Candidate(1), running, 0, num_missing=50)
    assert [victim.arrival for victim in victims] == [1]


def test_no_request_is_preempted_if_all_together_would_not_suffice():
    assert len(worth_preempting(Candidate(1), [Runner(0), Runner(1)], 0, num_missing=20)) == 2
    assert worth_preempting(Candidate(1), [Runner(0), Runner(1)], 0, num_missing=21) == []


def test_a_place_costs_one_victim():
    assert worth_preempting(Candidate(1), [Runner(0), Runner(1)], 0) == [Runner(1)]
    assert worth_preempting(Candidate(1), [Runner(0), Runner(1)], 1) == []
    assert worth_preempting(Candidate(1), [], 0) == []
    assert worth_preempting(Candidate(1), [Runner(0, num_tokens=1)], 0) == [Runner(0, num_tokens=1)]


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="threshold must be >= 0, got -1"):
        worth_preempting(Candidate(1), [], -1)
    with pytest.raises(ValueError, match="num_missing must be >= 1, got 0"):
        worth_preempting(Candidate(1), [], 0, num_missing=0)


def test_the_default_threshold_is_ten():
    assert worth_preempting(Candidate(10), [Runner(0)]) == []
    assert worth_preempting(Candidate(11), [Runner(0)]) == [Runner(0)]


def test_the_least_output_is_preempted_first_then_the_longest_prompt():
    running = [
        Runner(0, num_tokens=50, num_generated=9),
        Runner(1, num_tokens=55, num_generated=5),
        Runner(2, num_tokens=99, num_generated=5),
        Runner(3, num_tokens=99, num_generated=5),
    ]
    assert [runner.arrival for runner in sorted(running, key=by_least_output)] == [3, 2, 1, 0]


@given(running_lists, st.integers(0, 200), st.integers(1, 8), st.integers(1, 30))
def test_victims_free_enough_for_the_remaining_requests(
    running: list[Runner], num_available: int, page_size: int, num_steps: int
):
    victims = choose_victims(
        running, num_available=num_available, page_size=page_size, num_steps=num_steps, rank=by_least_output
    )
    order = sorted(running, key=by_least_output)
    assert victims == order[: len(victims)]

    def pages(num_tokens: int) -> int:
        return -(-num_tokens // page_size) * page_size

    def suffices(num_victims: int) -> bool:
        free = num_available + sum(pages(runner.num_tokens) for runner in order[:num_victims])
        wanted = sum(pages(runner.num_tokens + num_steps) - pages(runner.num_tokens) for runner in order[num_victims:])
        return wanted <= free

    assert suffices(len(victims)) or len(victims) == len(running) - 1
    assert not victims or not suffices(len(victims) - 1)  # and no victim could be spared


def test_no_request_needs_room_beyond_its_limit():
    running = [Runner(0, num_generated=98), Runner(1, num_generated=100)]
    assert choose_victims(running, num_available=2, page_size=1) == []
    assert len(choose_victims(running, num_available=1, page_size=1)) == 1


def test_twenty_steps_are_enough_room_by_default():
    running = [Runner(0), Runner(1)]
    assert choose_victims(running, num_available=40, page_size=1) == []
    assert choose_victims(running, num_available=39, page_size=1) == [Runner(1)]


def test_shared_pages_are_not_freed():
    running = [Runner(arrival) for arrival in range(4)]
    victims = choose_victims(running, num_available=0, page_size=1, num_steps=5, freed_by=lambda runner: 0)
    assert [victim.arrival for victim in victims] == [3, 2, 1]


def test_arguments_of_choose_victims_are_checked():
    with pytest.raises(ValueError, match="page_size must be >= 1, got 0"):
        choose_victims([Runner(0)], num_available=0, page_size=0)
    with pytest.raises(ValueError, match="num_steps must be >= 1, got 0"):
        choose_victims([Runner(0)], num_available=0, page_size=1, num_steps=0)
