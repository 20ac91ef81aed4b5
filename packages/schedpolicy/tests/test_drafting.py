from typing import Any

import pytest

from pagewood.schedpolicy import DraftControl, DraftCost, StepCost, weight_by_priority
from pagewood.schedpolicy.testing import FakeRequest, OneStep

Control = DraftControl[FakeRequest]


def requests(*priorities: int) -> list[FakeRequest]:
    return [FakeRequest(arrival=arrival, priority=priority) for arrival, priority in enumerate(priorities)]


def control(cost: StepCost, *, max_tokens: int = 4, **arguments: Any) -> Control:
    return Control(max_tokens, cost, draft_cost=DraftCost(per_pass_s=1e-9), **arguments)


def test_fixed_is_always_the_most() -> None:
    fixed = Control(3, mode="fixed")
    assert not fixed.rests(2)
    assert fixed.lengths(requests(0, 0), 100) == [3, 3]
    assert fixed.reason == "fixed"


def test_without_a_table_nothing_is_drafted() -> None:
    unknown = Control(3)
    assert unknown.rests(1)
    assert unknown.reason == "cost unknown"
    assert unknown.lengths(requests(0), 0) == [0]
    unknown.observe(OneStep.of(requests(0), [0], [0], [0], num_tokens=1, taken_s=0.01))
    unknown.set_cost(StepCost([1, 64], [0.01, 0.01]))
    assert not unknown.rests(1)
    assert unknown.lengths(requests(0), 0) == [3]


def test_no_request_needs_no_lengths() -> None:
    idle = Control(3)
    assert idle.lengths([], 12) == []
    assert idle.reason == "idle"
    idle.observe(OneStep.of([], [], [], [], num_tokens=12, taken_s=0.1))


def test_free_tokens_are_all_drafted() -> None:
    free = control(StepCost([1, 64], [0.01, 0.01]))
    assert free.lengths(requests(0, 0), 0) == [4, 4]
    assert free.reason == "gain"


def test_all_prefixes_are_compared_because_the_cost_has_steps() -> None:
    # Two more tokens nearly double the cost of a step; from there to 16 they are free.
    table = [1, 3, 4, 16], [0.01, 0.01, 0.019, 0.019]
    assert control(StepCost(*table), prior_acceptance=0.9).lengths(requests(0, 0), 0) == [4, 4]
    assert control(StepCost(*table), prior_acceptance=0.5).lengths(requests(0, 0), 0) == [1, 0]


def test_prompt_tokens_in_the_step_can_take_the_room() -> None:
    cost = StepCost([1, 16, 32], [0.01, 0.01, 0.25])
    assert control(cost).lengths(requests(0), 0) == [4]
    busy = control(cost)
    assert busy.lengths(requests(0), 15) == [0]
    assert busy.reason == "load"
    assert busy.lengths(requests(0), 0) == [4]  # it says nothing of a step without prompts


def test_what_would_not_be_accepted_is_not_drafted() -> None:
    hopeless = control(StepCost([1, 2, 64], [0.01, 0.015, 0.5]), prior_acceptance=0.05)
    assert hopeless.lengths(requests(0), 0) == [0]
    assert hopeless.reason == "acceptance"


def test_after_a_decision_for_none_steps_rest_until_the_load_falls() -> None:
    cost = StepCost([1, 2, 3, 64], [0.01, 0.01, 0.02, 0.9])
    full = control(cost)
    assert full.lengths(requests(*[0] * 8), 0) == [0] * 8
    assert [full.rests(8) for _ in range(17)] == [True] * 16 + [False]
    full.lengths(requests(*[0] * 8), 0)
    assert full.rests(8)
    assert full.is_far
    assert not full.rests(1)
    assert full.lengths(requests(0), 0) == [1]


def test_a_slow_drafter_is_not_used() -> None:
    slow = Control(4, StepCost([1, 64], [0.01, 0.01]), draft_cost=DraftCost(per_pass_s=0.02))
    assert slow.lengths(requests(0), 0) == [0]


def test_only_the_passes_of_the_longest_draft_cost() -> None:
    """Four requests draft one token each in one pass."""
    cost = StepCost([1, 64], [0.01, 0.01])
    drafts = Control(4, cost, draft_cost=DraftCost(per_pass_s=0.005), prior_acceptance=0.7)
    assert drafts.lengths(requests(0, 0, 0, 0), 0) == [1] * 4


