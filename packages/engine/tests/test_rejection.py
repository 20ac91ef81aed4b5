"""Chain rejection sampling: whatever the drafts are, the tokens follow the distribution of the target."""

# pyright: basic
# numba has no types.

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np
import pytest
from numpy.typing import NDArray

from chi_square import assert_fits, chi_square, probabilities
from pagewood.engine.api import SamplingParams
from pagewood.engine.core.messages.sampling_table import SamplingArrays, SamplingColumn
from pagewood.engine.runner.cpu.compiled.drafting.rejection import verify
from pagewood.engine.runner.cpu.compiled.drawing.choice import POSITION as POSITION_COLUMN
from pagewood.engine.runner.cpu.compiled.drawing.choice import choose, seed_of
from pagewood.engine.runner.cpu.compiled.drawing.noise import row_key, seed_in
from pagewood.engine.runner.splitmix import Domain

Float32 = NDArray[np.float32]
POSITION = 5
DRAFT = int(Domain.DRAFT)


def choice_of(params: SamplingParams, seed: int = 0) -> Float32:
    return np.append(SamplingArrays.of([params], [seed]).words[0], np.int32(POSITION)).view(np.float32)


@cache
def chains() -> Any:
    """Return a compiled function that drafts and verifies chains of two tokens, with the seeds 0, 1, 2, ..."""

    @numba.njit
    def run(target: Any, draft: Any, choice: Any, num: Any) -> Any:
        """Logits: `target` `[3, V, V]` and `draft` `[2, V, V]` at each place of the chain, by the token before."""
        whole = choice.view(np.int32)
        size = target.shape[2]
        tokens, counts = np.full((num, 3), -1, np.int32), np.empty(num, np.int64)
        scratch, drafts = np.empty((2, size), np.float32), np.empty(2, np.int32)
        p, q = np.empty((3, size), np.float32), np.empty((2, size), np.float32)
        for seed in range(num):
            whole[SamplingColumn.SEED] = seed
            before = np.int64(0)
            for place in range(3):
                p[place] = target[place, before]
                if place < 2:
                    q[place] = draft[place, before]
                    key = row_key(seed_in(seed, DRAFT), POSITION + place)
                    before = choose(q[place], choice, whole, key)
                    drafts[place] = before
            counts[seed] = verify(p, q, drafts, choice, whole, tokens[seed], scratch)
        return tokens, counts

    return run


FILTERS = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(top_k=4),
    SamplingParams(top_p=0.8),
    SamplingParams(temperature=1.5, top_k=6, top_p=0.95, min_p=0.05),
    SamplingParams(temperature=1.5, top_k=7, typical_p=0.7),
    SamplingParams(temperature=1.5, top_n_sigma=2.0),
]
NOISES = [0.5, 2.0]


@pytest.mark.parametrize(
    ("params", "noise"),
    [
        pytest.param(
            params, noise, marks=[] if noise == NOISES[index % 2] else [pytest.mark.slow], id=f"{index}-{noise}"
        )
        for index, params in enumerate(FILTERS)
        for noise in NOISES
    ],
)
def test_tokens_follow_the_target(params: SamplingParams, noise: float) -> None:
    """200,000 chains of each kind: every place of the chain, given the tokens before it."""
    num, size = 200_000, 8
    rng = np.random.default_rng(4)
    target = rng.standard_normal((3, size, size)).astype(np.float32)
    draft = (target[:2] + rng.standard_normal((2, size, size)) * noise).astype(np.float32)
    tokens, counts = chains()(target, draft, choice_of(params), num)
    p, q = (probabilities(rows[0, 0], params) for rows in (target, draft))
    assert_fits([chi_square(tokens[:, 0], p)])
    overlap = np.minimum(p, q).sum()
    assert abs((counts > 1).mean() - overlap) < 4 * np.sqrt(overlap * (1 - overlap) / num) + 1e-9
    for place in (1, 2):
        found = []
        for before in range(size):
            here = tokens[(counts > place) & (tokens[:, place - 1] == before), place]
            expected = probabilities(target[place, before], params)
            if len(here) * expected[expected > 0].min() >= 5:
                found.append(chi_square(here, expected))
        assert_fits(found)
    assert (counts == 3).sum() > num / 50
    assert set(counts.tolist()) == {1, 2, 3}


