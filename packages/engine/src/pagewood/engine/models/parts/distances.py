"""What attention adds to a score because of the distance between two tokens, a parameter of each head and bucket.

Source: Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer, 2020; Song et
al., MPNet, 2020.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NUM_BUCKETS = 32
"""Half of them for keys behind a token, the other half for those before it; half of these for one distance each."""
MOST_DISTANCE = 128
"""All keys that are at least as far away are in one bucket."""
NUM_DISTANCES = 2 * MOST_DISTANCE + 1


def buckets() -> NDArray[np.int64]:
    """Return `[NUM_DISTANCES]`, the bucket of a key that is -128 to 128 positions ahead."""
    ahead = np.arange(-MOST_DISTANCE, MOST_DISTANCE + 1)
    half, exact = NUM_BUCKETS // 2, NUM_BUCKETS // 4
    distance = np.abs(ahead)
    share = np.log(np.maximum(distance, 1) / exact, dtype=np.float32) / np.log(MOST_DISTANCE / exact)
    far = np.minimum(exact + (share * (half - exact)).astype(np.int64), half - 1)
    return np.where(distance < exact, distance, far) + half * (ahead > 0)
