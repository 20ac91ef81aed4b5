"""Hashes from which tokens are drawn: the same noise for a seed, a position and a token on every device.

A token is drawn by an exponential race: token i arrives at time E_i / p_i, where E_i is exponential noise, and the
first to arrive is drawn. It is token i with probability p_i. This is the Gumbel-max trick, in a form with one logarithm
less. Noise belongs to tokens, so two distributions that are close mostly draw the same token: a draft model that draws
with the noise of its target agrees with the target almost as often as their distributions overlap.

The hash of a token has 32 bits, so that a processor hashes many tokens at once. A token of probability below 1e-10 is
drawn less often than it should be, and one below 1e-11 never.

Legend: S rows.
Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014 (`mix`); Maddison, Tarlow and
Minka, A* sampling, 2014 (the race); Daliri, Musco and Suresh, Coupling without communication and drafter-invariant
speculative decoding, 2024 (the agreement of two distributions that share the noise).
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

GOLDEN = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio, odd."""
TOKEN_FACTORS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)
"""Odd factors of `token_bits`."""
_GOLDEN = np.uint64(GOLDEN)
_F0, _F1, _F2 = (np.uint32(factor) for factor in TOKEN_FACTORS)


class Domain(IntEnum):
    """What a random number decides; numbers of different domains are independent."""

    TOKEN = 0
    """The token of the target model. Its seed is the request's."""
    DRAFT = 1
    """The token of a draft model, if drafts are verified by rejection sampling."""
    ACCEPT = 2
    """Whether rejection sampling accepts a draft."""


def mix(bits: Any) -> Any:
    """Return the hashes of an array of uint64; numba compiles the same function for single words."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def seeds_of(seeds: NDArray[np.int64], domain: Domain) -> NDArray[np.int64]:
    """Return `[S]` seeds for draws of a domain, from the seeds of the requests `[S]`."""
    if domain == Domain.TOKEN:
        return seeds
    return mix(seeds.view(np.uint64) ^ mix(np.full_like(seeds, domain).view(np.uint64))).view(np.int64)


def row_keys(seeds: NDArray[np.int64], positions: NDArray[np.int32]) -> NDArray[np.uint64]:
    """Return `[S]` hashes of `seeds` `[S]` and `positions` `[S]`, one for each row of logits."""
    return mix(mix(seeds.view(np.uint64) + _GOLDEN) + positions.astype(np.uint64) * _GOLDEN)


def uniform(seeds: NDArray[np.int64], positions: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return `[S]` numbers in [0, 1): 53 bits of `row_keys`, for a decision that is made once for a row."""
    return (row_keys(seeds, positions) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def token_bits(low: Any, high: Any, tokens: Any) -> Any:
    """Return 32 bits of noise for each token, different for different tokens of a row.

    Args:
        low: lower half of the row's key, uint32.
        high: upper half of the row's key, uint32.
        tokens: token ids, uint32; the three are broadcast. numba compiles the same function for single words.
    """
    # numba widens a product to 64 bits, so each result is cut back.
    bits = np.uint32(np.uint32(tokens * _F0) + low)
    bits = np.uint32((bits ^ (bits >> np.uint32(16))) * _F1)
    bits = np.uint32((bits ^ (bits >> np.uint32(13))) + high)
    bits = np.uint32((bits ^ (bits >> np.uint32(16))) * _F2)
    return np.uint32(bits ^ (bits >> np.uint32(15)))


def exponentials(keys: NDArray[np.uint64], tokens: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Return the noise E of the race, exponential with mean 1, for `keys` and `tokens`, which are broadcast."""
    low, high = keys.astype(np.uint32), (keys >> np.uint64(32)).astype(np.uint32)
    return -np.log1p(-(token_bits(low, high, tokens).astype(np.float64) + 0.5) * 2.0**-32)
