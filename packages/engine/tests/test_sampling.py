"""Compiled sampling against a plain one that sorts and races all tokens, and the distributions that it draws from."""

# pyright: basic
# numba and torch are typed in part only.

from __future__ import annotations

from functools import cache
from typing import Any, cast

import numba
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from chi_square import drop_atypical, is_near_the_largest
from pagewood.engine.api import SamplingParams
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.sampling_table import SamplingArrays
from pagewood.engine.runner.cpu.compiled.drawing.choice import choose, kept_range
from pagewood.engine.runner.cpu.compiled.drawing.noise import row_key
from pagewood.engine.runner.cpu.compiled.step import StepKernel
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program.draws import draw
from pagewood.engine.runner.cuda.drawing import race
from pagewood.engine.runner.cuda.drawing.sampler import Sampler
from pagewood.engine.runner.splitmix import exponentials, row_keys
from scale import scaled
from stand_ins.tapes import write_down

Float32 = NDArray[np.float32]


@cache
def kernel() -> StepKernel:
    return warm_up(16)


def choices_of(sampling: SamplingArrays, positions: Int32) -> Float32:
    """Return the parameters of each draw, `[S, NUM_CHOICE_COLUMNS]`."""
    return np.column_stack([sampling.words, positions]).view(np.float32)


def sample(logits: Float32, sampling: SamplingArrays, positions: Int32) -> Int32:
    run = write_down(draw, logits, choices_of(sampling, positions), kernel=kernel(), num_threads=2)
    return run().view(np.int32)[:, 0].copy()


def arrays_of(num: int, params: SamplingParams | None = None, *, seeds: list[int] | None = None) -> SamplingArrays:
    """Return the same sampling parameters for `num` rows."""
    return SamplingArrays.of([params or SamplingParams()] * num, range(num) if seeds is None else seeds)


def choice_of(params: SamplingParams) -> Float32:
    """Return how to draw from one row, `[NUM_CHOICE_COLUMNS]`."""
    return choices_of(arrays_of(1, params), positions_of(1))[0]


def positions_of(num: int, position: int = 3) -> Int32:
    return np.full(num, position, np.int32)


def plain_probabilities(
    logits: Float32, sampling: SamplingParams, *, scale: float = 1.0, rounding: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """Return the filtered distribution, by sorting. Numbers equal to the last that a filter keeps are kept too.

    Args:
        logits: `[V]`.
        sampling: temperature and filters.
        scale: factor of top_n_sigma, top_p, min_p and typical_p, to find tokens at a filter's limit.
        rounding: `[V]`, see `drop_atypical`.
    """
    scaled = (logits / np.float32(sampling.temperature)).astype(np.float64)
    weights = np.exp(scaled - scaled.max())
    if sampling.top_n_sigma > 0:
        weights[~is_near_the_largest(logits, float(np.float32(sampling.top_n_sigma)) * scale)] = 0
    if 0 < sampling.top_k < len(weights):
        weights[weights < np.sort(weights)[-sampling.top_k]] = 0
    if sampling.top_p < 1:
        descending = np.sort(weights)[::-1]
        kept = int(np.argmax(np.cumsum(descending) >= np.float32(sampling.top_p) * scale * descending.sum()))
        weights[weights < descending[kept]] = 0
    weights[weights < np.float32(sampling.min_p) * min(scale, 1.0)] = 0
    if sampling.typical_p < 1:
        drop_atypical(weights, float(np.float32(sampling.typical_p)) * scale, rounding=rounding)
    return weights / weights.sum()


def plain_draw(probabilities: NDArray[np.float64], seed: int, position: int) -> int:
    """Return the token that wins the race: the smallest noise divided by probability."""
    key = row_keys(np.array([seed], np.int64), np.array([position], np.int32))
    noise = exponentials(key, np.arange(len(probabilities), dtype=np.uint32))
    with np.errstate(divide="ignore", over="ignore"):
        return int(np.argmin(noise / probabilities))


@settings(max_examples=scaled(40), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([1, 2, 5, 63, 64, 65, 300, 5000]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 6.0, 40.0]),
    temperature=st.sampled_from([0.05, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 3, 50, 10_000]),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    typical_p=st.sampled_from([1.0, 1.0, 0.05, 0.6, 0.95]),
    top_n_sigma=st.sampled_from([0.0, 0.0, 0.01, 0.7, 1.5, 3.0]),
)
def test_tokens_equal_those_of_the_plain_sampler(
    seed: int,
    size: int,
    spread: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    typical_p: float,
    top_n_sigma: float,
) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((4, size)) * spread).astype(np.float32)
    seeds = [int(s) for s in rng.integers(-(2**63), 2**63 - 1, 4)]
    sampling = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p, top_n_sigma=top_n_sigma
    )
    tokens = sample(logits, arrays_of(4, sampling, seeds=seeds), positions_of(4, 17))
    for row in range(4):
        # Rounding may move the limit of a filter by one token, and order tokens that are almost equally typical.
        allowed = {
            plain_draw(plain_probabilities(logits[row], sampling, scale=scale, rounding=rounding), seeds[row], 17)
            for scale in (1 - 1e-5, 1, 1 + 1e-5)
            for rounding in (None, *(rng.uniform(-1e-6, 1e-6, (8 if typical_p < 1 else 0, size))))
        }
        assert tokens[row] in allowed


