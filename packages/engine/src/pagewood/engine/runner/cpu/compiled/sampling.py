"""Drawing a token from a row of logits: temperature, top-k, top-p, min-p and typical-p, and a race of the tokens left.

The token is a function of (row, parameters, seed, position) only. The noise of the race is that of `splitmix`, a hash
of seed, position and token.

No row is sorted for the filters. Its probabilities are put into a histogram over the distance from the largest logit,
and only the bin that contains a filter's limit is searched exactly. Every filter keeps the tokens of one interval of
distances: from 0 to a limit, or with typical-p around the mean distance.

Legend: S rows, V vocab_size.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from typing import Any

import numpy as np

from pagewood.engine.runner.cpu.compiled.kernel import exact, inlined
from pagewood.engine.runner.cpu.compiled.noise import row_key
from pagewood.engine.runner.cpu.compiled.numeric import exp
from pagewood.engine.runner.cpu.compiled.race import first_to_arrive

_F = np.float32
_U = np.uint64  # type of indices: numba does not test an unsigned index for negative values
_NUM_MAXIMA = 64
_NUM_BINS = 1024
NUM_CHOICE_COLUMNS = 8
"""Columns of a row that says how to draw.

They are temperature (float32; 0 takes the largest logit, the first of equal ones), top_k (int32; 0 is off), top_p
(float32; 1 is off), min_p (float32; 0 is off), the token's position (int32), the lower and the upper half of the seed,
and typical_p (float32; 1 is off).
"""
_BINS_PER_UNIT = _F(32.0)  # of the logit, after temperature: the last bin holds what is 32 or more below the largest


@exact
def _bin(distance: Any) -> Any:
    return int(min(distance * _BINS_PER_UNIT, _F(_NUM_BINS - 1)))


@exact
def _gather_bin(row: Any, largest: Any, wanted: Any, limit: Any) -> Any:
    """Return the distances of `row` that fall into bin `wanted` and are at most `limit`, ascending."""
    found = np.empty(row.shape[0], np.float32)
    n = 0
    for i in range(row.shape[0]):
        distance = largest - row[i]
        if distance <= limit and _bin(distance) == wanted:
            found[n] = distance
            n += 1
    return np.sort(found[:n])


@exact
def _top_k_limit(row: Any, largest: Any, counts: Any, k: Any) -> Any:
    """Return the distance of the k-th largest number of `row`; numbers equal to it are all kept."""
    before = 0
    for b in range(_NUM_BINS):
        if before + counts[b] >= k:
            return _gather_bin(row, largest, b, _F(np.inf))[k - before - 1]
        before += counts[b]
    return _F(np.inf)


@exact
def _top_p_limit(row: Any, largest: Any, masses: Any, limit: Any, p: Any) -> Any:
    """Return the smallest distance within which the mass reaches the share `p`."""
    total = 0.0
    for b in range(_NUM_BINS):
        total += masses[b]
    before = 0.0
    for b in range(_NUM_BINS):
        if before + masses[b] >= p * total and masses[b] > 0.0:
            found = _gather_bin(row, largest, b, limit)
            for i in range(found.shape[0]):
                before += exp(-found[i])
                if before >= p * total:
                    return found[i]
            return found[found.shape[0] - 1]
        before += masses[b]
    return limit


@exact
def _limit(row: Any, largest: Any, top_k: Any, top_p: Any, min_p: Any) -> Any:
    """Return how far below the largest logit a logit may lie, after top-k, then top-p, then min-p."""
    limit = _F(np.inf)
    if 0 < top_k < row.shape[0]:
        counts = np.zeros(_NUM_BINS, np.int64)
        for i in range(row.shape[0]):
            counts[_bin(largest - row[i])] += 1
        limit = _top_k_limit(row, largest, counts, top_k)
    if top_p < _F(1.0):
        masses = np.zeros(_NUM_BINS, np.float64)
        for i in range(row.shape[0]):
            distance = largest - row[i]
            if distance <= limit:
                masses[_bin(distance)] += exp(-distance)
        limit = _top_p_limit(row, largest, masses, limit, top_p)
    if min_p > _F(0.0):
        limit = min(limit, _F(-np.log(min_p)))
    return limit


@exact
def _gather_typical(row: Any, largest: Any, limit: Any, mean: Any, wanted: Any) -> Any:
    """Return the distances up to `limit` that differ from `mean` by as much as bin `wanted` holds, ascending."""
    found = np.empty(row.shape[0], np.float32)
    n = 0
    for i in range(row.shape[0]):
        distance = largest - row[i]
        if distance <= limit and exp(-distance) > _F(0.0) and _bin(abs(distance - mean)) == wanted:
            found[n] = distance
            n += 1
    return np.sort(found[:n])


@exact
def _typical_radius(found: Any, mean: Any, mass: Any) -> Any:
    """Return how far from `mean` distances are taken, the nearest first, until they have this mass."""
    above = 0
    while above < found.shape[0] and found[above] < mean:
        above += 1
    below, radius = above - 1, 0.0
    while mass > 0.0 and (below >= 0 or above < found.shape[0]):
        if above == found.shape[0] or (below >= 0 and mean - found[below] <= found[above] - mean):
            radius, mass = mean - found[below], mass - exp(-found[below])
            below -= 1
        else:
            radius, mass = found[above] - mean, mass - exp(-found[above])
            above += 1
    return radius


@exact
def _typical_range(row: Any, largest: Any, limit: Any, p: Any) -> Any:
    """Return the least and the largest distance of the locally typical tokens among those up to `limit`.

    They are those whose surprisal is nearest to the entropy, until their mass reaches the share `p`. Surprisal is
    distance, and entropy is mean distance, plus the logarithm of the same sum; so nothing but distances is compared.

    Source: Meister, Pimentel, Wiher and Cotterell, Locally typical sampling, 2022.
    """
    total, mean = 0.0, 0.0
    for i in range(row.shape[0]):
        distance = largest - row[i]
        weight = exp(-distance) if distance <= limit else _F(0.0)
        if weight > _F(0.0):
            total += weight
            mean += np.float64(weight) * distance
    mean /= total
    masses = np.zeros(_NUM_BINS, np.float64)
    for i in range(row.shape[0]):
        distance = largest - row[i]
        weight = exp(-distance) if distance <= limit else _F(0.0)
        if weight > _F(0.0):
            masses[_bin(abs(distance - mean))] += weight
    last = _NUM_BINS - 1
    while masses[last] == 0.0:
        last -= 1
    wanted, at = p * total, 0
    while at < last and masses[at] < wanted:
        wanted -= masses[at]
        at += 1
    radius = _typical_radius(_gather_typical(row, largest, limit, mean, at), mean, wanted)
    nearest, farthest = limit, _F(0.0)
    for i in range(row.shape[0]):
        distance = largest - row[i]
        if distance <= limit and abs(distance - mean) <= radius:
            nearest, farthest = min(nearest, distance), max(farthest, distance)
    return nearest, farthest


@exact
def kept_range(logits: Any, best: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, typical_p: Any) -> Any:
    """Return how far below the largest logit, that of `best`, a logit must lie and may lie, for all filters.

    Distances are those of logits that are divided by the temperature, in float32.
    """
    largest = logits[best] / temperature
    is_typical = typical_p < _F(1.0) and abs(largest) < np.inf
    if not (0 < top_k < logits.shape[0] or top_p < _F(1.0) or is_typical):
        return _F(0.0), _F(-np.log(min_p)) if min_p > _F(0.0) else _F(np.inf)
    row = np.empty(logits.shape[0], np.float32)
    for i in range(row.shape[0]):
        row[i] = logits[i] / temperature
    limit = _limit(row, largest, top_k, top_p, min_p)
    return _typical_range(row, largest, limit, typical_p) if is_typical else (_F(0.0), limit)


@exact
def best_of(logits: Any) -> Any:
    """Return the index of the largest number, the first of equal ones, or -1 if any is not a number.

    There are many running maxima side by side, so that they are compared as vectors.
    """
    size = _U(logits.shape[0])
    whole = size - size % _U(_NUM_MAXIMA)
    maxima = np.full(_NUM_MAXIMA, -np.inf, np.float32)
    strange = np.zeros(_NUM_MAXIMA, np.int32)
    for start in range(_U(0), whole, _U(_NUM_MAXIMA)):
        for j in range(_U(_NUM_MAXIMA)):
            x = logits[start + j]
            maxima[j] = x if x > maxima[j] else maxima[j]
            strange[j] |= np.int32(x != x)
    for i in range(whole, size):
        x = logits[i]
        maxima[0] = x if x > maxima[0] else maxima[0]
        strange[0] |= np.int32(x != x)
    if strange.any():
        return -1
    largest = maxima.max()
    place = _U(0)
    while place < size and logits[place] != largest:
        place += _U(1)
    return np.int64(place) if place < size else 0  # all are minus infinity


@exact
def choose(logits: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, typical_p: Any, key: Any) -> Any:
    """Return a token of `logits` `[V]`, or -1 if one of them is not a number; `key` is that of the row's noise."""
    best = best_of(logits)
    if best < 0 or temperature == _F(0.0):
        return best
    nearest, limit = kept_range(logits, best, temperature, top_k, top_p, min_p, typical_p)
    return first_to_arrive(logits, best, temperature, nearest, limit, key)


