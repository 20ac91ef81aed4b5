"""The noise of `splitmix` inside compiled code: the same numbers, for one row and one token at a time."""

# pyright: basic
# numba has no types.

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pagewood.engine.runner.cpu.compiled.machine.kernel import exact
from pagewood.engine.runner.splitmix import GOLDEN, Domain, mix, token_bits

_GOLDEN = np.uint64(GOLDEN)
# Not in this folder, so not in the stamp of cached code: published hashes do not change.
_mix = exact(mix)
_token_bits = exact(token_bits)
_TOKEN = int(Domain.TOKEN)


@exact
def row_key(seed: Any, position: Any) -> Any:
    """Return the key of a row's noise, uint64; see `splitmix.row_keys`."""
    return _mix(_mix(np.uint64(seed) + _GOLDEN) + np.uint64(position) * _GOLDEN)


@exact
def seed_in(seed: Any, domain: Any) -> Any:
    """Return the seed for the draws of a `Domain`; see `splitmix.seeds_of`."""
    return np.int64(seed) if domain == _TOKEN else np.int64(_mix(np.uint64(seed) ^ _mix(np.uint64(domain))))


@exact
def uniform(seed: Any, position: Any) -> Any:
    """Return a number in [0, 1) for a seed and a position; see `splitmix.uniform`."""
    return np.float64(row_key(seed, position) >> np.uint64(11)) * 2.0**-53


@exact
def exponential(key: Any, token: Any) -> Any:
    """Return the noise of a token in the row of `key`, exponential with mean 1; see `splitmix.exponentials`."""
    bits = _token_bits(np.uint32(key), np.uint32(key >> np.uint64(32)), np.uint32(token))
    return -math.log1p(-(np.float64(bits) + 0.5) * 2.0**-32)
