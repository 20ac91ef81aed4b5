"""What trials of drafts cost, and how soon a change of acceptance is noticed, on a machine like a CPU.

A step takes 3 ms and 0.35 ms for each of its rows. The rows of one request are its token and its drafts.
"""

import pytest

from pagewood.schedpolicy import DraftControl
from pagewood.schedpolicy.drafting import comparison
from pagewood.schedpolicy.testing import FakeRequest
from speculative_machine import SpeculativeMachine, SpeculativeRun

MOST = 5
BATCHES = [1, 4, 16, 64]
START_S = 1.0
"""Until then the policy learns; it loses at most `START_COST_S` of it against plain decoding."""
START_COST_S = 0.05
NOTICED_STEPS = 750
"""Steps until drafts are made again when they would be accepted."""
STOPPED_STEPS = 300
"""Steps until a loss ends when drafts are no longer accepted."""


def step_s(num_rows: int) -> float:
    return 3e-3 + 0.35e-3 * num_rows


def decode(num_requests: int, *acceptances: float, num_steps: int, seed: int = 0) -> SpeculativeRun:
    """Return a run whose acceptance is one of `acceptances` after the other, each for `num_steps` steps."""
    machine = SpeculativeMachine(
        step_s=step_s,
        accepts=lambda arrival, step, position: acceptances[min(step // num_steps, len(acceptances) - 1)],
        noise=0.05,
        life=48,
    )
    control = DraftControl[FakeRequest](MOST, machine.table([1, 2, 4, 8, 16, 32, 64, 128, 400]))
    return machine.run(control, lambda step: num_requests, num_steps * len(acceptances), seed=seed)


def better(num_requests: int, acceptance: float) -> float:
    """Return the speedup of the better of no drafts and always `MOST`."""
    num_tokens = sum(acceptance**i for i in range(MOST + 1))
    return max(1.0, num_tokens * step_s(num_requests) / step_s((MOST + 1) * num_requests))


def after_start(num_requests: int, acceptance: float, seed: int) -> tuple[float, float]:
    """Return the seconds lost at the start against plain decoding, and the speedup of the ten seconds after it."""
    run = decode(num_requests, acceptance, num_steps=int(11 / step_s(num_requests)), seed=seed)
    taken_s, start = 0.0, 0
    while taken_s < START_S:
        taken_s += run.taken_s[start]
        start += 1
    return taken_s - sum(run.plain_s[:start]), sum(run.plain_s[start:]) / sum(run.taken_s[start:])


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("num_requests", BATCHES)
def test_it_is_within_a_hundredth_of_the_better_of_a_fixed_length_and_none(num_requests: int, acceptance: float):
    runs = [after_start(num_requests, acceptance, seed) for seed in range(2)]
    assert max(lost_s for lost_s, _ in runs) <= START_COST_S
    assert sum(speedup for _, speedup in runs) / 2 >= 0.99 * better(num_requests, acceptance)


def test_trials_without_a_limit_of_their_cost_are_noticed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(comparison, "_TRIAL_SHARE", 0.05)
    assert after_start(16, 0.0, 0)[1] < 0.99


def test_drafts_that_gain_although_no_estimate_expects_it_are_found():
    """At the assumed acceptance, drafts for 16 requests cost more than they gain."""
    _, speedup = after_start(16, 0.9, 0)
    assert speedup >= better(16, 0.9) > 1.05


@pytest.mark.parametrize(("num_requests", "accepted"), [(1, 0.7), (4, 0.7), (16, 0.9)])
@pytest.mark.parametrize("seed", range(3))
def test_a_change_of_acceptance_is_noticed(num_requests: int, accepted: float, seed: int):
    run = decode(num_requests, 0.0, accepted, 0.0, num_steps=2500, seed=seed)

    def speedup(first: int, last: int) -> float:
        return sum(run.plain_s[first:last]) / sum(run.taken_s[first:last])

    usual = speedup(4000, 5000)
    assert usual >= 0.97 * better(num_requests, accepted) > 1
    assert speedup(2500 + NOTICED_STEPS, 2500 + NOTICED_STEPS + 500) >= 1 + 0.8 * (usual - 1)
    assert speedup(5000 + STOPPED_STEPS, 7500) >= 0.985
