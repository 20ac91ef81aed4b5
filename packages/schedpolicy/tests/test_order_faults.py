"""Calls that an order must refuse without changing anything, and passes during which it changes."""

from collections.abc import Callable
from math import nan
from typing import Any

import pytest

from pagewood.schedpolicy import (
    ORDERS,
    AdaptiveOrder,
    AdaptiveRule,
    Ageing,
    FallbackAbove,
    MultilevelOrder,
    Order,
    RankedOrder,
    ShareOrder,
    by_arrival,
    fair_share,
    order_named,
)
from pagewood.schedpolicy.testing import FakeRequest

MAKERS: dict[str, Callable[[], Order[Any]]] = {
    **{name: (lambda name=name: order_named(name)) for name in ORDERS},
    "ageing": lambda: Ageing(order_named("lpm"), after_s=1.0, every=2),
    "fallback": lambda: FallbackAbove(order_named("fcfs"), order_named("lpm"), max_waiting=2),
    "multilevel": lambda: MultilevelOrder(lambda request: request.priority, lambda: order_named("shortest")),
}
# The attribute that each order compares, and that may come from JSON.
COMPARED = {
    "fcfs": "priority",
    "priority": "priority",
    "priority-low": "priority",
    "lpm": "arrived_s",
    "lof": "max_new_tokens",
    "shortest": "num_tokens",
    "srtf": "num_tokens",
    "random": "priority",
    "adaptive": "priority",
    "dfs-weight": "priority",
    "fair": "priority",
    "edf": "deadline_s",
    "wrr": "priority",
    "tag": "priority",
    "ageing": "arrived_s",
    "fallback": "arrived_s",
    "multilevel": "priority",
}


def requests(count: int) -> list[FakeRequest]:
    return [FakeRequest(arrival=number, arrived_s=float(number), tenant=f"t{number % 2}") for number in range(count)]


def arrivals(order: Order[Any]) -> list[int]:
    return sorted(request.arrival for request in order.ordered(10.0))


@pytest.mark.parametrize("name", MAKERS)
def test_nan_is_refused_and_makes_no_other_request_vanish(name: str):
    order = MAKERS[name]()
    first, bad, last = requests(3)
    setattr(bad, COMPARED[name], nan)
    order.add(first)
    with pytest.raises(ValueError, match=r"nan.* for the request with arrival 1"):
        order.add(bad)
    order.add(last)
    assert bad not in order
    assert len(order) == 2
    assert arrivals(order) == [0, 2]
    setattr(last, COMPARED[name], nan)
    with pytest.raises(ValueError, match="nan"):
        order.update(last)
    assert arrivals(order) == [0, 2]
    order.remove(last)
    order.remove(first)
    assert not len(order)


@pytest.mark.parametrize("name", MAKERS)
def test_a_pass_during_which_the_queue_changes_raises(name: str):
    changes: dict[str, Callable[[Order[Any], FakeRequest], None]] = {
        "admit": lambda order, request: order.admit(request),
        "remove": lambda order, request: order.remove(request),
        "park": lambda order, request: order.park(request),
        "add": lambda order, request: order.add(FakeRequest(arrival=100, arrived_s=100.0)),
    }
    for change in changes.values():
        order = MAKERS[name]()
        for request in requests(6):
            order.add(request)
        passing = order.ordered(10.0)
        change(order, next(passing))
        with pytest.raises(RuntimeError, match="the queue must not change during a pass"):
            next(passing)


@pytest.mark.parametrize("name", MAKERS)
def test_an_update_of_a_request_that_has_left_is_refused_with_its_arrival(name: str):
    order = MAKERS[name]()
    stays, leaves = requests(2)
    order.add(stays)
    order.add(leaves)
    order.admit(leaves)
    leaves.priority, leaves.tenant, leaves.tag, leaves.service_class = 5, "other", "other", "other"
    with pytest.raises(KeyError, match="must be waiting here, got the request with arrival 1"):
        order.update(leaves)
    order.stop(leaves)
    assert arrivals(order) == [0]
    order.add(leaves)
    assert arrivals(order) == [0, 1]


@pytest.mark.parametrize("wrap", ["ageing", "multilevel", "shares", "fallback"])
def test_an_order_that_fails_in_add_leaves_no_ghost(wrap: str):
    def rank(request: FakeRequest) -> tuple[float]:
        if request.arrival == 1:
            raise OSError("no rank")
        return (0.0,)

    def inner() -> Order[Any]:
        return RankedOrder(rank)

    wrapped: dict[str, Callable[[], Order[Any]]] = {
        "ageing": lambda: Ageing(inner(), after_s=0.0),
        "multilevel": lambda: MultilevelOrder(lambda request: request.arrival, inner),
        "shares": lambda: fair_share(make_order=inner),
        "fallback": lambda: FallbackAbove(RankedOrder(by_arrival), inner(), max_waiting=0),
    }
    order = wrapped[wrap]()
    first, bad, last = requests(3)
    bad.tenant = "only here"
    order.add(first)
    with pytest.raises(OSError, match="no rank"):
        order.add(bad)
    order.add(last)
    assert arrivals(order) == [0, 2]
    assert len(order) == 2
    with pytest.raises(KeyError):
        order.admit(bad)
    order.admit(first)
    order.admit(last)
    assert arrivals(order) == []


def test_an_order_that_cannot_take_over_is_not_switched_to():
    refuses = [True]

    def rank(request: FakeRequest) -> tuple[float]:
        if refuses[0]:
            raise OSError("not now")
        return (0.0,)

    order = AdaptiveOrder[Any](
        lambda: RankedOrder(rank), lambda: RankedOrder(by_arrival), rule=AdaptiveRule(high_hit_rate=0.05, min_waiting=1)
    )
    for request in requests(3):
        order.add(request)
    order.hit_rate = 1.0
    with pytest.raises(OSError, match="not now"):
        order.ordered(0.0)
    assert not order.is_cache_aware
    refuses[0] = False
    assert arrivals(order) == [0, 1, 2]
    assert order.is_cache_aware


def test_keys_that_cannot_be_compared_change_nothing():
    order = RankedOrder[FakeRequest](lambda request: (request.tag if request.arrival else 0,))
    first, second = requests(2)
    order.add(first)
    with pytest.raises(TypeError):
        order.add(second)
    assert arrivals(order) == [0]
    order.remove(first)
    assert not len(order)


def test_fair_forgets_tenants_that_are_not_ahead_of_those_that_wait():
    order: ShareOrder[FakeRequest] = fair_share()
    for number in range(5000):
        request = FakeRequest(arrival=number, num_tokens=10, tenant=f"tenant {number}")
        order.add(request)
        order.admit(request)
        order.stop(request)
    assert len(order._service) < 2500  # pyright: ignore[reportPrivateUsage]
    ahead = order.service("tenant 4999")
    order.add(FakeRequest(arrival=9999, tenant="tenant 1"))  # forgotten, and lifted like any other
    assert order.service("tenant 1") == ahead