@cache
def compiled_range() -> Any:
    @numba.njit
    def run(logits: Any, best: Any, choice: Any) -> Any:
        return kept_range(logits, best, choice, choice.view(np.int32))

    return run


def kept_on_cuda(logits: Float32, top_p: float, p: float) -> NDArray[np.bool_]:
    """Return what a CUDA device's filters keep of a row `[V]`, on plain torch."""
    one = arrays_of(1, SamplingParams(top_p=top_p, typical_p=p))
    sampler = Sampler.of(one, torch.from_numpy(one.flat()), torch.zeros(1, dtype=torch.int32))
    weights = sampler._kept(torch.from_numpy(logits)[None].softmax(-1))
    return (sampler._typical(weights)[0] > 0).numpy()


@settings(max_examples=scaled(50), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([1, 2, 7, 63, 64, 65, 300, 9000]),
    spread=st.sampled_from([0.0, 0.001, 0.1, 1.0, 5.0, 40.0]),
    levels=st.sampled_from([0, 2, 5]),
    p=st.sampled_from([0.01, 0.2, 0.5, 0.9, 0.999]),
    top_p=st.sampled_from([1.0, 1.0, 0.7]),
)
def test_typical_tokens_are_those_of_transformers(
    seed: int, size: int, spread: float, levels: int, p: float, top_p: float
) -> None:
    """The same tokens as its warper keeps as the last filter, on both devices, also where many logits are equal."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal(size) * spread
    if levels:
        logits = np.round(logits * levels) / levels
    logits = logits.astype(np.float32)
    scores = torch.from_numpy(logits.astype(np.float64))[None]
    if top_p < 1:
        left = plain_probabilities(logits, SamplingParams(top_p=top_p))
        scores = scores.masked_fill(torch.from_numpy(left == 0)[None], -torch.inf)
    normalized = scores.log_softmax(-1)
    shifted = (-normalized - -(normalized * normalized.exp()).nansum(-1, keepdim=True)).abs()[0].numpy()
    ids = cast("torch.LongTensor", torch.tensor([[0]]))
    warpers = [transformers.TypicalLogitsWarper(mass=float(np.float32(p)) * scale) for scale in (1 - 1e-5, 1 + 1e-5)]
    least, most = (shifted[np.isfinite(warper(ids, scores)[0].numpy())].max() for warper in warpers)
    choice = choice_of(SamplingParams(top_p=top_p, typical_p=p))
    nearest, limit = compiled_range()(logits, int(logits.argmax()), choice)
    distances = logits.max() - logits
    # Rounding may move the limit by a token, and order tokens that are almost equally typical or probable.
    must, may = shifted < least - 1e-5, shifted < most + 1e-5
    if top_p < 1:
        weights = np.exp(logits.astype(np.float64))
        may |= (left == 0) & (weights > weights[left > 0].min() * (1 - 1e-6))
    for kept in ((nearest <= distances) & (distances <= limit), kept_on_cuda(logits, top_p, p)):
        assert kept.any()
        assert not (must & ~kept).any()
        assert not (kept & ~may).any()


@settings(max_examples=scaled(50), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([1, 2, 7, 63, 64, 65, 300, 9000]),
    spread=st.sampled_from([0.0, 0.001, 1.0, 40.0, 1e30]),
    levels=st.sampled_from([0, 2, 5]),
    n=st.sampled_from([1e-3, 0.5, 1.0, 2.0, 1000.0]),
    share=st.sampled_from([0.0, 0.5, 0.99]),
    temperature=st.sampled_from([0.3, 1.0, 5.0]),
)
def test_top_n_sigma_keeps_what_its_rule_says(
    seed: int, size: int, spread: float, levels: int, n: float, share: float, temperature: float
) -> None:
    """The same tokens on both devices: logits that are minus infinity, as under a grammar, do not count."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal(size)
    if levels:
        logits = np.round(logits * levels) / levels
    logits = (logits * spread + rng.choice([0.0, 100.0, -7.0])).astype(np.float32)
    is_masked = rng.random(size) < share
    is_masked[rng.integers(size)] = False
    logits[is_masked] = -np.inf
    # A limit may be moved by the rounding of a float32, also of numbers far from 0.
    finite = logits[~is_masked].astype(np.float64)
    slack = 1e-5 + 4 * float(np.spacing(np.float32(np.abs(finite).max()))) / (n * max(finite.std(), 1e-30))
    must, may = (is_near_the_largest(logits, float(np.float32(n)) * scale) for scale in (1 - slack, 1 + slack))
    params = SamplingParams(temperature=temperature, top_n_sigma=n)
    nearest, limit = compiled_range()(logits, int(logits.argmax()), choice_of(params))
    scaled = logits / np.float32(temperature)
    on_cpu = (nearest <= scaled.max() - scaled) & (scaled.max() - scaled <= limit) & ~is_masked
    one = arrays_of(1, params)
    sampler = Sampler.of(one, torch.from_numpy(one.flat()), torch.zeros(1, dtype=torch.int32))
    on_cuda = sampler._near_the_largest(torch.from_numpy(logits)[None])[0].isfinite().numpy()
    for kept in (on_cpu, on_cuda):
        assert kept[logits.argmax()]
        assert not (must & ~kept).any()
        assert not (kept & ~may).any()


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
def test_bounds_never_rule_out_the_winner(spread: float) -> None:
    """Long rows, in which almost every token is ruled out by a bound."""
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal(2000) * spread - 300).astype(np.float32)
    num = 3000
    tokens = many_draws(logits, SamplingParams(), num)
    probabilities = plain_probabilities(logits, SamplingParams())
    assert tokens.tolist() == [plain_draw(probabilities, seed, 3) for seed in range(num)]