def test_a_higher_priority_is_drafted_first() -> None:
    cost = StepCost([1, 6, 7, 64], [0.01, 0.01, 0.02, 0.5])
    assert control(cost).lengths(requests(0, 6), 0) == [1, 3]
    assert control(cost).lengths(requests(0, 0), 0) == [2, 2]

    def first_only(request: FakeRequest) -> float:
        return 5.0 if request.arrival == 0 else 1.0

    own = control(cost, weight=first_only)
    assert own.lengths(requests(0, 0), 0) == [4, 0]


def test_weights_are_limited() -> None:
    assert weight_by_priority(FakeRequest(arrival=0, priority=1)) == 1.25
    assert weight_by_priority(FakeRequest(arrival=0, priority=100)) == 1.25**6
    assert weight_by_priority(FakeRequest(arrival=0, priority=-100)) == 1.25**-6


def test_short_steps_keep_their_lengths() -> None:
    batch = requests(*[0] * 40)
    large = control(StepCost([1, 400], [0.001, 0.001]))
    first = large.lengths(batch, 0)
    assert first == [4] * 40
    large.observe(OneStep.of(batch, first, first, [0] * 40, num_tokens=200, taken_s=0.001))
    assert large.lengths(batch, 0) == first
    assert large.lengths(batch[::-1], 0) == first
    assert large.lengths([*batch[1:], FakeRequest(arrival=99)], 0) == first
    assert large.lengths(batch[:4], 0) != [4] * 4  # another load is decided anew


def test_the_reasons_are_counted() -> None:
    counted = Control(3, mode="fixed")
    counted.lengths(requests(0, 0, 0), 0)
    assert counted.steps_by_reason["fixed"] == 1
    assert sum(counted.steps_by_reason.values()) == 1


def test_a_late_result_of_a_forgotten_request_is_not_kept() -> None:
    batch = requests(0)
    late = control(StepCost([1, 64], [0.01, 0.01]))
    lengths = late.lengths(batch, 0)
    late.forget(batch[0])
    late.observe(OneStep.of(batch, lengths, lengths, lengths, num_tokens=5, taken_s=0.01))
    assert late.num_known == 0
    late.forget(batch[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be >= 1, got 0"),
        ({"max_tokens": 1, "mode": "auto"}, "mode must be one of adaptive, fixed, got 'auto'"),
        ({"max_tokens": 1, "prior_acceptance": 1.0}, r"prior_acceptance must be in \(0, 1\), got 1.0"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Control(**arguments)


def test_while_other_work_takes_the_cores_nothing_is_drafted_or_learned() -> None:
    are_taken = False
    cost = StepCost([1, 64], [0.01, 0.01])
    steps = control(cost, are_cores_taken=lambda: are_taken)
    assert not steps.rests(2)
    assert steps.lengths(requests(0, 0), 0) == [4, 4]
    are_taken = True
    for _ in range(50):
        assert steps.rests(2)
        assert (steps.reason, steps.is_far) == ("cores", True)
        steps.observe(OneStep.of(requests(0, 0), [0, 0], [0, 0], [0, 0], num_tokens=2, taken_s=0.5))
    assert steps.steps_by_reason["cores"] == 50
    assert cost.seconds(2) == 0.01
    are_taken = False
    assert not steps.rests(2)
    assert steps.lengths(requests(0, 0), 0) == [4, 4]


def test_a_fixed_length_does_not_ask_for_the_cores() -> None:
    steps = Control(4, StepCost([1, 64], [0.01, 0.01]), mode="fixed", are_cores_taken=lambda: True)
    assert not steps.rests(1)
    assert steps.lengths(requests(0), 0) == [4]


def test_steps_that_compute_prompts_too_are_compared_at_the_load_at_which_they_are_decided() -> None:
    """A prompt in each step makes another load of it, and drafts cost the host what no estimate knows of."""
    steps = control(StepCost([1, 64], [0.01, 0.01]))
    batch = requests(0, 0, 0, 0)
    for _ in range(400):
        granted = [0] * 4 if steps.rests(5) else steps.lengths(batch, 8)
        has_drafts = any(granted)
        taken_s = 0.04 if has_drafts else 0.01
        report = OneStep.of(
            batch, granted, granted, [1] * 4 if has_drafts else [0] * 4, num_tokens=12 + sum(granted), num_prompts=1,
            taken_s=taken_s,
        )  # fmt: skip
        steps.observe(report)
    assert steps.steps_by_reason["rest"] > 350
