from typing import Any

import pytest

from pagewood.schedpolicy import AdaptiveOrder, AdaptiveRule, ByLongestMatch, RankedOrder, by_arrival
from pagewood.schedpolicy.testing import FakeRequest


def adaptive(**rule: Any) -> AdaptiveOrder[FakeRequest]:
    return AdaptiveOrder[FakeRequest](
        lambda: RankedOrder(ByLongestMatch(), reads_match=True),
        lambda: RankedOrder(by_arrival),
        rule=AdaptiveRule(min_waiting=4, hold_s=1.0, smoothing=0.5, **rule),
        max_switches=3,
    )


def admit(order: AdaptiveOrder[FakeRequest], num_matched: int) -> None:
    request = FakeRequest(arrival=-1, num_tokens=100, num_matched=num_matched)
    order.add(request)
    order.admit(request)


def fill(order: AdaptiveOrder[FakeRequest], num_waiting: int) -> None:
    for arrival in range(num_waiting):
        order.add(FakeRequest(arrival=arrival, num_matched=arrival))


def test_it_switches_when_the_cache_is_hit_and_the_queue_is_long_and_records_why():
    order = adaptive()
    fill(order, 4)
    assert [request.arrival for request in order.ordered(0.0)] == [0, 1, 2, 3]
    admit(order, 90)
    assert [request.arrival for request in order.ordered(1.0)] == [3, 2, 1, 0]
    (switch,) = order.switches
    assert switch.is_cache_aware
    assert (switch.at_s, switch.hit_rate, switch.num_waiting) == (1.0, 0.45, 4)
    assert switch.reason == "the hit rate 0.450 is at least 0.15 and 4 requests wait, at least 4"


def test_it_does_not_switch_for_a_short_queue():
    order = adaptive()
    fill(order, 3)
    admit(order, 90)
    assert [request.arrival for request in order.ordered(1.0)] == [0, 1, 2]
    assert not order.switches


def test_between_the_limits_nothing_changes():
    order = adaptive()
    fill(order, 4)
    admit(order, 20)  # 0.1: too low to begin
    list(order.ordered(1.0))
    assert not order.is_cache_aware
    admit(order, 30)  # 0.2
    list(order.ordered(2.0))
    assert order.is_cache_aware
    admit(order, 0)  # 0.1: too high to end
    list(order.ordered(9.0))
    assert order.is_cache_aware
    admit(order, 0)
    admit(order, 0)  # 0.025
    list(order.ordered(10.0))
    assert not order.is_cache_aware
    assert order.switches[-1].reason == "the hit rate 0.025 is below 0.05"


def test_a_switch_holds_for_a_while():
    order = adaptive()
    fill(order, 4)
    admit(order, 100)
    list(order.ordered(1.0))
    for _ in range(9):
        admit(order, 0)
    list(order.ordered(1.9))
    assert order.is_cache_aware
    list(order.ordered(2.0))
    assert not order.is_cache_aware


def test_it_switches_back_when_fewer_than_half_wait():
    order = adaptive()
    fill(order, 4)
    admit(order, 100)
    waiting = list(order.ordered(1.0))
    for request in waiting[:2]:
        order.remove(request)
    list(order.ordered(3.0))
    assert order.is_cache_aware
    order.remove(waiting[2])
    assert list(order.ordered(4.0)) == [waiting[3]]
    assert order.switches[-1].reason == "1 requests wait, fewer than half of 4"


def test_the_last_switches_are_kept():
    order = adaptive()
    fill(order, 4)
    for now_s in range(10):
        for _ in range(6):
            admit(order, 0 if now_s % 2 else 100)
        list(order.ordered(float(now_s)))
    assert [switch.at_s for switch in order.switches] == [7.0, 8.0, 9.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"low_hit_rate": 0.5, "high_hit_rate": 0.4}, r"low_hit_rate and high_hit_rate must be .* got 0.5 and 0.4"),
        ({"min_waiting": 0}, "min_waiting must be >= 1, got 0"),
        ({"hold_s": -1.0}, "hold_s must be >= 0, got -1.0"),
        ({"smoothing": 0.0}, r"smoothing must be in \(0, 1\], got 0.0"),
    ],
)
def test_the_rule_is_checked(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        AdaptiveRule(**arguments)
