"""Weights by priority and deadline, and what they do to the draft lengths of a step."""

import pytest

from pagewood.schedpolicy import DraftControl, DraftCost, StepCost, WeightByUrgency, weight_by_priority
from pagewood.schedpolicy.steps.urgency import relative_weights
from pagewood.schedpolicy.testing import FakeRequest


def request(arrival: int = 0, **fields: float) -> FakeRequest:
    """Return a request that came at 0 and has 20 of its 100 tokens."""
    return FakeRequest(arrival=arrival, max_new_tokens=100, num_generated=20, **fields)  # type: ignore[arg-type]


def test_only_a_request_that_falls_behind_weighs_more():
    weight = WeightByUrgency(lambda: 10.0)  # two tokens a second until now, so the rest takes 40 s
    assert weight(request()) == 1.0
    assert weight(request(deadline_s=50.0)) == 1.0
    assert weight(request(deadline_s=200.0)) == 1.0
    assert weight(request(deadline_s=30.0)) == 2.0
    assert weight(request(deadline_s=11.0)) == 4.0
    assert weight(request(deadline_s=9.0)) == 1.0  # too late for any help
    assert weight(request(deadline_s=30.0, priority=1)) == 2.5
    assert weight(FakeRequest(arrival=0, deadline_s=10.5)) == 1.0  # its speed is not known yet
    assert weight(request(deadline_s=30.0, arrived_s=10.0)) == 1.0


def test_relative_weights_have_a_mean_of_one_and_are_none_where_all_are_equal():
    batch = [request(0, priority=1), request(1, priority=1)]
    assert relative_weights(batch, weight_by_priority) is None
    assert relative_weights(batch, lambda one: 3.0) is None
    assert relative_weights(batch, lambda one: 1.0 + 2 * one.arrival) == [0.5, 1.5]
    batch.append(request(2))
    assert relative_weights(batch, weight_by_priority) == pytest.approx([3.75 / 3.5, 3.75 / 3.5, 3 / 3.5])


def test_the_room_of_a_step_goes_to_the_request_with_the_nearest_deadline():
    cost = StepCost([1, 6, 7, 64], [0.01, 0.01, 0.02, 0.5])  # four drafts are free, a fifth is not
    for _ in range(20):
        cost.observe(2, 0.01)
    now_s = 10.0
    control = DraftControl[FakeRequest](
        4, cost, draft_cost=DraftCost(per_pass_s=1e-9), weight=WeightByUrgency(lambda: now_s)
    )
    assert control.lengths([request(0), request(1, deadline_s=60.0)], 0) == [2, 2]
    assert control.lengths([request(0), request(1, deadline_s=20.0)], 0) == [1, 3]
    now_s = 30.0
    assert control.lengths([request(0), request(1, deadline_s=20.0)], 0) == [2, 2]


def test_a_deadline_brings_no_drafts_that_cost_more_than_they_gain():
    cost = StepCost([1, 2, 64], [0.01, 0.02, 0.64])
    for _ in range(20):
        cost.observe(2, 0.02)
    control = DraftControl[FakeRequest](
        4, cost, draft_cost=DraftCost(per_pass_s=1e-9), weight=WeightByUrgency(lambda: 10.0)
    )
    assert control.lengths([request(0), request(1, deadline_s=11.0)], 0) == [0, 0]
