"""The numbers by which tokens are drawn, for the runner of a CUDA device: its host makes them, and they travel along.

A device would hash a few numbers in some thirty kernels, each as long as the launch of one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.arrays import Int32

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def uniform(seeds: NDArray[np.int64], positions: Int32) -> NDArray[np.float64]:
    """Return `[S]` in [0, 1) of `seeds` `[S]` and `positions` `[S]`: as `compiled.sampling.uniform` on a CPU."""
    golden = np.uint64(_GOLDEN)
    bits = _mix(_mix(seeds.view(np.uint64) + golden) + positions.astype(np.uint64) * golden)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(bits: Any) -> Any:
    """Scramble words. Source: the finaliser of SplitMix64."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(_MIX_1)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(_MIX_2)
    return bits ^ (bits >> np.uint64(31))
