from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from pagewood.schedpolicy import Draws, Order, ShuffledOrder, order_named
from pagewood.schedpolicy.testing import FakeRequest

REQUESTS = [FakeRequest(arrival=arrival) for arrival in range(8)]


def of(order: Order[Any]) -> list[int]:
    return [request.arrival for request in order.ordered(0.0)]


def shuffled(arrivals: Sequence[int] = range(8), *, seed: int = 0) -> ShuffledOrder[FakeRequest]:
    order = ShuffledOrder[FakeRequest](Draws(seed))
    for arrival in arrivals:
        order.add(REQUESTS[arrival])
    return order


def test_to_ask_again_changes_nothing():
    asked, other = shuffled(), shuffled()
    for num_taken in (1, 3, 8):
        passing = asked.ordered(0.0)
        assert [next(passing).arrival for _ in range(num_taken)] == of(other)[:num_taken]
    for order in (asked, other):
        order.admit(REQUESTS[5])
    assert of(asked) == of(other)


def test_two_passes_at_once_do_not_disturb_each_other():
    order = shuffled()
    pairs = list(zip(order.ordered(0.0), order.ordered(0.0), strict=True))
    assert all(one is other for one, other in pairs)


def test_the_order_in_which_requests_come_and_leave_does_not_matter():
    for seed in range(20):
        rng, expected = Random(seed), shuffled()
        order = shuffled(rng.sample(range(8), 8))
        calls = [("admit", 1), ("park", 4), ("admit", 6), ("remove", 2)]
        for name, arrival in calls:
            getattr(expected, name)(REQUESTS[arrival])
        for name, arrival in rng.sample(calls, 4):
            getattr(order, name)(REQUESTS[arrival])
        assert of(order) == of(expected)


def test_a_request_that_returns_before_the_next_admission_gets_its_place_back():
    order = shuffled()
    before = of(order)
    order.park(REQUESTS[3])
    assert of(order) != before
    order.add(REQUESTS[3])
    assert of(order) == before


@pytest.mark.parametrize("place", range(3))
def test_every_request_is_as_likely_at_every_place(place: int):
    order, counts = shuffled(range(3)), Counter[int]()
    for _ in range(6000):
        counts[of(order)[place]] += 1
        order.admit(REQUESTS[0])
        order.add(REQUESTS[0])
    assert all(abs(count - 2000) < 5 * 37 for count in counts.values()), counts  # five standard deviations


def test_seeds_give_different_orders():
    assert len({tuple(of(shuffled(seed=seed))) for seed in range(20)}) == 20


def test_a_priority_that_was_empty_meanwhile_draws_anew():
    # Each time, two requests come to an idle engine. If the draws began anew, the same one would always be first.
    order, firsts = order_named("random"), Counter[bool]()
    for number in range(0, 400, 2):
        pair = [FakeRequest(arrival=number), FakeRequest(arrival=number + 1)]
        for request in pair:
            order.add(request)
        firsts[next(order.ordered(0.0)) is pair[0]] += 1
        for request in pair:
            order.admit(request)
            order.stop(request)
    assert 65 < firsts[True] < 135, firsts
