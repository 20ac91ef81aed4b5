from typing import Any

import pytest

from pagewood.schedpolicy import Autoscaler, FleetLoad


def scaler(**arguments: Any) -> Autoscaler:
    numbers: dict[str, Any] = {"min_replicas": 0, "max_replicas": 10, "num_places": 10}
    return Autoscaler(**(numbers | arguments))


def load(num_requests: int, num_waiting: int = 0, *, num_replicas: int = 1, kv_use: float = 0.0) -> FleetLoad:
    return FleetLoad(num_replicas=num_replicas, num_requests=num_requests, num_waiting=num_waiting, kv_use=kv_use)


def test_waiting_work_counts_as_running_work():
    assert scaler().decide(load(8), 0.0) == 1
    assert scaler().decide(load(8, 1), 0.0) == 2
    assert scaler().decide(load(0, 500), 0.0) == 10


def test_memory_counts_where_it_is_shorter_than_places():
    assert scaler().decide(load(8, num_replicas=4, kv_use=1.0), 0.0) == 5
    assert scaler().decide(load(8, num_replicas=4, kv_use=0.2), 0.0) == 1


def test_it_grows_at_once_and_shrinks_when_less_was_enough_for_a_time():
    one = scaler()
    decisions = [one.decide(load(num), at_s) for num, at_s in ((8, 0), (30, 10), (8, 20), (20, 40), (8, 71), (8, 101))]
    assert decisions == [1, 4, 4, 4, 3, 1]


def test_it_goes_to_zero_and_back():
    one = scaler(shrink_after_s=10.0)
    assert one.decide(load(0), 0.0) == 0
    assert one.decide(load(0, 1), 5.0) == 1
    assert one.decide(load(0), 30.0) == 1
    assert one.decide(load(0), 304.0) == 1
    assert one.decide(load(0), 305.0) == 0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("min_replicas", -1, "min_replicas must be >= 0, got -1"),
        ("max_replicas", 0, "max_replicas must be >= 1, got 0"),
        ("num_places", 0, "num_places must be >= 1, got 0"),
        ("target_use", 1.5, r"target_use must be in \(0, 1\], got 1.5"),
        ("shrink_after_s", -1.0, "shrink_after_s must be >= 0, got -1.0"),
        ("zero_after_s", float("nan"), "zero_after_s must be >= 0, got nan"),
    ],
)
def test_limits_are_checked(name: str, value: float, message: str):
    with pytest.raises(ValueError, match=message):
        scaler(**{name: value})
