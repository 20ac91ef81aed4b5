import math
from random import Random
from typing import Any

import pytest

from pagewood.schedpolicy import DraftCost, StepCost


def test_it_interpolates_between_measured_sizes():
    cost = StepCost([2, 4, 5, 9], [1.0, 2.0, 5.0, 5.0])
    assert [cost.seconds(size) for size in range(10)] == [1, 1, 1, 1.5, 2, 5, 5, 5, 5, 5]


def test_above_the_largest_size_it_continues_with_the_slope_of_all():
    cost = StepCost([1, 11], [1.0, 2.0])
    assert cost.seconds(21) == pytest.approx(3.0)
    assert cost.seconds(30) == pytest.approx(3.9)
    assert StepCost([4], [1.0]).seconds(1000) == 1.0
    assert StepCost([1, 2], [2.0, 1.0]).seconds(1000) == 1.0


def test_steps_of_one_size_correct_all_sizes_of_one_kind_by_what_they_took_more():
    cost = StepCost([1, 100], [1.0, 2.0])
    for _ in range(200):
        cost.observe(40, 3.0)
    assert cost.seconds(40) == pytest.approx(3.0, rel=0.02)
    assert cost.seconds(100) - cost.seconds(1) == pytest.approx(1.0)
    assert cost.seconds(100, has_drafts=True) == 2.0
    for _ in range(200):
        cost.observe(100, 1.0, has_drafts=True)
    assert cost.seconds(100, has_drafts=True) == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("num_steps", [100, 2000])
@pytest.mark.parametrize(("factor", "constant_s"), [(1.0, 0.5), (1.5, 0.0), (0.7, 0.5)])
def test_steps_of_several_sizes_tell_host_work_from_a_slower_machine(factor: float, constant_s: float, num_steps: int):
    cost = StepCost([1, 101], [1.0, 2.0])
    rng = Random(0)
    for _ in range(num_steps):
        size = rng.randint(1, 101)
        cost.observe(size, factor * cost.as_measured(size) + constant_s)
    assert cost.seconds(51) == pytest.approx(factor * 1.5 + constant_s, rel=0.02)
    assert cost.seconds(101) - cost.seconds(1) == pytest.approx(factor, rel=0.15)


def test_seconds_stay_positive_whatever_is_observed():
    cost = StepCost([1, 100], [1.0, 2.0])
    for _ in range(2000):
        cost.observe(100, 1e-9)
        cost.observe(1, 1e3)
    assert all(0 < cost.seconds(size) < math.inf for size in (0, 1, 50, 100, 1000))


def test_one_slow_step_changes_little():
    cost = StepCost([1, 100], [1.0, 1.0])
    cost.observe(40, 50.0)
    assert cost.seconds(40) < 1.02


@pytest.mark.parametrize(
    ("sizes", "seconds", "message"),
    [
        ([], [], "sizes and seconds must be of one length >= 1, got 0 and 0"),
        ([1, 2], [1.0], "sizes and seconds must be of one length >= 1, got 2 and 1"),
        ([0, 2], [1.0, 1.0], r"sizes must be >= 1 and ascend, got \[0, 2\]"),
        ([2, 2], [1.0, 1.0], r"sizes must be >= 1 and ascend, got \[2, 2\]"),
        ([1], [0.0], r"seconds must be > 0 and finite, got \[0.0\]"),
        ([1], [float("inf")], r"seconds must be > 0 and finite, got \[inf\]"),
    ],
)
def test_the_table_is_checked(sizes: list[int], seconds: list[float], message: str):
    with pytest.raises(ValueError, match=message):
        StepCost(sizes, seconds)


@pytest.mark.parametrize("name", ["per_step_s", "per_pass_s", "per_token_s"])
def test_the_cost_of_drafting_is_checked(name: str):
    arguments: dict[str, Any] = {name: -1.0}
    with pytest.raises(ValueError, match=f"{name} must be >= 0 and finite, got -1.0"):
        DraftCost(**arguments)


def test_the_cost_of_drafting_is_learned():
    cost = DraftCost()
    assert cost.seconds(2, 2) == 0.0
    cost.observe(2, 2, 0.006)
    assert cost.seconds(2, 2) == pytest.approx(0.006)
    for _ in range(300):
        cost.observe(3, 3, 0.003)
    assert cost.seconds(3, 3) == pytest.approx(0.003, rel=0.02)
    assert cost.seconds(0, 0) == 0.0


def test_a_measured_cost_keeps_its_parts():
    cost = DraftCost(per_step_s=0.001, per_pass_s=0.002, per_token_s=0.0001)
    assert cost.seconds(3, 10) == pytest.approx(0.008)
    for _ in range(300):
        cost.observe(3, 10, 0.016)
    assert cost.seconds(1, 1) == pytest.approx(0.0062, rel=0.02)
