"""Drawing a token from a row of logits: temperature, the filters of `SamplingParams`, and a race of the tokens left.

The token is a function of (row, parameters, seed, position) only. The noise of the race is that of `splitmix`, a hash
of seed, position and token.

No row is sorted for the filters. Its probabilities are put into a histogram over the distance from the largest logit,
and only the bin that contains a filter's limit is searched exactly. Every filter keeps the tokens of one interval of
distances: from 0 to a limit, or with typical-p around the mean distance; the histogram is then over the differences
    from that mean.

Legend: S rows, V vocab_size.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from typing import Any

import numpy as np

from pagewood.engine.core.messages.result import EXCLUDED
from pagewood.engine.core.messages.sampling_table import NUM_SAMPLING_COLUMNS, SamplingColumn
from pagewood.engine.runner.cpu.compiled.drawing.race import first_to_arrive
from pagewood.engine.runner.cpu.compiled.machine.kernel import apart, exact, inlined
from pagewood.engine.runner.cpu.compiled.machine.numeric import exp, float_from_bits

_F = np.float32
_U = np.uint64  # type of indices: numba does not test an unsigned index for negative values
_NUM_MAXIMA = 64
_NUM_LANES = 64
_NUM_BINS = 1024
_NUM_TABLES = 4
_NUM_PARTS = 256  # of a bin
_INFINITY = 0x7F800000  # bits of a float32
NO_NUMBER = -1
"""Stands for a token where a logit is not a number."""
NO_CHANCE = EXCLUDED
"""Stands for a token where all logits are minus infinity."""
POSITION = NUM_SAMPLING_COLUMNS
"""Column of a row that says how to draw: the token's position (int32)."""
NUM_CHOICE_COLUMNS = NUM_SAMPLING_COLUMNS + 1
"""Columns of such a row: those of `SamplingColumn`, and `POSITION`. It is passed as float32, and as int32 beside it."""
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
def _deviation(logits: Any) -> Any:
    """Return the standard deviation of all logits that are finite, float64; one must be.

    There are many sums side by side, so that numbers are added as vectors.
    """
    size = _U(logits.shape[0])
    sums, counts = np.zeros(_NUM_LANES), np.zeros(_NUM_LANES)
    for start in range(_U(0), size, _U(_NUM_LANES)):
        for j in range(_U(min(size - start, _U(_NUM_LANES)))):
            x = np.float64(logits[start + j])
            sums[j] += x if abs(x) < np.inf else 0.0
            counts[j] += 1.0 if abs(x) < np.inf else 0.0
    total, count = 0.0, 0.0
    for j in range(_NUM_LANES):
        total += sums[j]
        count += counts[j]
        sums[j] = 0.0
    mean = total / count
    for start in range(_U(0), size, _U(_NUM_LANES)):
        for j in range(_U(min(size - start, _U(_NUM_LANES)))):
            x = np.float64(logits[start + j])
            sums[j] += (x - mean) * (x - mean) if abs(x) < np.inf else 0.0
    total = 0.0
    for j in range(_NUM_LANES):
        total += sums[j]
    return np.sqrt(total / count)


@exact
def _limit(row: Any, largest: Any, limit: Any, top_k: Any, top_p: Any, min_p: Any) -> Any:
    """Return how far below the largest logit a logit may lie: at most `limit`, after top-k, then top-p, then min-p."""
    if 0 < top_k < row.shape[0]:
        counts = np.zeros(_NUM_BINS, np.int64)
        for i in range(row.shape[0]):
            counts[_bin(largest - row[i])] += 1
        limit = min(limit, _top_k_limit(row, largest, counts, top_k))
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
def _gap(distance: Any, mean: Any) -> Any:
    """Return how far a distance is from the mean, in bins of `_NUM_BINS`; float64."""
    return abs(np.float64(distance) - mean) * np.float64(_BINS_PER_UNIT)


@exact
def _weigh(distances: Any, limit: Any, weights: Any) -> Any:
    """Write e to the power of minus each distance, 0 beyond `limit`; return their sum, and the mean distance by them.

    There are many sums side by side, so that numbers are added as vectors.
    """
    sums, products = np.zeros(_NUM_LANES), np.zeros(_NUM_LANES)
    for start in range(_U(0), _U(distances.shape[0]), _U(_NUM_LANES)):
        for j in range(_U(_NUM_LANES)):
            distance = distances[start + j]
            weight = exp(-distance) if distance <= limit else _F(0.0)
            weights[start + j] = weight
            sums[j] += np.float64(weight)
            products[j] += np.float64(weight) * np.float64(distance if weight > _F(0.0) else _F(0.0))
    total, product = 0.0, 0.0
    for j in range(_NUM_LANES):
        total += sums[j]
        product += products[j]
    return total, product / total


