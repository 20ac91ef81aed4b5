from itertools import islice
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewood.schedpolicy import Ageing, ByLongestMatch, RankedOrder, order_named
from pagewood.schedpolicy.testing import FakeRequest
from starvation import longest_wait


def starving() -> RankedOrder[Any]:
    """Rank by the longest match only."""
    return RankedOrder[Any](ByLongestMatch(age_weight=0.0), reads_match=True)


@given(
    every=st.integers(1, 5), after_s=st.sampled_from([0.0, 3.0, 20.0]), burst=st.integers(1, 4), seed=st.integers(0, 99)
)
def test_the_bound_holds(every: int, after_s: float, burst: int, seed: int):
    """Count the admissions since each request reached `after_s`; new requests always have longer matches."""
    rng = Random(seed)
    order = Ageing[FakeRequest](starving(), after_s=after_s, every=every)
    waiting: dict[int, FakeRequest] = {}
    bounds: dict[int, int] = {}  # admissions left for each request that has waited `after_s`
    for second in range(80):
        now_s = float(second)
        for _ in range(rng.randint(0, 2)):
            request = FakeRequest(arrival=len(waiting) + 1000 * second, arrived_s=now_s, num_matched=second)
            waiting[request.arrival] = request
            order.add(request)
        for place, arrival in enumerate(sorted(waiting)):
            if arrival not in bounds and now_s - waiting[arrival].arrived_s >= after_s:
                bounds[arrival] = every * (place + 1)
        for request in list(islice(order.ordered(now_s), rng.randint(0, burst))):
            order.admit(request)
            del waiting[request.arrival]
            bounds = {arrival: left - 1 for arrival, left in bounds.items()}
            assert bounds.pop(request.arrival, 0) >= 0
        assert all(left > 0 for left in bounds.values())


@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_one_of_every_k_admissions_is_the_oldest_in_one_pass_or_in_many(every: int):
    for per_pass in (1, 2, 20):
        order = Ageing[FakeRequest](starving(), after_s=0.0, every=every)
        for arrival in range(20):
            order.add(FakeRequest(arrival=arrival, num_matched=arrival))
        admitted: list[int] = []
        while len(admitted) < 20:
            for request in list(islice(order.ordered(0.0), per_pass)):
                order.admit(request)
                admitted.append(request.arrival)
        left, expected = list(range(20)), list[int]()
        while left:  # the first that is left is the oldest, the last has the longest match
            expected.append(left.pop(0 if len(expected) % every == every - 1 else -1))
        assert admitted[: 20 - every] == expected[: 20 - every]  # at the end, the last may be the oldest


def test_the_default_is_one_of_four():
    assert Ageing[Any](starving(), after_s=1.0).every == 4


def test_no_request_starves_behind_an_order_that_starves():
    def make(rng: Random, arrival: int, now_s: float) -> FakeRequest:
        return FakeRequest(arrival=arrival, arrived_s=now_s, num_matched=arrival)

    assert longest_wait(starving(), Random(0), num_waiting=20, num_admissions=500, make_request=make) > 450
    aged = Ageing[Any](starving(), after_s=10.0, every=4)
    assert longest_wait(aged, Random(0), num_waiting=20, num_admissions=500, make_request=make) <= 10 + 4 * 20


def test_three_of_four_places_stay_with_the_order():
    order = Ageing[FakeRequest](starving(), after_s=0.0, every=4)
    for arrival in range(12):
        order.add(FakeRequest(arrival=arrival, num_matched=arrival))
    assert [request.arrival for request in order.ordered(1.0)] == [11, 10, 9, 0, 8, 7, 6, 1, 5, 4, 3, 2]


def test_young_requests_are_in_the_wrapped_order():
    order = Ageing[FakeRequest](starving(), after_s=5.0, every=1)
    for arrival in range(4):
        order.add(FakeRequest(arrival=arrival, arrived_s=float(arrival), num_matched=arrival))
    assert [request.arrival for request in order.ordered(4.9)] == [3, 2, 1, 0]
    assert [request.arrival for request in order.ordered(6.0)] == [0, 1, 3, 2]


def test_arguments_are_checked():
    for arguments, message in (
        ({"after_s": -1.0}, "after_s must be >= 0 and finite, got -1.0"),
        ({"after_s": float("inf")}, "after_s must be >= 0 and finite, got inf"),
        ({"after_s": 1.0, "every": 0}, "every must be >= 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Ageing[Any](order_named("lpm"), **arguments)  # pyright: ignore[reportArgumentType]
    order = order_named("lpm")
    order.add(FakeRequest(arrival=0))
    with pytest.raises(ValueError, match="order must be empty, got 1 requests"):
        Ageing[Any](order, after_s=1.0)
