"""Drafts from many earlier texts: the most frequent continuation of the longest suffix that occurs in them.

A log holds outputs in blocks of 32 tokens, so that outputs which grow side by side each stay in one piece. Places in
it are found by the hash of the 2 or 4 tokens before them: places with the same hash form a chain, the latest first.
Nothing is ever removed from a log; its owner replaces the whole log.

Legend: R rows of the token table, W its width, S rows of a step, C capacity of a log in tokens, a power of two, B
blocks of a log (C / 32), K candidates.
Source: Oliaro et al., SuffixDecoding, arXiv 2411.04975 (frequencies, the limits of a draft); Ziv and Lempel, 1977, and
zlib's chains of hashes (the search).
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from typing import Any

import numpy as np

from pagewood.engine.runner.cpu.compiled.drafting.lookup import common_suffix, may_end
from pagewood.engine.runner.cpu.compiled.machine.kernel import inlined, kernel

BLOCK = 32
"""Tokens of a block of a log."""
ORDERS = 2
"""Chains that a place is in: by the hash of the 2 and of the 4 tokens before it."""
NUM_CANDIDATES = 16
"""Most occurrences of a suffix that vote on its continuation: the latest ones."""
_SHORTEST = 2  # suffix that counts as a match
_CHUNK = 128  # positions compared at once, as vectors
_U = np.uint64  # type of indices: numba does not test an unsigned index for negative values
_BLOCK = np.int64(BLOCK)
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2**64 divided by the golden ratio, odd


@inlined
def _hash(row: Any, end: Any, n: Any) -> Any:
    """Return 32 bits of a hash of the `n` tokens before `end`."""
    bits = np.uint64(n)
    for i in range(n):
        bits = (bits ^ np.uint64(np.uint32(row[_U(end - 1 - i)]))) * _MULTIPLIER
        bits ^= bits >> np.uint64(29)
    return np.int64(bits >> np.uint64(32))


@inlined
def _after(place: Any, links: Any) -> Any:
    """Return the place after `place` in its output, or -1 if its block has no successor yet."""
    if place % _BLOCK < _BLOCK - 1:
        return place + 1
    return np.int64(links[_U(place // _BLOCK), 1]) * _BLOCK if links[_U(place // _BLOCK), 1] > 0 else np.int64(-1)


@inlined
def _before(place: Any, links: Any) -> Any:
    """Return the place before `place` in its output, or -1 at its start."""
    if place % _BLOCK > 0:
        return place - 1
    block = np.int64(links[_U(place // _BLOCK), 0])
    return block * _BLOCK + _BLOCK - 1 if block > 0 else np.int64(-1)


@inlined
def _put(token: Any, last: Any, log: Any, links: Any, used: Any) -> Any:
    """Append a token to the output whose last place is `last` (-1: a new one); return its place, or -1 if it is full.

    Block 0 is never used, so that 0 can mean no block and no place. A log holds tokens plus 1, and 0 where it is empty.
    """
    place = last + 1
    if last < 0 or place % _BLOCK == 0:
        block = np.int64(used[0])
        if block == links.shape[0]:
            return np.int64(-1)
        used[0] = block + 1
        links[block, 0], links[block, 1] = 0, 0
        if last >= 0:
            links[block, 0] = last // _BLOCK
            links[last // _BLOCK, 1] = block
        place = block * _BLOCK
    log[_U(place)] = token + 1
    return place


@inlined
def _enter(row: Any, end: Any, place: Any, chains: Any) -> None:
    """Put `place`, which holds `row[end - 1]`, into its chains."""
    mask = np.int64(chains.shape[2] - 1)
    for order in range(ORDERS):
        n = np.int64(_SHORTEST) << order
        if end >= n:
            slot = _U(_hash(row, end, n) & mask)
            chains[1, order, _U(place)] = chains[0, order, slot]
            chains[0, order, slot] = place


@kernel("b1(i4[:,::1], i4[::1], i4[::1], i4[::1], i4[:,::1], i8, i8, i4[::1], i4[:,:,::1], i4[:,::1], i4[::1])")
def append(
    tokens: Any,
    rows: Any,
    ends: Any,
    which: Any,
    states: Any,
    serial: Any,
    depth: Any,
    log: Any,
    chains: Any,
    links: Any,
    used: Any,
) -> Any:
    """Append the new tokens of rows to a log; return whether there was room for all.

    An output that the log does not know yet begins with up to `depth` tokens that precede it, which it continues.

    Args:
        tokens: `[R, W] int32`, the token table.
        rows: `[S] int32`, rows of the step.
        ends: `[S] int32`, number of known tokens of each.
        which: `[N] int32`, which of the S rows belong to this log.
        states: `[R, 3] int32`, written: tokens of the row that are logged; the place of the last; its log's number.
        serial: number of this log, not 0.
        depth: longest suffix that is compared.
        log: `[C] int32`, written: the tokens plus 1; 0 is empty.
        chains: `[2, ORDERS, C] int32`, written: heads of the chains by hash, and by place the next place; 0 is the end.
        links: `[B, 2] int32`, written: previous and next block of each block's output; 0 is none.
        used: `[1] int32`, written: number of blocks in use, of which block 0 holds nothing.
    """
    for i in range(which.shape[0]):
        row_number, end = rows[which[i]], np.int64(ends[which[i]])
        row, state = tokens[row_number], states[row_number]
        position = np.int64(state[0])
        if position >= end:
            continue
        if state[2] != serial:
            last = np.int64(-1)
            first = max(position - depth, 0)
            if links.shape[0] - used[0] < (position - first) // _BLOCK + 2:
                return False
            for j in range(first, position):
                last = _put(row[j], last, log, links, used)
            if position > first:
                _enter(row, position, last, chains)
            state[1], state[2] = last, serial
        last = np.int64(state[1])
        while position < end:
            place = _put(row[position], last, log, links, used)
            if place < 0:
                break
            last = place
            position += 1
            _enter(row, position, last, chains)
        state[0], state[1] = position, last
        if position < end:
            return False
    return True


@inlined
def _search_row(row: Any, end: Any, depth: Any, limit: Any, pool: Any, best: Any, number: Any) -> Any:
    """Add to the pool what followed the longest matches of the suffix of `row[:end]` in the row, the latest first.

    Returns:
        The length of the matches in the pool, and their number.
    """
    high = np.int64(end)
    while high > _SHORTEST:
        low = max(high - _CHUNK, _SHORTEST)
        if may_end(row, low, high, end, _SHORTEST):
            for place in range(high - 1, low - 1, -1):
                # once the pool is full, only a longer match is of use
                sure = best - 1 if number < NUM_CANDIDATES else best
                if place <= sure or row[_U(place - 1 - sure)] != row[_U(end - 1 - sure)]:
                    continue
                n = common_suffix(row, place, end, depth)
                if n < best or (n == best and number == NUM_CANDIDATES):
                    continue
                if n > best:
                    best, number = n, np.int64(0)
                for j in range(limit):  # a match that overlaps the suffix goes on periodically
                    pool[number, j] = row[_U(place + j)] if place + j < end else pool[number, _U(j - (end - place))]
                number += 1
                if best == depth and number == NUM_CANDIDATES:
                    return best, number
        high = low
    return best, number


@inlined
def _search_log(
    row: Any,
    end: Any,
    depth: Any,
    limit: Any,
    log: Any,
    chains: Any,
    links: Any,
    pool: Any,
    best: Any,
    number: Any,
    steps: Any,
) -> Any:
    """Like `_search_row`, in a log, after the matches that are in the pool already."""
    mask = np.int64(chains.shape[2] - 1)
    for order in range(ORDERS - 1, -1, -1):
        n = np.int64(_SHORTEST) << order
        if order < ORDERS - 1 and best >= 2 * n:
            break  # the longer hash has found all matches that are long enough
        if n > min(end, depth):
            continue
        place = np.int64(chains[0, order, _U(_hash(row, end, n) & mask)])
        for _ in range(steps):
            if place == 0:
                break
            match, at = np.int64(0), place
            while match < min(depth, end) and at >= 0 and log[_U(at)] == row[_U(end - 1 - match)] + 1:
                match += 1
                at = _before(at, links)
            at = _after(place, links)
            follows = at >= 0 and log[_U(at)] > 0
            if follows and match >= n and match >= best and not (match == best and number == NUM_CANDIDATES):
                if match > best:
                    best, number = match, np.int64(0)
                for j in range(limit):
                    token = np.int32(-1)
                    if at >= 0:
                        token = log[_U(at)] - np.int32(1)
                        at = _after(at, links) if token >= 0 else np.int64(-1)
                    pool[number, j] = token
                number += 1
            place = np.int64(chains[1, order, _U(place)])
    return best, number


@inlined
def _vote(pool: Any, number: Any, limit: Any, min_share: Any, row: Any, end: Any) -> Any:
    """Write the most frequent path of `number` continuations after `end`; return its length, at most `limit`.

    Of tokens that are equally frequent, the one of the first continuation wins. `pool` is changed.
    """
    alive = number
    for j in range(limit):
        token, votes = np.int32(-1), np.int64(0)
        for a in range(alive):
            if pool[a, j] < 0 or pool[a, j] == token:
                continue
            same = np.int64(0)
            for b in range(a, alive):
                same += pool[b, j] == pool[a, j]
            if same > votes:
                token, votes = pool[a, j], same
            if 2 * votes >= alive:
                break
        if votes == 0 or votes < min_share * number:
            return j
        row[_U(end + j)] = token
        kept = np.int64(0)
        for a in range(alive):
            if pool[a, j] == token:
                if kept < a:
                    for t in range(j, limit):
                        pool[kept, t] = pool[a, t]
                kept += 1
        alive = kept
    return limit


@kernel(
    "void(i4[:,::1], i4[::1], i4[::1], i4[::1], i4[::1], i8, f8, f8, i8,"
    "i4[::1], i4[:,:,::1], i4[:,::1], i4[::1], i4[:,:,::1], i4[:,::1], i4[:,::1], i4[::1])"
)
def draft(
    tokens: Any,
    rows: Any,
    ends: Any,
    most: Any,
    which: Any,
    depth: Any,
    factor: Any,
    min_share: Any,
    steps: Any,
    log: Any,
    chains: Any,
    links: Any,
    older_log: Any,
    older_chains: Any,
    older_links: Any,
    pool: Any,
    counts: Any,
) -> None:
    """Write, after the known tokens of rows, the most frequent continuation of their longest suffix.

    Occurrences are looked for in the row itself, then in the log, then in the older log. The longest match wins; all
    occurrences of that length vote, at most NUM_CANDIDATES, the first found.

    Args:
        tokens: `[R, W] int32`, the token table; written: drafts, at `[row, end : end + count]`.
        rows: `[S] int32`, rows of the step.
        ends: `[S] int32`, number of known tokens of each, at most W.
        most: `[S] int32`, most draft tokens of each.
        which: `[N] int32`, which of the S rows belong to these logs.
        depth: longest suffix that is compared.
        factor: a draft has at most this many tokens per token of its match.
        min_share: a draft ends before the share of the occurrences that agree with all of it falls below this.
        steps: places of one chain that are looked at, those of other suffixes included.
        log: of `append`, and the next two.
        chains: see log.
        links: see log.
        older_log: the log that was replaced last, and the next two.
        older_chains: see older_log.
        older_links: see older_log.
        pool: `[K, N] int32`, scratch; N is the longest draft.
        counts: `[S] int32`, written at `which`: draft tokens of each.
    """
    width = np.int64(tokens.shape[1])
    for i in range(which.shape[0]):
        at = which[i]
        row, end = tokens[rows[at]], np.int64(ends[at])
        limit = min(np.int64(most[at]), width - end, np.int64(pool.shape[1]))
        counts[at] = 0
        if limit <= 0:
            continue
        best, number = np.int64(_SHORTEST), np.int64(0)
        best, number = _search_row(row, end, depth, limit, pool, best, number)
        best, number = _search_log(row, end, depth, limit, log, chains, links, pool, best, number, steps)
        best, number = _search_log(
            row, end, depth, limit, older_log, older_chains, older_links, pool, best, number, steps
        )
        if number > 0:
            counts[at] = _vote(pool, number, min(limit, np.int64(factor * best + 1e-6)), min_share, row, end)
