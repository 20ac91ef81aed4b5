"""The noise of draws: the same in compiled code as with numpy and with Python's integers, and independent."""

# pyright: basic
# numba has no types.

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagewood.engine.runner.cpu.compiled.drawing import noise
from pagewood.engine.runner.splitmix import Domain, exponentials, row_keys, seeds_of, token_bits, uniform

SEEDS = st.integers(-(2**63), 2**63 - 1)
POSITIONS = st.integers(0, 2**31 - 1)
ROWS = st.lists(st.tuples(SEEDS, POSITIONS, st.integers(0, 2**31 - 1)), min_size=1, max_size=20)


def plain_mix(bits: int) -> int:
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & 2**64 - 1
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & 2**64 - 1
    return bits ^ bits >> 31


def plain_key(seed: int, position: int) -> int:
    """Return the key of a row, computed with Python's integers."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15
    return plain_mix(plain_mix(seed + golden & mask) + position * golden & mask)


def plain_bits(key: int, token: int) -> int:
    """Return the noise of a token, computed with Python's integers."""
    mask = 2**32 - 1
    bits = (token * 0x9E3779B1 + key) & mask
    bits = (bits ^ bits >> 16) * 0x85EBCA6B & mask
    bits = (bits ^ bits >> 13) + (key >> 32) & mask
    bits = (bits ^ bits >> 16) * 0xC2B2AE35 & mask
    return bits ^ bits >> 15


def columns(rows: list[tuple[int, int, int]]) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.uint32]]:
    seeds, positions, tokens = zip(*rows, strict=True)
    return np.array(seeds, np.int64), np.array(positions, np.int32), np.array(tokens, np.uint32)


@given(ROWS)
def test_noise_equals_that_of_plain_integers(rows: list[tuple[int, int, int]]) -> None:
    seeds, positions, tokens = columns(rows)
    keys = row_keys(seeds, positions)
    assert keys.tolist() == [plain_key(seed, position) for seed, position, _ in rows]
    bits = token_bits(keys.astype(np.uint32), (keys >> np.uint64(32)).astype(np.uint32), tokens)
    assert bits.dtype == np.uint32
    assert bits.tolist() == [plain_bits(plain_key(seed, position), token) for seed, position, token in rows]


@settings(deadline=None)  # the first call compiles
@given(ROWS)
def test_compiled_noise_equals_numpys(rows: list[tuple[int, int, int]]) -> None:
    seeds, positions, tokens = columns(rows)
    keys = row_keys(seeds, positions)
    assert keys.tolist() == [noise.row_key(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    compiled = [noise.exponential(key, token) for key, token in zip(keys, tokens, strict=True)]
    np.testing.assert_allclose(exponentials(keys, tokens), compiled, rtol=1e-15)
    numbers = uniform(seeds, positions)
    assert numbers.tolist() == [noise.uniform(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    assert ((numbers >= 0) & (numbers < 1)).all()
    for domain in Domain:
        assert seeds_of(seeds, domain).tolist() == [noise.seed_in(seed, int(domain)) for seed in seeds]


@cache
def counter() -> Any:
    """Return a compiled function that counts pairs of the noise of two tokens by their upper 4 bits."""
    bits_of = noise._token_bits

    @numba.njit
    def pairs(keys: Any, others: Any, tokens: Any, other_tokens: Any) -> Any:
        counts = np.zeros((16, 16), np.int64)
        for i in range(keys.shape[0]):
            first = bits_of(np.uint32(keys[i]), np.uint32(keys[i] >> np.uint64(32)), tokens[i])
            second = bits_of(np.uint32(others[i]), np.uint32(others[i] >> np.uint64(32)), other_tokens[i])
            counts[first >> np.uint32(28), second >> np.uint32(28)] += 1
        return counts

    return pairs


def assert_independent(counts: NDArray[np.int64]) -> None:
    """Compare counts of pairs with a uniform distribution, by chi-square within 4 standard deviations."""
    expected = counts.sum() / counts.size
    degrees = counts.size - 1
    assert ((counts - expected) ** 2 / expected).sum() < degrees + 4 * np.sqrt(2 * degrees)


def test_neighbouring_tokens_positions_seeds_and_domains_are_independent() -> None:
    num = 1_000_000
    ones = np.ones(num, np.int64)
    positions = np.arange(num, dtype=np.int32)
    keys = row_keys(7 * ones, positions)
    token = np.full(num, 40, np.uint32)
    for distance in (1, 2, 64, 4096):
        assert_independent(counter()(keys, keys, token, token + np.uint32(distance)))
    one_row, tokens = np.full(num, keys[0]), np.arange(num, dtype=np.uint32)
    for distance in (1, 2, 64, 4096):
        assert_independent(counter()(one_row, one_row, tokens, tokens + np.uint32(distance)))
    assert_independent(counter()(one_row, np.full(num, keys[1]), tokens, tokens))
    assert_independent(counter()(keys, row_keys(7 * ones, positions + 1), token, token))
    seeds = np.arange(num)
    here = np.full(num, 3, np.int32)
    by_seed = row_keys(seeds, here)
    assert_independent(counter()(by_seed, row_keys(seeds + 1, here), token, token))
    for domain in (Domain.DRAFT, Domain.ACCEPT):
        assert_independent(counter()(by_seed, row_keys(seeds_of(seeds, domain), here), token, token))
    assert_independent(counter()(row_keys(seeds_of(seeds, Domain.DRAFT), here), by_seed[::-1].copy(), token, token))


def test_noise_is_exponential_down_to_rare_values() -> None:
    """The shares of noise below 1e-1 to 1e-6, in 30 million hashes."""
    noises = [exponentials(row_keys(np.array([seed]), np.array([5], np.int32)), np.arange(1_000_000, dtype=np.uint32))
              for seed in range(30)]  # fmt: skip
    for limit in (0.1, 0.01, 1e-3, 1e-4, 1e-5, 1e-6):
        expected = 30_000_000 * -np.expm1(-limit)
        assert abs(sum(int((noise < limit).sum()) for noise in noises) - expected) < 4 * np.sqrt(expected)
    assert min(noise.min() for noise in noises) > 0
    assert all(np.isfinite(noise).all() for noise in noises)
