"""The hash of 64 bits that ends SplitMix64, and the numbers in [0, 1) made from it, with which tokens are drawn.

A device would hash a few numbers in some thirty kernels, and each takes as long as its launch. So the host computes the
numbers of a CUDA device, and they travel with the step.

Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 divided by the golden ratio, odd


def mix(bits: Any) -> Any:
    """Return the hashes of an array of uint64; numba compiles the same function for single words."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def uniform(seeds: NDArray[np.int64], positions: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return `[S]` numbers in [0, 1): 53 bits of a hash of `seeds` `[S]` and `positions` `[S]`.

    They are equal to those of `cpu.compiled.sampling.uniform`, which computes one number inside a kernel.
    """
    bits = mix(mix(seeds.view(np.uint64) + _GOLDEN) + positions.astype(np.uint64) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
