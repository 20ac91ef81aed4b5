from typing import Any

import pytest

from pagewood.schedpolicy import DraftControl, DraftCost, StepCost, weight_by_priority
from pagewood.schedpolicy.testing import FakeRequest

Control = DraftControl[FakeRequest]


def requests(*priorities: int) -> list[FakeRequest]:
    return [FakeRequest(arrival=arrival, priority=priority) for arrival, priority in enumerate(priorities)]


def known(cost: StepCost, num_tokens: int) -> StepCost:
    """Return the table with steps of `num_tokens` observed, so that no plain step must be measured first."""
    for _ in range(20):
        cost.observe(num_tokens, cost.seconds(num_tokens))
    return cost


def control(cost: StepCost, num_tokens: int, *, max_tokens: int = 4, **arguments: Any) -> Control:
    return Control(max_tokens, known(cost, num_tokens), draft_cost=DraftCost(per_pass_s=1e-9), **arguments)


def test_fixed_is_always_the_most():
    fixed = Control(3, mode="fixed")
    assert fixed.lengths(requests(0, 0), 100) == [3, 3]
    assert fixed.reason == "fixed"


def test_without_a_table_nothing_is_drafted():
    unknown = Control(3)
    assert unknown.lengths(requests(0), 0) == [0]
    assert unknown.reason == "cost unknown"
    unknown.observe(requests(0), [0], [0], [0], num_tokens=1, verify_s=0.01)
    unknown.set_cost(known(StepCost([1, 64], [0.01, 0.01]), 1))
    unknown.lengths(requests(0), 0)
    assert unknown.reason == "probe"  # one token, to learn what drafting costs


def test_no_request_needs_no_lengths():
    idle = Control(3)
    assert idle.lengths([], 12) == []
    assert idle.reason == "idle"
    idle.observe([], [], [], [], num_tokens=12, verify_s=0.1)


def test_free_tokens_are_all_drafted():
    free = control(StepCost([1, 64], [0.01, 0.01]), 2)
    assert free.lengths(requests(0, 0), 0) == [4, 4]
    assert free.reason == "gain"


def test_all_prefixes_are_compared_because_the_cost_has_steps():
    # Two more tokens nearly double the cost of a step; from there to 16 they are free.
    steps = control(StepCost([1, 3, 4, 16], [0.01, 0.01, 0.019, 0.019]), 2, prior_acceptance=0.9)
    assert steps.lengths(requests(0, 0), 0) == [4, 4]
    steps = control(StepCost([1, 3, 4, 16], [0.01, 0.01, 0.019, 0.019]), 2, prior_acceptance=0.5)
    assert steps.lengths(requests(0, 0), 0) == [1, 0]


def test_prompt_tokens_in_the_step_can_take_the_room():
    cost = StepCost([1, 16, 32], [0.01, 0.01, 0.15])
    assert control(cost, 1).lengths(requests(0), 0) == [4]
    busy = control(cost, 16)
    assert busy.lengths(requests(0), 15) == [0]
    assert busy.reason == "load"


def test_what_would_not_be_accepted_is_not_drafted():
    hopeless = control(StepCost([1, 2, 64], [0.01, 0.015, 0.5]), 1, prior_acceptance=0.05)
    assert hopeless.lengths(requests(0), 0) == [0]
    assert hopeless.reason == "acceptance"


def test_a_slow_drafter_is_not_used():
    slow = Control(4, known(StepCost([1, 64], [0.01, 0.01]), 1), draft_cost=DraftCost(per_pass_s=0.02))
    assert slow.lengths(requests(0), 0) == [0]


def test_one_step_risks_at_most_half_of_the_account():
    # At the start the account holds 2 plain steps, so that a step may cost 1 more than a plain one.
    rising = control(StepCost([1, 2, 3], [0.01, 0.0175, 0.025]), 1, prior_acceptance=0.95)
    assert rising.lengths(requests(0), 0) == [1]
    rising = control(StepCost([1, 2], [0.01, 0.0201]), 1, prior_acceptance=0.99, max_tokens=1)
    assert rising.lengths(requests(0), 0) == [0]
    rising = control(StepCost([1, 2], [0.01, 0.0205]), 1, prior_acceptance=0.99, max_tokens=1, max_slowdown=0.01)
    assert rising.lengths(requests(0), 0) == [0]


def test_the_account_is_short_is_said():
    short = control(StepCost([1, 5], [0.01, 0.035]), 1, prior_acceptance=0.95, max_slowdown=0.001)
    assert short.lengths(requests(0), 0) == [0]
    assert short.reason == "account"


def test_a_higher_priority_is_drafted_first():
    cost = StepCost([1, 6, 7, 64], [0.01, 0.01, 0.02, 0.5])
    assert control(cost, 2).lengths(requests(0, 6), 0) == [1, 3]
    assert control(cost, 2).lengths(requests(0, 0), 0) == [2, 2]

    def first_only(request: FakeRequest) -> float:
        return 5.0 if request.arrival == 0 else 1.0

    own = control(cost, 2, weight=first_only)
    assert own.lengths(requests(0, 0), 0) == [4, 0]


def test_weights_are_limited():
    assert weight_by_priority(FakeRequest(arrival=0, priority=1)) == 1.25
    assert weight_by_priority(FakeRequest(arrival=0, priority=100)) == 1.25**6
    assert weight_by_priority(FakeRequest(arrival=0, priority=-100)) == 1.25**-6


