import math
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewood.schedpolicy import FirstComeFirstServed, LongestPrefixMatch, Order, Waiting, order_named


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    arrival: int
    arrived_s: float
    priority: int = 0
    num_tokens: int = 100
    num_matched: int = 0
    num_generated: int = 0
    max_new_tokens: int = 16


@st.composite
def queues(draw: st.DrawFn) -> list[Queued]:
    """Requests in any order, whose arrival numbers ascend with their arrival times."""
    times = sorted(draw(st.lists(st.floats(0, 1000), max_size=12)))
    requests = [
        Queued(
            arrival=number,
            arrived_s=time,
            priority=draw(st.integers(-2, 2)),
            num_matched=draw(st.sampled_from([0, 16, 100, 4000])),
        )
        for number, time in enumerate(times)
    ]
    return draw(st.permutations(requests))


orders = st.sampled_from([FirstComeFirstServed(), LongestPrefixMatch(), LongestPrefixMatch(age_weight=1.0)])
now = st.floats(1000, 2000)


@given(orders, queues(), now)
def test_an_order_is_a_permutation_by_priority_that_leaves_its_input_alone(
    order: Order, waiting: list[Queued], now_s: float
):
    before = list(waiting)
    ordered = order(tuple(waiting), now_s)
    assert sorted(ordered, key=id) == sorted(waiting, key=id)
    assert waiting == before
    priorities = [request.priority for request in ordered]
    assert priorities == sorted(priorities, reverse=True)


@given(orders, queues(), now, st.randoms())
def test_an_order_does_not_depend_on_the_order_of_its_input(
    order: Order, waiting: list[Queued], now_s: float, random: Random
):
    shuffled = random.sample(waiting, len(waiting))
    assert order(shuffled, now_s) == order(waiting, now_s)


@given(orders, st.integers(0, 5))
def test_equal_requests_keep_their_order(order: Order, num_requests: int):
    twins = [Queued(arrival=0, arrived_s=0.0) for _ in range(num_requests)]
    assert [id(request) for request in order(twins, 1.0)] == [id(request) for request in twins]


@given(queues(), now)
def test_first_come_first_served_is_by_priority_then_arrival(waiting: list[Queued], now_s: float):
    expected = sorted(waiting, key=lambda request: (-request.priority, request.arrival))
    assert FirstComeFirstServed()(waiting, now_s) == expected


@given(queues(), now, st.floats(0.01, 10_000))
def test_nobody_is_overtaken_by_a_request_that_came_long_after(waiting: list[Queued], now_s: float, age_weight: float):
    max_match = 4000
    ordered = LongestPrefixMatch(age_weight=age_weight)(waiting, now_s)
    for place, request in enumerate(ordered):
        bound_s = (max_match - request.num_matched) / age_weight
        for earlier in ordered[:place]:
            if earlier.priority == request.priority:
                assert earlier.arrived_s - request.arrived_s <= bound_s + 1e-6


@given(queues(), now, st.floats(0.01, 10_000))
def test_longest_prefix_match_puts_the_greatest_score_first(waiting: list[Queued], now_s: float, age_weight: float):
    ordered = LongestPrefixMatch(age_weight=age_weight)(waiting, now_s)
    for first, second in pairwise(ordered):
        if first.priority == second.priority:
            scores = [r.num_matched + age_weight * (now_s - r.arrived_s) for r in (first, second)]
            assert scores[0] >= scores[1] or math.isclose(scores[0], scores[1], rel_tol=1e-9, abs_tol=1e-6)


def test_equal_scores_go_by_arrival():
    waiting = [Queued(arrival=number, arrived_s=float(number), num_matched=1000 * number) for number in (2, 0, 1)]
    assert [request.arrival for request in LongestPrefixMatch(age_weight=1000.0)(waiting, 9.0)] == [0, 1, 2]


def test_of_requests_as_old_the_longest_match_goes_first():
    waiting = [Queued(arrival=number, arrived_s=0.0, num_matched=16 * number) for number in range(4)]
    assert [request.arrival for request in LongestPrefixMatch()(waiting, 1.0)] == [3, 2, 1, 0]


def steps_until_served(order: Order, *, max_steps: int) -> int | None:
    """Serve one request a second, while two with a long match arrive every second, beside one without any."""
    cold = Queued(arrival=0, arrived_s=0.0)
    waiting = [cold]
    arrival = 0
    for step in range(max_steps):
        for _ in range(2):
            arrival += 1
            waiting.append(Queued(arrival=arrival, arrived_s=float(step), num_matched=4000))
        first = order(waiting, float(step))[0]
        if first is cold:
            return step
        waiting.remove(first)
    return None


def test_a_request_without_a_match_does_not_starve_among_those_with_one():
    # At 1000 tokens a second a match of 4000 is worth 4 s: the 8 requests of the first 4 s go before it, and no other.
    assert steps_until_served(LongestPrefixMatch(age_weight=1000.0), max_steps=100) == 8
    # Without (nearly any) ageing it does starve, so the test can tell.
    assert steps_until_served(LongestPrefixMatch(age_weight=1e-3), max_steps=100) is None


@pytest.mark.parametrize("age_weight", [0.0, -1.0, math.inf, math.nan])
def test_age_weight_is_checked(age_weight: float):
    with pytest.raises(ValueError, match=f"age_weight must be > 0 and finite, got {age_weight}"):
        LongestPrefixMatch(age_weight=age_weight)


def test_orders_are_found_by_name_and_say_what_they_need():
    assert order_named("fcfs") == FirstComeFirstServed()
    assert order_named("lpm") == LongestPrefixMatch()
    assert not order_named("fcfs").needs_match
    assert order_named("lpm").needs_match
    with pytest.raises(ValueError, match="name must be one of fcfs, lpm, got 'priority'"):
        order_named("priority")


def test_a_queued_request_is_a_waiting_one():
    request: Waiting = Queued(arrival=0, arrived_s=0.0)
    assert FirstComeFirstServed()([request], 0.0) == [request]
