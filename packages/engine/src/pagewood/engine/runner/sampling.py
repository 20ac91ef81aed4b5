"""The next token of every sampled grant."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.arrays import Int32
from pagewood.engine.batch import Batch
from pagewood.engine.runner.compiled.sampling import draw_tokens

Float32 = NDArray[np.float32]


def sample(logits: Float32, batch: Batch, positions: Int32) -> Int32:
    """Choose a token for every sampled grant, as its temperature, filters and seed say.

    The token is a function of the row's logits, parameters, seed and position only.

    Args:
        logits: `[S, V]`, contiguous.
        batch: holds the parameters.
        positions: `[S] int32`, where each token will stand.

    Returns:
        `[S] int32`.

    Raises:
        ValueError: a row holds a NaN, so that there is no token to choose.
    """
    tokens = np.empty(len(positions), np.int32)
    draw_tokens(
        logits,
        batch.temperatures.copy(),
        batch.top_ks.copy(),
        batch.top_ps.copy(),
        batch.min_ps.copy(),
        batch.seeds.copy(),
        positions,
        tokens,
    )
    if (tokens < 0).any():
        raise ValueError("logits must be numbers, got NaN")
    return tokens