def test_a_new_size_is_first_taken_plain():
    fresh = Control(4, StepCost([1, 64], [0.01, 0.01]), draft_cost=DraftCost(per_pass_s=1e-9))
    assert fresh.lengths(requests(0), 0) == [0]
    assert fresh.reason == "sample"
    assert fresh.lengths(requests(0), 0) == [4]
    assert fresh.lengths(requests(0, 0), 0) == [0, 0]


def test_a_short_step_is_measured_between_two_others():
    table = StepCost([1, 64], [0.0002, 0.0002])
    fresh = Control(4, table, draft_cost=DraftCost(per_pass_s=1e-9))
    for _ in range(3):
        assert fresh.lengths(requests(0), 0) == [0]
        assert fresh.reason == "sample"
    for seconds in (0.0009, 0.0003, 0.0008):  # the host works longer where drafts are near
        fresh.observe([], [], [], [], num_tokens=1, num_others=1, verify_s=seconds)
    assert table.seconds(1) == pytest.approx(0.0003)


def test_the_account_pays_for_what_steps_really_take():
    # By the table drafts are nearly free; but the host's work makes steps with them longer, and others too.
    cost = known(StepCost([1, 64], [2e-4, 2.1e-4]), 2)
    real = Control(4, cost, draft_cost=DraftCost(per_pass_s=1e-9), max_slowdown=0.01)
    batch = requests(0, 0)
    assert sum(real.lengths(batch, 0)) > 0
    before_s = real.account_s
    for _ in range(3):
        real.observe([], [], [], [], num_tokens=2, num_others=2, num_steps=32, verify_s=2e-4, passed_steps=32,
                     passed_load=2, passed_tokens=64, passed_s=0.0064)  # fmt: skip
    gained_s = real.account_s - before_s
    assert gained_s == pytest.approx(96 * 0.0075 * 2e-4, rel=0.01)
    before_s = real.account_s
    # Three tokens are worth 0.3 ms, and the step took 0.35.
    real.observe(batch, [4, 4], [4, 4], [1, 0], num_tokens=10, num_yielded=3, verify_s=3.5e-4, passed_load=2)
    assert real.account_s - before_s == pytest.approx(-5e-5, abs=5e-6)


def test_large_batches_keep_their_lengths_for_a_few_steps():
    batch = requests(*[0] * 40)
    large = control(StepCost([1, 400], [0.01, 0.01]), 40)
    first = large.lengths(batch, 0)
    assert first == [4] * 40
    large.observe(batch, first, first, [0] * 40, num_tokens=200, verify_s=0.01)
    assert large.lengths(batch, 0) == first
    assert large.lengths(batch[::-1], 0) == first
    assert large.lengths([*batch[1:], FakeRequest(arrival=99)], 0) == first
    large.lengths(batch[:30], 0)
    assert large.reason == "sample"


def test_the_counters():
    batch = requests(0, 0, 0)
    counted = Control(3, mode="fixed")
    lengths = counted.lengths(batch, 0)
    counted.observe(batch, lengths, [3, 2, 0], [3, 1, 0], num_tokens=8, draft_s=0.5, verify_s=1.0)
    assert (counted.num_granted, counted.num_drafted, counted.num_accepted) == (9, 5, 4)
    assert counted.accepted_by_position == [2, 1, 1]
    assert (counted.draft_s, counted.verify_s) == (0.5, 1.0)
    assert counted.steps_by_reason["fixed"] == 1
    assert sum(counted.steps_by_reason.values()) == 1


def test_a_late_result_of_a_forgotten_request_counts_but_is_not_kept():
    batch = requests(0)
    late = control(StepCost([1, 64], [0.01, 0.01]), 1)
    lengths = late.lengths(batch, 0)
    late.forget(batch[0])
    late.observe(batch, lengths, lengths, lengths, num_tokens=5, verify_s=0.01)
    assert late.num_accepted == 4
    assert late.num_known == 0
    late.forget(batch[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be >= 1, got 0"),
        ({"max_tokens": 1, "mode": "auto"}, "mode must be one of adaptive, fixed, got 'auto'"),
        ({"max_tokens": 1, "max_slowdown": 0.0}, r"max_slowdown must be in \(0, 1\), got 0.0"),
        ({"max_tokens": 1, "prior_acceptance": 1.0}, r"prior must be in \(0, 1\), got 1.0"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Control(**arguments)


def test_while_other_work_takes_the_cores_nothing_is_drafted_or_learned():
    are_taken = False
    cost = StepCost([1, 64], [0.01, 0.01])
    steps = control(cost, 2, are_cores_taken=lambda: are_taken)
    assert not steps.rests(2)
    assert steps.lengths(requests(0, 0), 0) == [4, 4]
    are_taken = True
    for _ in range(50):
        assert steps.rests(2)
        assert (steps.reason, steps.is_far) == ("cores", True)
        steps.observe([], [], [], [], num_tokens=2, num_others=2, num_yielded=2, passed_load=2.0, passed_tokens=2,
                      passed_s=0.5, verify_s=0.5)  # fmt: skip
    assert steps.steps_by_reason["cores"] == 50
    assert cost.seconds(2) == 0.01
    are_taken = False
    assert not steps.rests(2)
    assert steps.lengths(requests(0, 0), 0) == [4, 4]


def test_a_fixed_length_does_not_ask_for_the_cores():
    steps = Control(4, StepCost([1, 64], [0.01, 0.01]), mode="fixed", are_cores_taken=lambda: True)
    assert not steps.rests(1)
    assert steps.lengths(requests(0), 0) == [4]
