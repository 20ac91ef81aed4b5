"""Drafts that a row's own text suggests: what followed when its last tokens occurred before.

Legend: R rows of the token table, W its width, S rows to draft for.
Source: Saxena, Prompt Lookup Decoding, 2023; the names min_n and max_n are vLLM's.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from typing import Any

import numpy as np

from pagewood.engine.runner.cpu.compiled.machine.kernel import inlined, kernel

MIN_N = 2
"""Shortest n-gram that is looked up by default: what follows a single token is mostly wrong."""
MAX_N = 24
"""Longest n-gram that is looked up by default: of the places that match, it selects the right one in copied text."""
_U = np.uint64  # type of indices: numba does not test an unsigned index for negative values
_CHUNK = 128  # positions compared at once, as vectors, before any is looked at alone


@inlined
def may_end(row: Any, low: Any, high: Any, end: Any, n: Any) -> Any:
    """Return whether an n-gram with the first and last token of `row[end - n : end]` ends in [low, high)."""
    first, last = row[_U(end - n)], row[_U(end - 1)]
    found = np.int32(0)
    for place in range(_U(low), _U(high)):
        found |= np.int32(row[place - _U(1)] == last) & np.int32(row[place - _U(n)] == first)
    return found != 0


@inlined
def common_suffix(row: Any, place: Any, end: Any, most: Any) -> Any:
    """Return how many tokens before `place` equal those before `end`, up to `most`."""
    n = np.int64(0)
    most = min(most, place)
    while n < most and row[_U(place - 1 - n)] == row[_U(end - 1 - n)]:
        n += 1
    return n


@inlined
def _latest(row: Any, end: Any, min_n: Any, max_n: Any) -> Any:
    """Return where the longest earlier match of the suffix of `row[:end]` ends, the latest of equal ones, or 0."""
    longest, found = min_n - 1, np.int64(0)
    high = np.int64(end)
    while high > min_n:
        low = max(high - _CHUNK, min_n)
        if may_end(row, low, high, end, min_n):
            for place in range(high - 1, low - 1, -1):
                # a longer match has this token too; most places are dropped here
                if place > longest and row[_U(place - 1 - longest)] == row[_U(end - 1 - longest)]:
                    n = common_suffix(row, place, end, max_n)
                    if n > longest:
                        longest, found = n, np.int64(place)
                        if n == max_n:
                            return found
        high = low
    return found


@kernel("void(i4[:,::1], i4[::1], i4[::1], i4[::1], i8, i8, i4[::1])")
def draft_ngrams(tokens: Any, rows: Any, ends: Any, most: Any, min_n: Any, max_n: Any, counts: Any) -> None:
    """Write, after the known tokens of rows, what followed the latest earlier occurrence of their longest suffix.

    An occurrence may overlap the suffix. A draft that is longer than what followed it goes on periodically, as a copy
    does in LZ77, so a repetition is drafted at any length. It never leaves the row.

    Args:
        tokens: `[R, W] int32`, the token table; written: drafts, at `[row, end : end + count]`.
        rows: `[S] int32`, rows to draft for.
        ends: `[S] int32`, number of known tokens of each, at most W.
        most: `[S] int32`, most draft tokens of each; 0 drafts nothing.
        min_n: shortest suffix that counts as a match, at least 1.
        max_n: longest suffix that is compared, at least min_n.
        counts: `[S] int32`, written: draft tokens of each, 0 where no suffix occurs before.
    """
    width = np.int64(tokens.shape[1])
    for i in range(rows.shape[0]):
        row, end = tokens[rows[i]], np.int64(ends[i])
        limit = min(np.int64(most[i]), width - end)
        place = _latest(row, end, min_n, max_n) if limit > 0 else np.int64(0)
        counts[i] = limit if place > 0 else 0
        for j in range(counts[i]):
            row[_U(end + j)] = row[_U(place + j)]