@exact
def draw(logits: Any, choice: Any, exact_choice: Any, token: Any) -> None:
    """Draw a token.

    Args:
        logits: `[V] float32`.
        choice: `[NUM_CHOICE_COLUMNS] float32`, a row of `choices`.
        exact_choice: the same memory as int32.
        token: `[1] int32`, written; -1 if a logit is not a number.
    """
    key = row_key(seed_of(exact_choice), exact_choice[4])
    token[0] = choose(logits, choice[0], exact_choice[1], choice[2], choice[3], choice[7], key)


@exact
def seed_of(exact_choice: Any) -> Any:
    """Return the seed in a row of `choices` that is viewed as int32."""
    return np.int64(np.uint64(np.uint32(exact_choice[5])) | (np.uint64(np.uint32(exact_choice[6])) << np.uint64(32)))


@inlined
def fill_choice(choice: Any, whole: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, typical_p: Any,
                seed: Any, position: Any) -> None:  # fmt: skip
    """Write a row of `choices`.

    Args:
        choice: `[NUM_CHOICE_COLUMNS] float32`, written.
        whole: the same memory as int32.
        temperature: this and the following are the sampling parameters.
        top_k: int32.
        top_p: float32.
        min_p: float32.
        typical_p: float32.
        seed: int64.
        position: of the token that is drawn.
    """
    choice[0], choice[2], choice[3], choice[7] = temperature, top_p, min_p, typical_p
    whole[1], whole[4] = top_k, position
    whole[5], whole[6] = np.int32(np.uint32(seed & 0xFFFFFFFF)), np.int32(seed >> 32)