@exact
def _masses_by_gap(distances: Any, weights: Any, mean: Any) -> Any:
    """Return the sum of the weights in each bin of `_gap`.

    The bins of a block are computed as vectors. Then its weights are added to several histograms in turn, so that an
    addition seldom waits for the one before.
    """
    tables, bins = np.zeros((_NUM_TABLES, _NUM_BINS), np.float64), np.empty(_NUM_LANES, np.int32)
    for start in range(_U(0), _U(distances.shape[0]), _U(_NUM_LANES)):
        for j in range(_U(_NUM_LANES)):
            bins[j] = np.int32(min(_gap(distances[start + j], mean), np.float64(_NUM_BINS - 1)))
        for j in range(_U(_NUM_LANES)):
            tables[j % _U(_NUM_TABLES), bins[j]] += np.float64(weights[start + j])
    for table in range(1, _NUM_TABLES):
        for b in range(_NUM_BINS):
            tables[0, b] += tables[table, b]
    return tables[0]


@exact
def _gather_gap(distances: Any, weights: Any, mean: Any, wanted: Any) -> Any:
    """Return the distances in bin `wanted` of `_gap` that have a weight, in any order."""
    found, bins = np.empty(distances.shape[0] + 1, np.float32), np.empty(_NUM_LANES, np.int32)
    n = _U(0)
    for start in range(_U(0), _U(distances.shape[0]), _U(_NUM_LANES)):
        for j in range(_U(_NUM_LANES)):
            gap = np.int32(min(_gap(distances[start + j], mean), np.float64(_NUM_BINS - 1)))
            bins[j] = gap if weights[start + j] > _F(0.0) else np.int32(-1)
        for j in range(_U(_NUM_LANES)):  # without a branch: what is not wanted is overwritten
            found[n] = distances[start + j]
            n += _U(1) if bins[j] == wanted else _U(0)
    return found[:n]


@exact
def _divide(found: Any, mean: Any, wanted: Any, mass: Any) -> Any:
    """Return the distances, ascending, of the part of a bin of `_gap` in which the mass is reached, and what is left of
    it.

    The bin is divided once more, so that few numbers are sorted.
    """
    masses, parts = np.zeros(_NUM_PARTS, np.float64), np.empty(found.shape[0], np.int32)
    for i in range(found.shape[0]):
        part = (_gap(found[i], mean) - np.float64(wanted)) * np.float64(_NUM_PARTS)
        parts[i] = np.int32(min(part, np.float64(_NUM_PARTS - 1)))
        masses[parts[i]] += exp(-found[i])
    last = _NUM_PARTS - 1
    while last > 0 and masses[last] == 0.0:
        last -= 1
    at = 0
    while at < last and masses[at] < mass:
        mass -= masses[at]
        at += 1
    n = 0
    for i in range(found.shape[0]):
        if parts[i] == at:
            found[n] = found[i]
            n += 1
    return np.sort(found[:n]), mass


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
def _range_around(mean: Any, radius: Any) -> Any:
    """Return the least and the largest float32, not negative, that are at most `radius` from `mean`.

    Some distance is that near. Such numbers are ordered as the integers with their bits, among which both are searched.
    """
    nearest, above = np.int32(-1), np.int32(_INFINITY)  # the first is too far below, the second is not
    while above - nearest > 1:
        middle = nearest + (above - nearest) // 2
        if mean - np.float64(float_from_bits(np.int32(middle))) <= radius:
            above = middle
        else:
            nearest = middle
    farthest, below = np.int32(_INFINITY), above  # the first is too far above, the second is not
    while farthest - below > 1:
        middle = below + (farthest - below) // 2
        if np.float64(float_from_bits(np.int32(middle))) - mean <= radius:
            below = middle
        else:
            farthest = middle
    return float_from_bits(np.int32(above)), float_from_bits(np.int32(below))


