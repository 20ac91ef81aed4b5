"""Reads what the program has reported of tokens.

Legend: V vocab_size, W wanted tokens, S sampled grants, N tokens that they yield.
"""

# pyright: basic
# numba's kernels have no types.

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.api import MAX_LOGPROBS
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.logprobs import Logprobs
from pagewood.engine.runner.cpu.compiled.drawing.report import RANGE_COLUMN
from pagewood.engine.runner.cpu.program.passes import Grants, RowTables

Float32 = NDArray[np.float32]


def of_drawn(
    reports: Float32, logits: Float32, tokens: Int32, counts: Int32, grants: Grants, rows: RowTables
) -> Logprobs | None:
    """Return what was reported of the tokens that the sampled grants yield; None: nothing was.

    Args:
        reports: `[>= W, NUM_REPORT_COLUMNS]`, by wanted token.
        logits: `[>= W, V]`, from which they were drawn.
        tokens: `[N]`, the tokens.
        counts: `[S]`, how many each grant yields.
        grants: of the step.
        rows: of the runner.
    """
    is_reported = rows.is_reported(grants.rows[grants.sampled])
    if not is_reported.any():
        return None
    nums = grants.granted.num_wanted
    firsts = np.repeat(np.cumsum(nums) - nums, counts)
    ends = np.cumsum(counts)
    places = firsts + np.arange(len(tokens)) - np.repeat(ends - counts, counts)
    found = _read(reports[places], tokens, np.repeat(is_reported, counts))
    has_kept = rows.has_kept(grants.rows[grants.sampled])
    if not has_kept.any():
        return found
    kept = [
        _kept(logits[place], temperature, reports[place, RANGE_COLUMN:], token) if is_wanted else None
        for is_wanted, place, temperature, token in zip(
            np.repeat(has_kept, counts), places, np.repeat(grants.sampling.temperatures, counts), tokens, strict=True
        )
    ]
    return replace(
        found,
        num_kept=np.array([-1 if ids is None else len(ids) for ids in kept], np.int32),
        kept=np.concatenate([np.empty(0, np.int32), *[ids for ids in kept if ids is not None]]),
    )


def _kept(logits: Float32, temperature: np.float32, bounds: Float32, token: np.int32) -> Int32:
    """Return the tokens from which one was drawn, ascending.

    Args:
        logits: `[V]`.
        temperature: 0: greedy.
        bounds: `[2]`, the result of `kept_range`.
        token: that was drawn.
    """
    if temperature == 0.0:
        return np.array([token], np.int32)
    distances = logits.max() / temperature - logits / temperature  # rounded as in the kernel
    is_kept = (bounds[0] <= distances) & (distances <= bounds[1]) & (logits > -np.inf)
    return np.flatnonzero(is_kept).astype(np.int32)


def of_prompts(reports: Float32, grants: Grants, rows: RowTables) -> Logprobs | None:
    """Return what was reported of prompt tokens, one grant after the other; None: nothing was."""
    if not len(grants.scored):
        return None
    starts = grants.starts[grants.scored[:, 0]]
    tokens = [
        rows.tokens[grants.rows[grant], start + 1 : start + 1 + num]
        for (grant, num, _), start in zip(grants.scored.tolist(), starts.tolist(), strict=True)
    ]
    first, flat = int(grants.granted.num_wanted.sum()), np.concatenate(tokens)
    return _read(reports[first : first + len(flat)], flat, np.ones(len(flat), np.bool_))


def _read(reports: Float32, tokens: Int32, is_reported: NDArray[np.bool_]) -> Logprobs:
    whole = reports.view(np.int32)
    num_top = np.where(is_reported, whole[:, 2], -1)
    most = max(0, int(num_top.max(initial=0)))
    values = 3 + MAX_LOGPROBS
    return Logprobs(
        tokens=tokens,
        values=reports[:, 0].copy(),
        ranks=whole[:, 1].copy(),
        num_top=num_top,
        top_ids=whole[:, 3 : 3 + most].copy(),
        top_values=reports[:, values : values + most].copy(),
    )
