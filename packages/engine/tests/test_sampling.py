"""Compiled sampling against a plain one that sorts, and the distributions that it draws from."""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagewood.engine.api import SamplingParams
from pagewood.engine.core.arrays import Int32
from pagewood.engine.core.sampling import SamplingArrays
from pagewood.engine.runner.cpu.compiled.kernel import Kernel
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.sampling import choices_of, draw
from stand_ins.tapes import write_down

Float32 = NDArray[np.float32]


@cache
def kernel() -> Kernel:
    return warm_up(16)


def sample(logits: Float32, sampling: SamplingArrays, positions: Int32) -> Int32:
    run = write_down(draw, logits, choices_of(sampling, positions), kernel=kernel(), num_threads=2)
    return run().view(np.int32)[:, 0].copy()


def arrays_of(num: int, params: SamplingParams | None = None, *, seeds: list[int] | None = None) -> SamplingArrays:
    """Return the same sampling parameters for `num` rows."""
    return SamplingArrays.of([params or SamplingParams()] * num, range(num) if seeds is None else seeds)


def positions_of(num: int, position: int = 3) -> Int32:
    return np.full(num, position, np.int32)


def plain_number(seed: int, position: int) -> float:
    """Return the random number, computed with Python's integers."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(bits: int) -> int:
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & mask
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & mask
        return bits ^ bits >> 31

    return (mix(mix(seed + golden & mask) + position * golden & mask) >> 11) * 2.0**-53


def plain_probabilities(logits: Float32, sampling: SamplingParams) -> NDArray[np.float64]:
    """Return the filtered distribution, by sorting. Numbers equal to the last that a filter keeps are kept too."""
    scaled = (logits / np.float32(sampling.temperature)).astype(np.float64)
    weights = np.exp(scaled - scaled.max())
    if 0 < sampling.top_k < len(weights):
        weights[weights < np.sort(weights)[-sampling.top_k]] = 0
    if sampling.top_p < 1:
        descending = np.sort(weights)[::-1]
        kept = int(np.argmax(np.cumsum(descending) >= np.float32(sampling.top_p) * descending.sum()))
        weights[weights < descending[kept]] = 0
    weights[weights < np.float32(sampling.min_p)] = 0
    return weights / weights.sum()


def plain_draw(probabilities: NDArray[np.float64], number: float) -> tuple[int, float]:
    """Return the token, and how far the random number is from where the token would change."""
    ends = np.cumsum(probabilities)
    token = int(np.searchsorted(ends, number, side="right"))
    return token, float(np.abs(ends - number).min())


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([1, 2, 5, 300, 5000]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 6.0, 40.0]),
    temperature=st.sampled_from([0.05, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 3, 50, 10_000]),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
)
def test_tokens_equal_those_of_the_plain_sampler(
    seed: int, size: int, spread: float, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((4, size)) * spread).astype(np.float32)
    seeds = [int(s) for s in rng.integers(-(2**63), 2**63 - 1, 4)]
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    tokens = sample(logits, arrays_of(4, sampling, seeds=seeds), positions_of(4, 17))
    for row in range(4):
        token, margin = plain_draw(plain_probabilities(logits[row], sampling), plain_number(seeds[row], 17))
        # Rounding may move a limit by one token; the difference is then the probability of a token in the tail.
        assert tokens[row] == token or margin < 1e-3


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=1.5, top_k=9, top_p=0.9, min_p=0.05),
    ],
)
def test_frequencies_fit_the_probabilities(sampling: SamplingParams) -> None:
    """Chi-square with fixed seeds; 3.3 standard deviations above the mean have a probability of about 1 in 1000."""
    logits = np.random.default_rng(5).standard_normal(12).astype(np.float32) * 1.5
    num = 20_000
    tokens = sample(np.tile(logits, (num, 1)), arrays_of(num, sampling), positions_of(num))
    expected = plain_probabilities(logits, sampling) * num
    counts = np.bincount(tokens, minlength=12)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    degrees = kept.sum() - 1
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    assert chi_square < degrees + 3.3 * np.sqrt(2 * degrees)


def test_positions_and_seeds_are_independent() -> None:
    """Tokens at consecutive positions of one seed, and at one position of consecutive seeds, are uniform in pairs."""
    flat = np.zeros((4096, 8), np.float32)
    by_position = sample(flat, arrays_of(4096, seeds=[11] * 4096), np.arange(4096, dtype=np.int32))
    by_seed = sample(flat, arrays_of(4096), positions_of(4096))
    for tokens in (by_position, by_seed):
        pairs = np.bincount(tokens[:-1] * 8 + tokens[1:], minlength=64)
        chi_square = ((pairs - 4095 / 64) ** 2 / (4095 / 64)).sum()
        assert chi_square < 63 + 3.3 * np.sqrt(2 * 63)


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = np.random.default_rng(0).standard_normal((50, 200)).astype(np.float32)
    together = sample(logits, arrays_of(50, SamplingParams(top_p=0.9)), positions_of(50))
    alone = [
        int(sample(logits[i : i + 1], arrays_of(1, SamplingParams(top_p=0.9), seeds=[i]), positions_of(1))[0])
        for i in range(50)
    ]
    assert together.tolist() == alone
    assert len(set(alone)) > 10


def test_greedy_rows_among_random_ones() -> None:
    logits = np.zeros((3, 5), np.float32)
    logits[:, 2] = 1.0
    mixed = arrays_of(3)
    mixed.temperatures[1] = 0
    assert sample(logits, mixed, positions_of(3))[1] == 2
    assert sample(logits, arrays_of(3, SamplingParams(temperature=0.0)), positions_of(3)).tolist() == [2, 2, 2]


def test_minus_infinity_is_never_drawn() -> None:
    logits = np.full((500, 6), -np.inf, np.float32)
    logits[:, 1] = 0.0
    logits[:, 4] = 0.5
    for sampling in (SamplingParams(), SamplingParams(top_k=4), SamplingParams(top_p=0.99), SamplingParams(min_p=0.01)):
        assert set(sample(logits, arrays_of(500, sampling), positions_of(500)).tolist()) == {1, 4}


def test_a_row_with_a_nan_has_no_token() -> None:
    logits = np.zeros((3, 70), np.float32)
    logits[1, 3] = logits[2, 69] = np.nan
    for temperature in (0.0, 1.0):
        tokens = sample(logits, arrays_of(3, SamplingParams(temperature=temperature)), positions_of(3))
        assert tokens[0] >= 0
        assert tokens[1:].tolist() == [-1, -1]
