from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewood.schedpolicy import DraftCost, StepCost


def test_it_interpolates_between_measured_sizes():
    cost = StepCost([2, 4, 5, 9], [1.0, 2.0, 5.0, 5.0])
    assert [cost.seconds(size) for size in range(10)] == [1, 1, 1, 1.5, 2, 5, 5, 5, 5, 5]
    assert cost.after(3, 3) == [2, 5, 5]


def test_above_the_largest_size_it_continues_with_the_slope_of_all():
    cost = StepCost([1, 11], [1.0, 2.0])
    assert cost.seconds(21) == pytest.approx(3.0)
    assert cost.after(29, 2) == pytest.approx([3.9, 4.0])
    assert StepCost([4], [1.0]).seconds(1000) == 1.0
    assert StepCost([1, 2], [2.0, 1.0]).seconds(1000) == 1.0


@given(st.lists(st.floats(1e-6, 10.0), min_size=5, max_size=5), st.integers(0, 300), st.integers(1, 200))
def test_after_agrees_with_seconds(seconds: list[float], num_tokens: int, num_more: int):
    cost = StepCost([1, 3, 8, 40, 41], seconds)
    assert cost.after(num_tokens, num_more) == [cost.seconds(num_tokens + more) for more in range(1, num_more + 1)]


def test_observations_correct_a_size_and_its_neighbours():
    cost = StepCost([1, 100], [1.0, 1.0])
    for _ in range(30):
        cost.observe(40, 3.0)
    assert cost.seconds(40) == pytest.approx(3.0, rel=0.05)
    assert cost.seconds(38) > 2.0
    assert cost.seconds(20) == pytest.approx(1.0, rel=0.1)
    assert cost.is_observed(44)
    assert not cost.is_observed(46)
    assert not cost.is_observed(1000)


def test_a_neighbour_with_steps_of_its_own_hardly_changes():
    cost = StepCost([1, 100], [1.0, 1.0])
    for _ in range(30):
        cost.observe(40, 1.0)
        cost.observe(41, 2.0)
    assert cost.seconds(40) == pytest.approx(1.0, rel=0.1)
    assert cost.seconds(41) == pytest.approx(2.0, rel=0.1)


def test_a_change_of_all_steps_moves_all_sizes():
    cost = StepCost([1, 100], [1.0, 1.0])
    for _ in range(30):
        cost.observe(40, 1.0)
    for _ in range(100):
        cost.observe(40, 1.5)
    assert cost.seconds(1) > 1.2


def test_one_slow_step_of_a_known_size_changes_little():
    cost = StepCost([1, 100], [1.0, 1.0])
    assert cost.credible(40, 50.0) == 50.0
    for _ in range(30):
        cost.observe(40, 1.0)
    assert cost.credible(40, 50.0) == pytest.approx(1.25)
    cost.observe(40, 50.0)
    assert cost.seconds(40) < 1.15


@pytest.mark.parametrize(
    ("sizes", "seconds", "message"),
    [
        ([], [], "sizes and seconds must be as many, at least 1, got 0 and 0"),
        ([1, 2], [1.0], "sizes and seconds must be as many, at least 1, got 2 and 1"),
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
    assert not cost.is_known
    cost.observe(1, 1, 0.003)
    assert cost.is_known
    assert cost.seconds(1, 1) == pytest.approx(0.003)
    for index in range(300):
        num_passes = 1 + index % 5
        cost.observe(num_passes, 4 * num_passes, 0.001 + 0.002 * num_passes)
    for num_passes in (1, 3, 5):
        assert cost.seconds(num_passes, 4 * num_passes) == pytest.approx(0.001 + 0.002 * num_passes, rel=0.05)
    assert cost.seconds(0, 0) == 0.0
    for _ in range(300):
        cost.observe(3, 3, 0.0)
    assert 0 <= cost.seconds(3, 3) < 1e-4


def test_prompts_that_a_head_reads_do_not_raise_the_cost_of_other_steps() -> None:
    cost = DraftCost(per_step_s=0.001, per_pass_s=0.002)
    for index in range(300):
        num_others = 200 * (index % 3)
        cost.observe(4, 16, 0.009 + 0.0001 * num_others, num_others)
    assert cost.seconds(4, 16) == pytest.approx(0.009, rel=0.1)
    assert cost.seconds(4, 16, 300) == pytest.approx(0.039, rel=0.1)


def test_observations_of_neighbours_do_not_add_up() -> None:
    cost = StepCost([1, 200], [1.0, 200.0])
    for size in range(90, 110):
        if size != 100:
            cost.observe(size, size / 2)
    assert cost.seconds(100) == pytest.approx(50, rel=0.2)


def test_steps_with_drafts_have_a_table_of_their_own() -> None:
    cost = StepCost([1, 100], [1.0, 1.0])
    for _ in range(40):
        cost.observe(16, 1.0)
        cost.observe(16, 1.5, has_drafts=True)
    assert cost.seconds(16) == pytest.approx(1.0, rel=0.05)
    assert cost.seconds(16, has_drafts=True) == pytest.approx(1.5, rel=0.05)
    assert cost.after(15, 1) == [cost.seconds(16, has_drafts=True)]
    assert cost.credible(16, 9.0) == pytest.approx(1.25 * cost.seconds(16))
    assert cost.credible(16, 9.0, has_drafts=True) == pytest.approx(1.25 * cost.seconds(16, has_drafts=True))


@pytest.mark.parametrize("has_drafts", [False, True])
def test_the_table_that_has_observed_nothing_near_follows_the_other(has_drafts: bool) -> None:
    cost = StepCost([1, 100], [1.0, 1.0])
    for _ in range(30):
        cost.observe(16, 1.5, has_drafts=has_drafts)
    assert cost.seconds(16, has_drafts=not has_drafts) == pytest.approx(1.5, rel=0.05)
    assert not cost.is_observed(16) or not has_drafts  # a plain step is still to be measured
    cost.observe(16, 1.0, has_drafts=not has_drafts)
    assert cost.seconds(16, has_drafts=not has_drafts) == pytest.approx(1.0, rel=0.05)
    assert cost.seconds(16, has_drafts=has_drafts) == pytest.approx(1.5, rel=0.05)


def test_a_size_that_is_no_longer_observed_returns_to_the_measured_shape() -> None:
    cost = StepCost([1, 4, 6, 8], [1.0, 1.2, 1.3, 1.4])
    for _ in range(20):  # the machine was slow when it computed 6 tokens
        cost.observe(6, 2.6, has_drafts=True)
    assert cost.seconds(6, has_drafts=True) > 2.4
    for _ in range(1000):
        cost.observe(4, 0.6, has_drafts=True)
    assert cost.seconds(4, has_drafts=True) == pytest.approx(0.6, rel=0.01)
    assert cost.seconds(6, has_drafts=True) == pytest.approx(0.65, rel=0.08)


def test_sizes_that_are_observed_in_turn_keep_what_was_observed() -> None:
    cost = StepCost([1, 4, 6, 8], [1.0, 1.2, 1.3, 1.4])
    for _ in range(500):
        cost.observe(6, 2.6, has_drafts=True)
        cost.observe(4, 0.6, has_drafts=True)
    assert cost.seconds(4, has_drafts=True) == pytest.approx(0.6, rel=0.05)
    assert cost.seconds(6, has_drafts=True) == pytest.approx(2.6, rel=0.05)
