"""The next token of every sampled grant."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pagewood.engine.batch import Batch

Int32 = NDArray[np.int32]


def sample(logits: Tensor, batch: Batch, positions: Int32) -> Int32:
    """Return `[S] int32`."""
    return logits.argmax(-1).numpy().astype(np.int32)
