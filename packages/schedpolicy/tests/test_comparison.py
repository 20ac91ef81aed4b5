"""Periods with drafts and without."""

from random import Random

import pytest

from pagewood.schedpolicy.drafting.comparison import Comparison

STEP_S = 0.01


def run(
    speedup: float, num_steps: int, *, noise: float = 0.0, seed: int = 0, wake_s: float = 0.0
) -> tuple[float, list[bool]]:
    """Return the time that plain decoding takes relative to that of the comparison, and which steps rested."""
    rng, comparison = Random(seed), Comparison()
    rested: list[bool] = []
    worth_s = taken_s = 0.0
    for _ in range(num_steps):
        is_resting = comparison.is_resting
        wakes = not is_resting and bool(rested) and rested[-1]
        took_s = STEP_S * (1 if is_resting else 1 / speedup) * max(0.2, rng.gauss(1, noise)) + wakes * wake_s
        comparison.observe(1, STEP_S, took_s, has_drafts=not is_resting)
        worth_s, taken_s = worth_s + STEP_S, taken_s + took_s
        rested.append(is_resting)
    return worth_s / taken_s, rested


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("speedup", [0.3, 0.7, 0.95, 1.0, 1.1, 1.5, 3.0])
def test_it_is_within_three_hundredths_of_the_faster_kind(speedup: float, noise: float) -> None:
    found, _ = run(speedup, 20_000, noise=noise)
    assert found >= 0.97 * max(1.0, speedup)


def test_it_begins_with_drafts_then_rests_then_knows() -> None:
    _, rested = run(0.5, 200)
    assert rested == [False] * 8 + [True] * 33 + [False] * 8 + [True] * 151
    _, rested = run(2.0, 100)
    assert rested == [False] * 20 + [True] * 11 + [False] * 69


def test_trials_cost_less_than_half_a_hundredth_of_the_time() -> None:
    found, rested = run(0.5, 40_000)
    assert found >= 0.995
    assert rested.count(False) >= 0.003 * 40_000


def test_a_machine_that_slows_down_is_no_reason_to_change() -> None:
    """Trials are compared with the periods beside them: an old yield is one of another speed."""
    comparison, rested = Comparison(), list[bool]()
    for step in range(20_000):
        is_resting = comparison.is_resting
        slowness = 2.0 if step // 1000 % 2 else 1.0
        comparison.observe(1, STEP_S, slowness * STEP_S / (1 if is_resting else 0.8), has_drafts=not is_resting)
        rested.append(is_resting)
    assert rested.count(False) <= 0.02 * 20_000


def test_drafts_are_tried_while_the_estimates_are_against_them() -> None:
    """Steps without drafts in a period that could have them are no reason to try rest."""
    comparison, tries = Comparison(), 0
    for step in range(1000):
        has_drafts = step < 50
        speedup = 3.0 if has_drafts else 1.0
        tries += comparison.observe(1, STEP_S, STEP_S / speedup, has_drafts=has_drafts and not comparison.is_resting)
        assert step < 100 or not comparison.is_resting
    assert tries > 20


def test_what_a_drafter_takes_to_wake_does_not_count_for_what_drafts_yield() -> None:
    assert run(1.3, 20_000, wake_s=0.1)[0] >= 1.2


def test_a_trial_that_is_dear_is_seldom() -> None:
    dear, _ = run(0.7, 40_000, wake_s=1.0)
    assert dear >= 0.97


def test_steps_that_were_not_measured_change_nothing() -> None:
    comparison = Comparison()
    for _ in range(1000):
        assert not comparison.observe(1, STEP_S, 0.0, has_drafts=True)
    assert not comparison.is_resting