@cache
def compiled_draws() -> Any:
    @numba.njit
    def run(logits: Any, choice: Any, num: Any) -> Any:
        tokens = np.empty(num, np.int32)
        for seed in range(num):
            tokens[seed] = choose(logits, choice, choice.view(np.int32), row_key(seed, 3))
        return tokens

    return run


def many_draws(logits: Float32, sampling: SamplingParams, num: int) -> Int32:
    """Return `num` tokens drawn from one row, with the seeds 0, 1, 2, ... at position 3."""
    return compiled_draws()(logits, choice_of(sampling), num)


def assert_fits(tokens: Int32, probabilities: NDArray[np.float64]) -> None:
    """Compare tokens with probabilities by chi-square; tokens expected less than 10 times are counted together.

    3.3 standard deviations above the mean have a probability of about 1 in 1000; the seeds are fixed.
    """
    expected = probabilities * len(tokens)
    counts = np.bincount(tokens, minlength=len(expected)).astype(np.float64)
    assert counts[probabilities == 0].sum() == 0
    rare = expected < 10
    pooled = counts[rare].sum(), expected[rare].sum()
    counts, expected = counts[~rare], expected[~rare]
    if pooled[1] >= 10:
        counts, expected = np.append(counts, pooled[0]), np.append(expected, pooled[1])
    degrees = len(expected) - 1
    assert ((counts - expected) ** 2 / expected).sum() < degrees + 3.3 * np.sqrt(2 * degrees) + 1e-9


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=1.5, top_k=9, top_p=0.9, min_p=0.05),
        SamplingParams(typical_p=0.4),
        SamplingParams(temperature=1.5, top_p=0.95, typical_p=0.8),
        SamplingParams(top_n_sigma=1.2),
        SamplingParams(temperature=2.0, top_n_sigma=2.0, top_p=0.9, min_p=0.05),
    ],
)
def test_frequencies_fit_the_probabilities(sampling: SamplingParams) -> None:
    """60,000 draws of each kind, 480,000 in all, from rows that have whole blocks of tokens and a rest."""
    for size, num in ((12, 20_000), (200, 40_000)):
        logits = np.random.default_rng(5).standard_normal(size).astype(np.float32) * 1.5
        assert_fits(many_draws(logits, sampling, num), plain_probabilities(logits, sampling))


