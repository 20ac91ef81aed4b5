"""Periods of drafting and of rest."""

from math import exp, sqrt
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewood.schedpolicy.drafting.decode_pace import DecodePace
from pagewood.schedpolicy.drafting.trial import HiddenLoss, Trial

STEP_S = 4e-4


def known_pace(*loads: int, step_s: float = STEP_S) -> DecodePace:
    pace = DecodePace()
    for load in loads:
        pace.observe(load, 64, 64 * load, 64 * step_s)
    return pace


def share_of_rest(
    gain: float, *, speedup: float = 1.0, noise: float = 0.1, seconds: float = 60.0, trial: Trial | None = None
) -> float:
    """Return the part of the time that rests, if periods of drafting are faster by `gain`."""
    trial, rng = trial or Trial(known_pace(16)), Random(3)
    trial.speedup = speedup
    resting_s = total_s = 0.0
    while total_s < seconds:
        elapsed_s = 32 * STEP_S * exp(rng.gauss(0.0, noise) - (0.0 if trial.is_resting else gain))
        resting_s += elapsed_s * trial.is_resting
        total_s += elapsed_s
        trial.observe(16, 32, 32 * 16, elapsed_s)
    return resting_s / total_s


@pytest.mark.parametrize(
    ("gain", "speedup", "least", "most"),
    [(-0.1, 1.02, 0.9, 1.0), (-0.03, 1.02, 0.75, 1.0), (0.05, 1.1, 0.0, 0.3), (0.4, 1.5, 0.0, 0.05)],
)
def test_the_faster_kind_gets_more_of_the_time(gain: float, speedup: float, least: float, most: float) -> None:
    assert least <= share_of_rest(gain, speedup=speedup) <= most


def test_where_no_gain_is_even_estimated_rests_become_longer_whatever_is_measured() -> None:
    trial = Trial(known_pace(16))
    rests: list[int] = []
    for _ in range(8):
        while not trial.is_resting:
            trial.observe(16, 512, 512 * 16, 512 * STEP_S * 0.7)  # drafting is faster by chance
        rests.append(0)
        while trial.is_resting:
            trial.observe(16, 512, 512 * 16, 512 * STEP_S)
            rests[-1] += 1
    assert rests == [2, 4, 8, 16, 16, 16, 16, 16]
    trial.speedup = 1.5
    while not trial.is_resting:  # ends what was in vain
        trial.observe(16, 512, 512 * 16, 512 * STEP_S * 0.7)
    trial.observe(16, 512, 512 * 16, 512 * STEP_S)
    assert not trial.is_resting


def test_a_few_requests_rest_for_eight_ninths_of_the_time_at_most() -> None:
    trial = Trial(known_pace(1))
    kinds: list[bool] = []
    for _ in range(40_000):
        kinds.append(trial.is_resting)
        trial.observe(1, 1, 1, STEP_S * (1.0 if trial.is_resting else 1.5))
    assert 0.85 < sum(kinds[20_000:]) / 20_000 < 0.93


def test_steps_are_short_up_to_5_ms_or_0_3_ms_a_request() -> None:
    for load, step_s, is_short in ((16, 4.9e-3, True), (16, 5.1e-3, False), (64, 19e-3, True), (64, 19.5e-3, False)):
        trial = Trial(known_pace(load, step_s=step_s))
        has_rested = False
        for _ in range(100):
            trial.observe(load, 64, 64 * load, 64 * step_s)
            has_rested |= trial.is_resting
        assert has_rested == is_short, (load, step_s)


def test_it_believes_the_measurement_and_not_the_estimate() -> None:
    assert share_of_rest(-0.1, speedup=1.1) > 0.6
    assert share_of_rest(0.3, speedup=1.3, seconds=5.0) < 0.1


def test_what_an_estimate_leaves_out_is_known_when_the_text_changes() -> None:
    trial = Trial(known_pace(16))
    assert share_of_rest(-0.03, trial=trial) > 0.7
    assert share_of_rest(0.5, speedup=1.7, trial=trial, seconds=30.0) < 0.4


def test_each_load_has_periods_of_its_own_and_a_change_must_last() -> None:
    trial = Trial(known_pace(1, 16))
    while not trial.is_resting:
        trial.observe(16, 32, 512, 32 * STEP_S)
    assert not trial.note_load(1, 15)
    assert trial.is_resting
    assert not trial.note_load(16)
    assert not trial.note_load(1, 15)
    assert trial.note_load(1)  # drafting begins
    assert not trial.is_resting
    assert not trial.note_load(1, 100)
    assert trial.note_load(16, 16)  # and the rest goes on
    assert trial.is_resting


def test_without_measured_durations_nothing_rests() -> None:
    trial = Trial(known_pace(16))
    assert not any(trial.observe(16, 32, 512, 0.0) for _ in range(1000))
    assert not trial.is_resting


def test_long_steps_of_an_unknown_pace_do_not_rest() -> None:
    trial = Trial(known_pace())
    assert not any(trial.observe(16, 32, 512, 32 * 6e-3) for _ in range(1000))
    assert not trial.is_resting


def test_long_steps_do_not_rest_nor_those_that_have_become_long() -> None:
    pace = known_pace(16)
    trial = Trial(pace)
    while not trial.is_resting:
        trial.observe(16, 32, 512, 32 * STEP_S)
    for _ in range(50):
        pace.observe(16, 1024, 1024 * 16, 1024 * 6e-3)
    assert trial.observe(16, 32, 512, 32 * 6e-3)
    assert not trial.is_resting
    assert not any(trial.observe(16, 32, 512, 32 * 6e-3) for _ in range(200))


@given(st.lists(st.tuples(st.floats(-0.5, 0.5), st.floats(0.0, 0.5)), max_size=60))
def test_the_hidden_loss_is_a_weighted_mean_with_its_error(pairs: list[tuple[float, float]]) -> None:
    loss = HiddenLoss()
    for gain, estimate in pairs:
        loss.observe(gain, estimate)
    values = [min(0.25, max(-0.25, gain - estimate)) / (1 + 10 * estimate) for gain, estimate in pairs]
    weights = [6 * 0.97 ** len(values), *[0.97 ** (len(values) - 1 - index) for index in range(len(values))]]
    mean = sum(weight * value for weight, value in zip(weights, [-0.04, *values], strict=True)) / sum(weights)
    squares = weights[0] * (0.1**2 + (mean + 0.04) ** 2)
    squares += sum(weight * (value - mean) ** 2 for weight, value in zip(weights[1:], values, strict=True))
    expected = (0.2 / 3 + mean) * sum(weights) / sqrt(squares)
    assert loss.significance(0.2) == pytest.approx(expected, rel=1e-6, abs=1e-9)
