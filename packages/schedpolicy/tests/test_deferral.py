from random import Random
from typing import Any

import pytest

from pagewood.schedpolicy import InBatchDeferral, order_named
from pagewood.schedpolicy.testing import FakeRequest, random_request


def tokens(*runs: tuple[str, int]) -> bytes:
    return b"".join(name.encode() * 4 * count for name, count in runs)


def prompt(arrival: int, *runs: tuple[str, int], num_matched: int = 0) -> FakeRequest:
    text = tokens(*runs)
    return FakeRequest(arrival=arrival, text=text, num_tokens=len(text) // 4, num_matched=num_matched)


def deferral(*requests: FakeRequest, **options: Any) -> InBatchDeferral[Any]:
    order = InBatchDeferral[Any](order_named("fcfs"), **options)
    for request in requests:
        order.add(request)
    return order


def arrivals(order: InBatchDeferral[Any]) -> list[int]:
    return [request.arrival for request in order.ordered(0.0)]


def test_of_those_who_share_a_prefix_one_goes_first():
    order = deferral(
        prompt(0, ("a", 40), ("x", 5)), prompt(1, ("a", 40), ("y", 5)), prompt(2, ("b", 40)), prompt(3, ("a", 60))
    )
    assert arrivals(order) == [0, 2, 1, 3]


@pytest.mark.parametrize(("num_shared", "expected"), [(31, [0, 1, 2]), (32, [0, 2, 1])])
def test_thirty_two_shared_tokens_are_worth_it(num_shared: int, expected: list[int]):
    order = deferral(
        prompt(0, ("a", num_shared), ("x", 40)), prompt(1, ("a", num_shared), ("y", 40)), prompt(2, ("b", 40))
    )
    assert arrivals(order) == expected


@pytest.mark.parametrize(("num_matched", "expected"), [(32, [0, 2, 1]), (33, [0, 1, 2])])
def test_who_has_more_than_thirty_two_matched_does_not_defer(num_matched: int, expected: list[int]):
    runs = ("a", 200)
    order = deferral(
        prompt(0, runs, num_matched=num_matched), prompt(1, runs, num_matched=num_matched), prompt(2, ("b", 40))
    )
    assert arrivals(order) == expected
    assert arrivals(deferral(*order.ordered(0.0), max_matched=None)) == [0, 2, 1]


def test_what_cannot_be_saved_is_not_waited_for():
    assert arrivals(deferral(prompt(0, ("a", 32)), prompt(1, ("a", 32)), prompt(2, ("b", 9)))) == [0, 1, 2]


def test_a_leader_is_waited_for_until_its_prompt_is_computed():
    leader, follower, other = prompt(0, ("a", 64)), prompt(1, ("a", 64)), prompt(2, ("b", 64))
    order = deferral(leader, follower, other)
    order.admit(leader)
    assert arrivals(order) == [2, 1]
    follower.num_matched = 16  # the first of the leader's pages is published: there is more to come
    assert arrivals(order) == [2, 1]
    follower.num_matched, leader.num_generated = 48, 1
    assert arrivals(order) == [1, 2]


def test_a_leader_that_stops_is_not_waited_for():
    leader, follower, other = prompt(0, ("a", 64)), prompt(1, ("a", 64)), prompt(2, ("b", 64))
    order = deferral(leader, follower, other)
    order.admit(leader)
    order.stop(leader)
    assert arrivals(order) == [1, 2]


def test_whole_pages_are_shared_or_nothing():
    requests = prompt(0, ("a", 60), ("x", 40)), prompt(1, ("a", 60), ("y", 40)), prompt(2, ("b", 40))
    assert arrivals(deferral(*requests, page_size=16)) == [0, 2, 1]
    assert arrivals(deferral(*requests, page_size=64)) == [0, 1, 2]


def test_it_is_what_sglangs_tree_of_the_queue_gives():
    """Where nobody runs: match each prompt with the tree of those who went before, 8 tokens being enough."""
    rng = Random(5)
    for _ in range(200):
        requests = [random_request(rng, arrival, 0.0) for arrival in range(12)]
        for request in requests:
            request.num_matched = request.priority = 0
        leaders: list[FakeRequest] = []
        deferred: list[FakeRequest] = []
        for request in requests:
            is_shared = any(other.prefix(8) == request.prefix(8) for other in leaders)
            if request.num_tokens > 8 and is_shared:
                deferred.append(request)
            else:
                leaders.append(request)
        expected = [request.arrival for request in leaders + deferred]
        assert arrivals(deferral(*requests, min_shared=8)) == expected


def test_arguments_are_checked():
    for options, message in (
        ({"min_shared": 0}, "min_shared must be >= 1, got 0"),
        ({"max_matched": -1}, "max_matched must be >= 0, got -1"),
        ({"page_size": 0}, "page_size must be >= 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            deferral(**options)
