from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewood.schedpolicy import SkipAhead


@dataclass(frozen=True, slots=True)
class Queued:
    arrival: int
    num_tokens: int
    arrived_s: float = 0.0
    priority: int = 0
    num_matched: int = 0
    num_generated: int = 0
    max_new_tokens: int = 1


def admit(skip_ahead: SkipAhead, waiting: list[Queued], num_free: int) -> list[int]:
    """Run one step of admission: remove the requests that fit from `waiting`, and return their arrivals."""
    skip_ahead.begin_step(waiting)
    admitted: list[Queued] = []
    for request in waiting:
        if request.num_tokens <= num_free:
            num_free -= request.num_tokens
            admitted.append(request)
            skip_ahead.admitted(request)
        elif not skip_ahead.pass_over(request):
            break
    for request in admitted:
        waiting.remove(request)
    return [request.arrival for request in admitted]


def test_small_requests_pass_a_large_one_and_then_it_blocks():
    skip_ahead = SkipAhead(max_skipped=1, max_passes=2)
    waiting = [Queued(0, 100), *(Queued(number, 10) for number in range(1, 9))]
    assert [admit(skip_ahead, waiting, 20) for _ in range(3)] == [[1, 2], [3, 4], []]
    assert admit(skip_ahead, waiting, 120) == [0, 5, 6]
    assert admit(skip_ahead, waiting, 20) == [7, 8]


def test_requests_that_were_passed_as_often_as_they_may_are_counted_once():
    skip_ahead = SkipAhead(max_skipped=2, max_passes=2)
    waiting = [Queued(0, 100), Queued(1, 100), *(Queued(number, 10) for number in range(2, 6))]
    starved: list[int] = []
    for num_free in (10, 5, 10, 10, 10):
        admit(skip_ahead, waiting, num_free)
        starved.append(skip_ahead.num_starved)
    assert starved == [0, 0, 2, 2, 2]
    assert admit(skip_ahead, waiting, 100) == [0]
    waiting.insert(0, Queued(0, 100))  # it was preempted
    del waiting[1]
    assert [admit(skip_ahead, waiting, 10) for _ in range(2)] == [[4], [5]]
    assert skip_ahead.num_starved == 3


def test_steps_without_passing_do_not_count():
    skip_ahead = SkipAhead(max_skipped=4, max_passes=1)
    waiting = [Queued(0, 100), Queued(1, 10)]
    assert [admit(skip_ahead, waiting, 5) for _ in range(50)] == [[]] * 50
    assert admit(skip_ahead, waiting, 10) == [1]
    waiting.append(Queued(2, 10))
    assert admit(skip_ahead, waiting, 10) == []


def test_a_request_admitted_before_the_skipped_one_does_not_pass_it():
    skip_ahead = SkipAhead(max_skipped=1, max_passes=1)
    large = Queued(5, 100)
    assert admit(skip_ahead, [large], 10) == []
    assert admit(skip_ahead, [Queued(0, 10), large], 10) == [0]
    assert admit(skip_ahead, [large, Queued(6, 10)], 10) == [6]


def test_a_preempted_request_can_be_passed_over_again():
    skip_ahead = SkipAhead(max_skipped=1, max_passes=1)
    large = Queued(0, 100)
    assert admit(skip_ahead, [large, Queued(1, 10)], 10) == [1]
    assert admit(skip_ahead, [large], 100) == [0]
    assert admit(skip_ahead, [large, Queued(2, 10)], 10) == [2]


def test_no_more_than_max_skipped_are_passed_over_in_a_step():
    skip_ahead = SkipAhead(max_skipped=2, max_passes=100)
    waiting = [Queued(0, 100), Queued(1, 100), Queued(2, 100), Queued(3, 1)]
    assert admit(skip_ahead, waiting, 10) == []
    del waiting[0]
    assert admit(skip_ahead, waiting, 10) == [3]


@pytest.mark.parametrize(("max_skipped", "max_passes"), [(0, 9), (9, 0)])
def test_skipping_can_be_turned_off(max_skipped: int, max_passes: int):
    skip_ahead = SkipAhead(max_skipped=max_skipped, max_passes=max_passes)
    assert admit(skip_ahead, [Queued(0, 100), Queued(1, 1)], 10) == []


def test_a_request_that_left_is_forgotten():
    skip_ahead = SkipAhead(max_skipped=1, max_passes=1)
    large = Queued(0, 100)
    assert admit(skip_ahead, [large, Queued(1, 1)], 10) == [1]
    assert admit(skip_ahead, [large, Queued(2, 1)], 10) == []
    assert admit(skip_ahead, [], 10) == []
    assert admit(skip_ahead, [large, Queued(3, 1)], 10) == [3]


@given(
    st.integers(0, 3),
    st.integers(0, 3),
    st.lists(st.tuples(st.integers(0, 20), st.lists(st.integers(1, 20), max_size=4)), max_size=20),
)
def test_unfairness_is_bounded(max_skipped: int, max_passes: int, steps: list[tuple[int, list[int]]]):
    skip_ahead = SkipAhead(max_skipped=max_skipped, max_passes=max_passes)
    waiting: list[Queued] = []
    num_arrived = 0
    steps_overtaken: Counter[int] = Counter()
    for num_free, sizes in steps:
        waiting.extend(Queued(num_arrived + number, size) for number, size in enumerate(sizes))
        num_arrived += len(sizes)
        admitted = admit(skip_ahead, waiting, num_free)
        overtaken = [request.arrival for request in waiting if request.arrival < max(admitted, default=-1)]
        steps_overtaken.update(overtaken)
        assert len(overtaken) <= max_skipped
    assert all(count <= max_passes for count in steps_overtaken.values())


@pytest.mark.parametrize("name", ["max_skipped", "max_passes"])
def test_limits_are_not_negative(name: str):
    with pytest.raises(ValueError, match=f"{name} must be >= 0, got -1"):
        SkipAhead(**{"max_skipped": 1, "max_passes": 1, name: -1})


def test_a_new_allowance_is_complete():
    assert SkipAhead(max_skipped=1, max_passes=1).pass_over(Queued(0, 10))
