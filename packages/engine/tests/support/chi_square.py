"""Whether drawn tokens follow a distribution."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.api import SamplingParams


def probabilities(logits: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float64]:
    """Return the filtered distribution `[V]` of logits `[V]`, by sorting."""
    weights = np.exp((logits / np.float32(params.temperature)).astype(np.float64))
    if params.top_n_sigma:
        weights[~is_near_the_largest(logits, params.top_n_sigma)] = 0
    descending = np.sort(weights)[::-1]
    if params.top_k:
        weights[weights < descending[params.top_k - 1]] = 0
    if params.top_p < 1:
        descending = np.sort(weights)[::-1]
        weights[weights < descending[np.argmax(np.cumsum(descending) >= params.top_p * weights.sum())]] = 0
    weights[weights < params.min_p * weights.max()] = 0
    if params.typical_p < 1:
        drop_atypical(weights, params.typical_p)
    return weights / weights.sum()


def is_near_the_largest(logits: NDArray[np.float32], n: float) -> NDArray[np.bool_]:
    """Return which logits `[V]` are at least the largest less `n` standard deviations of the finite ones."""
    exact = logits.astype(np.float64)
    return exact >= exact.max() - n * exact[np.isfinite(exact)].std()


def drop_atypical(weights: NDArray[np.float64], p: float, *, rounding: NDArray[np.float64] | None = None) -> None:
    """Set `weights` `[V]` to 0 where a token is not locally typical: `transformers`' rule, with sums of float64.

    Tokens that are as typical as the last one that is needed are kept too. `rounding` `[V]` is added to how atypical
    they are.
    """
    places = np.flatnonzero(weights)
    shares = weights[places] / weights.sum()
    entropy = -(shares * np.log(shares)).sum()
    atypicality = np.abs(-np.log(shares) - entropy)
    if rounding is not None:
        atypicality += rounding[places]
    order = np.argsort(atypicality, kind="stable")
    num_needed = min(int((np.cumsum(shares[order]) < p).sum()), len(order) - 1)
    weights[places[atypicality > atypicality[order[num_needed]] + 1e-9]] = 0


def chi_square(tokens: NDArray[np.integer], expected: NDArray[np.float64]) -> tuple[float, int]:
    """Return the chi-square statistic of tokens against probabilities `[V]`, and its degrees of freedom.

    Tokens that are expected fewer than five times are counted together.
    """
    counts, numbers = np.bincount(tokens, minlength=len(expected)), len(tokens) * expected
    assert counts[expected == 0].sum() == 0
    is_rare = numbers < 5
    counts, numbers = (
        np.append(counts[~is_rare], counts[is_rare].sum()),
        np.append(numbers[~is_rare], numbers[is_rare].sum()),
    )
    counts, numbers = counts[numbers > 0], numbers[numbers > 0]
    return float(((counts - numbers) ** 2 / numbers).sum()), len(numbers) - 1


def assert_fits(found: list[tuple[float, int]]) -> None:
    """Compare the sum of independent statistics with its mean, within 4 standard deviations; the seeds are fixed.

    Source: Wilson and Hilferty, The distribution of chi-square, 1931 (its cube root is close to normal).
    """
    total, degrees = (sum(numbers) for numbers in zip(*found, strict=True))
    if degrees:
        variance = 2 / (9 * degrees)
        assert (total / degrees) ** (1 / 3) < 1 - variance + 4 * np.sqrt(variance)