@exact
def _typical_range(distances: Any, limit: Any, p: Any) -> Any:
    """Return a range of distances that holds the locally typical tokens, and no others of those up to `limit`.

    They are those whose surprisal is nearest to the entropy, until their mass reaches the share `p`. Surprisal is
    distance, and entropy is mean distance, plus the logarithm of the same sum; so only distances are compared.

    Source: Meister, Pimentel, Wiher and Cotterell, Locally typical sampling, 2022.
    """
    weights = np.empty_like(distances)
    total, mean = _weigh(distances, limit, weights)
    masses = _masses_by_gap(distances, weights, mean)
    last = _NUM_BINS - 1
    while masses[last] == 0.0:
        last -= 1
    wanted, at = p * total, 0
    while at < last and masses[at] < wanted:
        wanted -= masses[at]
        at += 1
    found, wanted = _divide(_gather_gap(distances, weights, mean, at), mean, at, wanted)
    nearest, farthest = _range_around(mean, _typical_radius(found, mean, wanted))
    return nearest, min(farthest, limit)


@apart
def kept_range(logits: Any, best: Any, choice: Any, exact_choice: Any) -> Any:
    """Return how far below the largest logit, that of `best`, a logit must lie and may lie, for all filters.

    Distances are those of logits that are divided by the temperature, in float32.

    Args:
        logits: `[V] float32`.
        best: index of the largest.
        choice: `[NUM_CHOICE_COLUMNS] float32`, a row of `choices` whose temperature is not 0.
        exact_choice: the same memory as int32.
    """
    temperature, top_k = choice[SamplingColumn.TEMPERATURE], exact_choice[SamplingColumn.TOP_K]
    top_p, min_p = choice[SamplingColumn.TOP_P], choice[SamplingColumn.MIN_P]
    typical_p, top_n_sigma = choice[SamplingColumn.TYPICAL_P], choice[SamplingColumn.TOP_N_SIGMA]
    largest, limit = logits[best] / temperature, _F(np.inf)
    is_typical = typical_p < _F(1.0) and abs(largest) < np.inf
    if top_n_sigma > _F(0.0) and abs(largest) < np.inf:
        limit = _F(np.float64(top_n_sigma) * _deviation(logits) / np.float64(temperature))
    if not (0 < top_k < logits.shape[0] or top_p < _F(1.0) or is_typical):
        return _F(0.0), min(limit, _F(-np.log(min_p)) if min_p > _F(0.0) else _F(np.inf))
    row = np.empty(logits.shape[0], np.float32)
    for i in range(row.shape[0]):
        row[i] = logits[i] / temperature
    limit = _limit(row, largest, limit, top_k, top_p, min_p)
    if not is_typical:
        return _F(0.0), limit
    num_whole = (row.shape[0] + _NUM_LANES - 1) // _NUM_LANES * _NUM_LANES
    distances = np.full(num_whole, np.inf, np.float32)  # what is added has no weight
    for i in range(row.shape[0]):
        distances[i] = largest - row[i]
    return _typical_range(distances, limit, typical_p)


@exact
def best_of(logits: Any) -> Any:
    """Return the index of the largest number, the first of equal ones; or `NO_NUMBER` or `NO_CHANCE`.

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
        return np.int64(NO_NUMBER)
    largest = maxima.max()
    if largest == -np.inf:
        return np.int64(NO_CHANCE)
    place = _U(0)
    while logits[place] != largest:
        place += _U(1)
    return np.int64(place)


@exact
def choose(logits: Any, choice: Any, exact_choice: Any, key: Any) -> Any:
    """Return a token of `logits` `[V]`, or `NO_NUMBER` or `NO_CHANCE`; the largest, the first of equal ones, if greedy.

    Args:
        logits: `[V] float32`.
        choice: `[NUM_CHOICE_COLUMNS] float32`, a row of `choices`.
        exact_choice: the same memory as int32.
        key: of the row's noise.
    """
    best, temperature = best_of(logits), choice[SamplingColumn.TEMPERATURE]
    if best < 0 or temperature == _F(0.0):
        return best
    nearest, limit = kept_range(logits, best, choice, exact_choice)
    return first_to_arrive(logits, best, temperature, nearest, limit, key)


@exact
def seed_of(exact_choice: Any) -> Any:
    """Return the seed in a row of `choices` that is viewed as int32."""
    low, high = np.uint32(exact_choice[SamplingColumn.SEED]), np.uint32(exact_choice[SamplingColumn.SEED_REST])
    return np.int64(np.uint64(low) | (np.uint64(high) << np.uint64(32)))


@inlined
def fill_choice(exact_choice: Any, words: Any, position: Any) -> None:
    """Write a row of `choices`.

    Args:
        exact_choice: `[NUM_CHOICE_COLUMNS] int32`, written.
        words: `[NUM_SAMPLING_COLUMNS] int32`, a row of `SamplingArrays.words`.
        position: of the token that is drawn.
    """
    for c in range(NUM_SAMPLING_COLUMNS):
        exact_choice[c] = words[c]
    exact_choice[POSITION] = position