def test_rare_tokens_are_drawn_as_often_as_they_should() -> None:
    """1,000 tokens of probability 1e-5 each, beside one that has the rest."""
    logits = np.full(1001, np.log(1e-5), np.float32)
    logits[500] = np.log(0.99)
    tokens = many_draws(logits, SamplingParams(), 500_000)
    rare = tokens[tokens != 500]
    assert abs(len(rare) - 5000) < 4 * np.sqrt(5000)
    assert_fits(np.where(rare > 500, rare - 1, rare) // 10, np.full(100, 0.01))


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
    for sampling in (
        SamplingParams(),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.99),
        SamplingParams(min_p=0.01),
        SamplingParams(typical_p=0.99),
        SamplingParams(top_n_sigma=2.5),
    ):
        assert set(sample(logits, arrays_of(500, sampling), positions_of(500)).tolist()) == {1, 4}


def test_a_row_with_a_nan_has_no_token() -> None:
    logits = np.zeros((3, 70), np.float32)
    logits[1, 3] = logits[2, 69] = np.nan
    for temperature in (0.0, 1.0):
        tokens = sample(logits, arrays_of(3, SamplingParams(temperature=temperature)), positions_of(3))
        assert tokens[0] >= 0
        assert tokens[1:].tolist() == [-1, -1]


def test_noise_is_the_same_in_torch() -> None:
    rng = np.random.default_rng(0)
    seeds = rng.integers(-(2**63), 2**63 - 1, 50)
    positions = rng.integers(0, 2**31 - 1, 50).astype(np.int32)
    keys = row_keys(seeds, positions)
    on_device = race.row_keys(torch.from_numpy(seeds), torch.from_numpy(positions))
    assert on_device.numpy().view(np.uint64).tolist() == keys.tolist()
    noise = race.exponentials(on_device, torch.arange(20_000, dtype=torch.int32))
    exact = exponentials(keys[:, None], np.arange(20_000, dtype=np.uint32)).astype(np.float32)
    np.testing.assert_allclose(noise.numpy(), exact, rtol=1e-6)


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
def test_devices_draw_the_same_tokens(spread: float) -> None:
    rng = np.random.default_rng(2)
    logits = (rng.standard_normal((500, 3000)) * spread).astype(np.float32)
    sampling = arrays_of(500, SamplingParams(temperature=1.3))
    positions = np.arange(500, dtype=np.int32)
    probabilities = torch.from_numpy(logits / np.float32(1.3)).softmax(-1)
    drawn = race.first_to_arrive(probabilities, torch.from_numpy(sampling.seeds), torch.from_numpy(positions))
    assert drawn.tolist() == sample(logits, sampling, positions).tolist()