def run(target: Float32, draft: Float32, drafts: list[int], params: SamplingParams, *, seed: int = 3) -> list[int]:
    """Return the tokens of one row."""
    choice = choice_of(params, seed)
    tokens = np.full(len(target), -7, np.int32)
    scratch = np.empty((2, target.shape[1]), np.float32)
    num = verify(target, draft, np.array(drafts, np.int32), choice, choice.view(np.int32), tokens, scratch)
    assert (tokens[num:] == -7).all()
    return tokens[:num].tolist()


@cache
def compiled_plain() -> Any:
    @numba.njit
    def token(logits: Any, choice: Any, domain: Any) -> Any:
        whole = choice.view(np.int32)
        key = row_key(seed_in(seed_of(whole), domain), whole[POSITION_COLUMN])
        return choose(logits, choice, whole, key)

    return token


def plain(logits: Float32, params: SamplingParams, place: int, *, seed: int = 3, domain: Domain = Domain.TOKEN) -> int:
    """Return the token of plain decoding, or of a draft model."""
    choice = choice_of(params, seed)
    choice.view(np.int32)[POSITION_COLUMN] += place
    return compiled_plain()(logits, choice, int(domain))


def logits_of(*rows: int, size: int = 70) -> Float32:
    return np.random.default_rng(0).standard_normal((*rows, size)).astype(np.float32)


def test_greedy_accepts_while_the_draft_is_the_largest() -> None:
    greedy = SamplingParams(temperature=0.0)
    target, draft = logits_of(3), logits_of(2)
    best = target.argmax(-1).tolist()
    assert run(target, draft, best[:2], greedy) == best
    assert run(target, draft, [best[0], best[1] + 1], greedy) == best[:2]
    assert run(target, draft, [best[0] + 1, best[1]], greedy) == best[:1]


def test_without_drafts_the_token_is_that_of_plain_decoding() -> None:
    for seed in range(50):
        target = logits_of(1)
        token = plain(target[0], SamplingParams(), 0, seed=seed)
        assert run(target, logits_of(0), [], SamplingParams(), seed=seed) == [token]


def test_equal_distributions_accept_every_draft_and_end_with_the_token_of_plain_decoding() -> None:
    target = logits_of(3)
    for seed in range(200):
        drafts = [plain(target[place], SamplingParams(), place, seed=seed, domain=Domain.DRAFT) for place in range(2)]
        last = plain(target[2], SamplingParams(), 2, seed=seed)
        assert run(target, target[:2], drafts, SamplingParams(), seed=seed) == [*drafts, last]


def test_a_draft_that_the_target_excludes_is_rejected() -> None:
    target, draft = logits_of(2), logits_of(1)
    target[0, 9] = -np.inf
    draft[0, 9] = 50.0
    for seed in range(50):
        (token,) = run(target, draft, [9], SamplingParams(), seed=seed)
        assert token != 9


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_end_the_tokens(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    target = logits_of(3)
    drafts = target[:2].argmax(-1).tolist()
    for broken in range(3):
        rows = target.copy()
        rows[:2] += 200 * (np.arange(70) == np.array(drafts)[:, None])  # certain
        rows[broken, 69] = np.nan
        assert run(rows, rows[:2], drafts, params) == drafts[:broken]


@pytest.mark.parametrize("draft_token", [-1, 70, 5])
def test_a_draft_that_its_model_cannot_have_drawn_is_ignored(draft_token: int) -> None:
    target, draft = logits_of(2), logits_of(1)
    draft[0, 5] = -np.inf
    assert run(target, draft, [draft_token], SamplingParams()) == [plain(target[0], SamplingParams(), 0)]


def test_a_broken_draft_row_is_ignored() -> None:
    target, draft = logits_of(2), logits_of(1)
    draft[0, 5] = np.nan
    assert run(target, draft, [4], SamplingParams()) == [plain(target[0], SamplingParams(), 0)]
