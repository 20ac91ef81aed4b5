"""The next token of every sampled grant."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from pagewood.engine.arrays import Int32
from pagewood.engine.batch import Batch
from pagewood.engine.runner.compiled.sampling import draw_tokens


def sample(logits: Tensor, batch: Batch, positions: Int32) -> Int32:
    """Choose a token for every sampled grant, as its temperature, filters and seed say.

    The token is a function of the row's logits, parameters, seed and position only.

    Args:
        logits: `[S, V] float32`, contiguous.
        batch: holds the parameters.
        positions: `[S] int32`, where each token will stand.

    Returns:
        `[S] int32`.

    Raises:
        ValueError: a row holds a NaN, so that there is no token to choose.
    """
    best = logits.argmax(-1)
    if logits.gather(1, best[:, None]).isnan().any():  # argmax prefers a NaN to every number
        raise ValueError("logits must be numbers, got NaN")
    if not batch.temperatures.any():
        return best.numpy().astype(np.int32)
    tokens = np.empty(len(positions), np.int32)
    draw_tokens(
        logits.numpy(),
        batch.temperatures.copy(),
        batch.top_ks.copy(),
        batch.top_ps.copy(),
        batch.min_ps.copy(),
        batch.seeds.copy(),
        positions,
        tokens,
    )
    return tokens
