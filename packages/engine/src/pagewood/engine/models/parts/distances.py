"""What attention adds to a score because of the distance between two tokens, a parameter of each head and bucket.

Source: Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer, 2020; Song et
al., MPNet, 2020.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

NUM_BUCKETS = 32
"""Half of them for keys behind a token, the other half for those before it; half of these for one distance each."""
MOST_DISTANCE = 128
"""All keys that are at least as far away are in one bucket."""
NUM_DISTANCES = 2 * MOST_DISTANCE + 1


def distance_biases(table: Tensor) -> Tensor:
    """Return `[H, NUM_DISTANCES]` of `table` `[NUM_BUCKETS, H]`: what a key -128 to 128 ahead gets."""
    ahead = np.arange(-MOST_DISTANCE, MOST_DISTANCE + 1)
    half, exact = NUM_BUCKETS // 2, NUM_BUCKETS // 4
    distance = np.abs(ahead)
    share = np.log(np.maximum(distance, 1) / exact, dtype=np.float32) / np.log(MOST_DISTANCE / exact)
    far = np.minimum(exact + (share * (half - exact)).astype(np.int64), half - 1)
    buckets = np.where(distance < exact, distance, far) + half * (ahead > 0)
    return table.float()[torch.from_numpy(buckets)].T.contiguous()
