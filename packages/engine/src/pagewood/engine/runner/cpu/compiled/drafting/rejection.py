"""Chain rejection sampling: verifies the drafts of one row so that the tokens follow the target's distribution exactly.

`program.draws.draw` must have drawn the drafts from the draft model's logits, with the seed `noise.seed_in(seed,
Domain.DRAFT)` (`splitmix.seeds_of` on the host), the parameters of the target, and the positions of the drafts. Then a
draft, the number that decides about it (`Domain.ACCEPT`) and the token that replaces it (the target's own noise) are
independent, as the proof requires. Without a draft the token is that of plain decoding.

Legend: D drafts of the row, V vocab_size.
Source: Leviathan, Kalman and Matias, Fast inference from transformers via speculative decoding, 2023; Chen et al.,
Accelerating large language model decoding with speculative sampling, 2023.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from typing import Any

import numpy as np

from pagewood.engine.core.messages.sampling_table import SamplingColumn
from pagewood.engine.runner.cpu.compiled.drawing.choice import POSITION, best_of, kept_range, seed_of
from pagewood.engine.runner.cpu.compiled.drawing.noise import exponential, row_key, seed_in, uniform
from pagewood.engine.runner.cpu.compiled.drawing.race import first_to_arrive
from pagewood.engine.runner.cpu.compiled.machine.kernel import exact
from pagewood.engine.runner.cpu.compiled.machine.numeric import exp
from pagewood.engine.runner.splitmix import Domain

_F = np.float32
_ACCEPT = int(Domain.ACCEPT)


@exact
def _weigh(logits: Any, best: Any, temperature: Any, nearest: Any, limit: Any, weights: Any) -> Any:
    """Fill `weights` `[V] float32` with the probabilities that the filters leave, up to a factor; return their sum."""
    largest, total = logits[best] / temperature, 0.0
    for i in range(logits.shape[0]):
        distance = largest - logits[i] / temperature
        weights[i] = exp(-distance) if nearest <= distance <= limit else _F(0.0)
        total += weights[i]
    return total


@exact
def _draw_residual(target: Any, target_total: Any, draft: Any, draft_total: Any, key: Any) -> Any:
    """Return a token from the distribution that is proportional to max(p - q, 0), or -1 if that is 0 everywhere.

    Args:
        target: `[V] float32`, p times `target_total`.
        target_total: sum of `target`.
        draft: `[V] float32`, q times `draft_total`.
        draft_total: sum of `draft`.
        key: of the row's noise, uint64.
    """
    winner, earliest = np.int64(-1), np.inf
    for i in range(target.shape[0]):
        residual = target[i] / target_total - draft[i] / draft_total
        if residual > 0.0:
            time = exponential(key, i) / residual
            if time < earliest:
                winner, earliest = np.int64(i), time
    return winner


@exact
def verify(target: Any, draft: Any, drafts: Any, choice: Any, exact_choice: Any, tokens: Any, scratch: Any) -> Any:
    """Write the tokens of a row, and return how many there are: the accepted drafts and one more, at most D + 1.

    A row of `target` with a logit that is not a number ends the tokens before it, so the result may be 0. If a row of
    `draft` has such a logit, or its draft has probability 0 there or is not a token, the token is drawn as without a
    draft, and it is the last.

    Args:
        target: `[D + 1, V] float32`, logits of the target at the positions of the drafts and at the next.
        draft: `[D, V] float32`, logits that the drafts were drawn from.
        drafts: `[D] int32`, see the module for how they are drawn.
        choice: `[NUM_CHOICE_COLUMNS] float32`, parameters, with the position of the first draft and the request's seed.
        exact_choice: the same memory as int32.
        tokens: `[D + 1] int32`, written.
        scratch: `[2, V] float32`, overwritten unless the temperature is 0.
    """
    temperature, start = choice[SamplingColumn.TEMPERATURE], np.int64(exact_choice[POSITION])
    seed = seed_of(exact_choice)
    for d in range(target.shape[0]):
        best = best_of(target[d])
        if best < 0:
            return d
        drafted = np.int64(drafts[d]) if d < drafts.shape[0] else np.int64(-1)
        if temperature == _F(0.0):
            tokens[d] = best
            if drafted != best:
                return d + 1
            continue
        nearest, limit = kept_range(target[d], best, choice, exact_choice)
        key = row_key(seed, start + d)
        best_draft = best_of(draft[d]) if 0 <= drafted < target.shape[1] else np.int64(-1)
        token = np.int64(-1)
        if best_draft >= 0:
            p, q = scratch[0], scratch[1]
            p_total = _weigh(target[d], best, temperature, nearest, limit, p)
            q_nearest, q_limit = kept_range(draft[d], best_draft, choice, exact_choice)
            q_total = _weigh(draft[d], best_draft, temperature, q_nearest, q_limit, q)
            if q[drafted] > _F(0.0):
                number = uniform(seed_in(seed, _ACCEPT), start + d)
                if number * (q[drafted] / q_total) < p[drafted] / p_total:
                    tokens[d] = drafted
                    continue
                token = _draw_residual(p, p_total, q, q_total, key)
        if token < 0:  # no draft; or p = q, and the draft was rejected by rounding alone
            token = first_to_arrive(target[d], best, temperature, nearest, limit, key)
        tokens[d] = token
        return d + 1
    return target.shape[0]
