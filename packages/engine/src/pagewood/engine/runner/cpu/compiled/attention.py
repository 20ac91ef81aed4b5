"""Causal attention over pages, for any mix of grants: single tokens and chunks of prompts.

The work is cut into items: (grant, key head, a tile of query tokens). An item reads its keys and values once for all
query heads that share the key head. A tile of few query rows reads pages in place; one of many rows first copies blocks
of 64 keys, transposed, so that the inner loops run over keys. Both keep a running maximum and sum per query row, so
what a row gets depends on its own keys only.

Legend: T tokens, H query heads, G key heads, D head_dim, P page size, N items.
Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018; Dao et al., FlashAttention, 2022.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from typing import Any

import numpy as np

from pagewood.engine.runner.cpu.compiled.head import head_loops
from pagewood.engine.runner.cpu.compiled.kernel import exact, inlined, kernel
from pagewood.engine.runner.cpu.compiled.numeric import exp
from pagewood.engine.runner.cpu.compiled.tile import TALL, WIDTH, multiply_tall

_F = np.float32
_U = np.uint64  # an index that is never negative: numba then leaves out the test for one
_BLOCK = 64  # keys of a block
_LARGEST_CODE = _F(127.0)
_MANY = 16  # query rows from which on copying a block of keys pays
_LOWEST = _F(-1e30)  # below every score, and finite, so that differences of maxima are numbers


@kernel("i8(i4[::1], i4[::1], i8, i8, i4[:,::1])")
def cut(starts: Any, counts: Any, num_kv_heads: Any, tile: Any, items: Any) -> Any:
    """Cut grants into items of at most `tile` tokens, heads of one tile side by side; return how many there are.

    Args:
        starts: `[grants] int32`, first position of each.
        counts: `[grants] int32`, number of positions of each.
        num_kv_heads: G.
        tile: query tokens of an item.
        items: `[>= N, 4] int32`, written: grant, key head, first token of the grant, number of tokens.
    """
    n = 0
    for grant in range(starts.shape[0]):
        for first in range(0, counts[grant], tile):
            for head in range(num_kv_heads):
                items[n, 0], items[n, 1] = grant, head
                items[n, 2], items[n, 3] = first, min(tile, counts[grant] - first)
                n += 1
    return n


@inlined
def store(memory: Any, scales: Any, k: Any, v: Any, page_table: Any, rows: Any, starts: Any, offsets: Any,
          kv_heads: Any, page_size: Any, first: Any, last: Any) -> None:  # fmt: skip
    """Write the keys and values of tokens [first, last) of the step to their pages; `scales` is empty."""
    dim = _U(k.shape[1] // kv_heads)
    half = _U(page_size * k.shape[1])  # elements of the keys of a page
    stride = _U(page_size) * dim
    for grant in range(rows.shape[0]):
        for token in range(max(first, offsets[grant]), min(last, offsets[grant + 1])):
            position = starts[grant] + token - offsets[grant]
            page = page_table[rows[grant], position // page_size]
            base = _U(page) * _U(2) * half + _U(position % page_size) * dim
            for head in range(_U(kv_heads)):
                to = base + head * stride
                for d in range(dim):
                    memory[to + d] = k[_U(token), head * dim + d]
                    memory[to + half + d] = v[_U(token), head * dim + d]


@exact
def _store_code(memory: Any, scales: Any, to: Any, x: Any, token: Any, start: Any, dim: Any) -> None:
    """Write `dim` elements of a row of `x` as codes from `memory[to * dim]` on, and their scale to `scales[to]`."""
    largest = _F(0.0)
    for d in range(dim):
        size = abs(x[token, start + d])
        largest = size if size > largest else largest
    scale = largest / _LARGEST_CODE
    scales[to] = scale
    divisor = scale if scale > _F(0.0) else _F(1.0)
    for d in range(dim):
        code = np.rint(x[token, start + d] / divisor)
        memory[to * dim + d] = np.int8(min(max(code, -_LARGEST_CODE), _LARGEST_CODE))


@inlined
def store_codes(memory: Any, scales: Any, k: Any, v: Any, page_table: Any, rows: Any, starts: Any, offsets: Any,
                kv_heads: Any, page_size: Any, first: Any, last: Any) -> None:  # fmt: skip
    """As `store`, in int8: `memory` holds codes, `scales` what one of them stands for, one for each token and head."""
    dim = _U(k.shape[1] // kv_heads)
    half = _U(page_size * kv_heads)  # tokens and heads of the keys of a page
    for grant in range(rows.shape[0]):
        for token in range(max(first, offsets[grant]), min(last, offsets[grant + 1])):
            position = starts[grant] + token - offsets[grant]
            page = page_table[rows[grant], position // page_size]
            base = _U(page) * _U(2) * half + _U(position % page_size)
            for head in range(_U(kv_heads)):
                to = base + head * _U(page_size)
                _store_code(memory, scales, to, k, _U(token), head * dim, dim)
                _store_code(memory, scales, to + half, v, _U(token), head * dim, dim)


@inlined
def _largest(scores: Any, row: Any, lowest: Any, halves: Any) -> Any:
    """Return the largest of `lowest` and a row of 64 scores; `halves` `[32]` is scratch.

    Halving compares whole vectors, where a running maximum would compare one number after the other.
    """
    start = _U(row * _BLOCK)
    for j in range(_U(32)):
        a, b = scores[start + j], scores[start + j + _U(32)]
        halves[j] = a if a > b else b
    for j in range(_U(16)):
        halves[j] = halves[j] if halves[j] > halves[j + _U(16)] else halves[j + _U(16)]
    for j in range(_U(8)):
        halves[j] = halves[j] if halves[j] > halves[j + _U(8)] else halves[j + _U(8)]
    for j in range(_U(8)):
        lowest = halves[j] if halves[j] > lowest else lowest
    return lowest


@inlined
def _load_block(memory: Any, scales: Any, page_table: Any, row: Any, head: Any, kv_heads: Any, page_size: Any, dim: Any,
                first: Any, last: Any, keys: Any, values: Any) -> None:  # fmt: skip
    """Copy keys [first, last), transposed, to `keys` `[dim, 64]` and their values to `values` `[64, width]`.

    The other values become zeros; their keys stay what they are, for their scores will be masked.
    """
    width = _U(_wide(dim))
    half = _U(kv_heads * page_size * dim)
    key = first
    while key < last:
        offset = key % page_size
        size = min(page_size - offset, last - key)
        base = _U(page_table[row, key // page_size]) * _U(2) * half + _U((head * page_size + offset) * dim)
        to = _U(key - first)
        for j in range(_U(size)):
            for d in range(_U(dim)):
                keys[d * _U(_BLOCK) + to + j] = memory[base + j * _U(dim) + d]
            for d in range(_U(dim)):
                values[(to + j) * width + d] = memory[base + half + j * _U(dim) + d]
        key += size
    for i in range(_U(last - first) * width, _U(_BLOCK) * width):
        values[i] = _F(0.0)


@inlined
def _load_code_block(memory: Any, scales: Any, page_table: Any, row: Any, head: Any, kv_heads: Any, page_size: Any,
                     dim: Any, first: Any, last: Any, keys: Any, values: Any) -> None:  # fmt: skip
    """As `_load_block`, from codes."""
    width = _U(_wide(dim))
    half = _U(kv_heads * page_size)
    for key in range(first, last):
        at = _U(page_table[row, key // page_size]) * _U(2) * half + _U(head * page_size + key % page_size)
        k_scale, v_scale, to = scales[at], scales[at + half], _U(key - first)
        for d in range(_U(dim)):
            keys[d * _U(_BLOCK) + to] = _F(memory[at * _U(dim) + d]) * k_scale
        for d in range(_U(dim)):
            values[to * width + d] = _F(memory[(at + half) * _U(dim) + d]) * v_scale
    for i in range(_U(last - first) * width, _U(_BLOCK) * width):
        values[i] = _F(0.0)


@inlined
def _load_code_rows(memory: Any, scales: Any, page_table: Any, row: Any, head: Any, kv_heads: Any, page_size: Any,
                    dim: Any, first: Any, last: Any, keys: Any, values: Any) -> None:  # fmt: skip
    """Copy keys and values [first, last) from codes to `keys` and `values`, each `[64, dim]`."""
    half = _U(kv_heads * page_size)
    for key in range(first, last):
        at = _U(page_table[row, key // page_size]) * _U(2) * half + _U(head * page_size + key % page_size)
        k_scale, v_scale, to = scales[at], scales[at + half], _U(key - first) * _U(dim)
        for d in range(_U(dim)):
            keys[to + d] = _F(memory[at * _U(dim) + d]) * k_scale
        for d in range(_U(dim)):
            values[to + d] = _F(memory[(at + half) * _U(dim) + d]) * v_scale


@inlined
def _wide(dim: Any) -> Any:
    """Return `dim`, rounded up to whole panels."""
    return (dim + WIDTH - 1) // WIDTH * WIDTH


@inlined
def _load_queries(q: Any, queries: Any, token: Any, first_head: Any, group: Any, num_rows: Any, dim: Any,
                  scale: Any) -> None:  # fmt: skip
    """Copy query rows, scaled, to `queries`, tile by tile, each tile `[dim, TALL]`: row r is head r % group."""
    for r in range(num_rows):
        base = _U(r // TALL * TALL * dim + r % TALL)
        start = _U((first_head + r % group) * dim)
        for d in range(_U(dim)):
            queries[base + d * _U(TALL)] = q[_U(token + r // group), start + d] * scale


@inlined
def _weigh_some(scores: Any, r: Any, count: Any, maxima: Any, totals: Any, sums: Any, dim: Any) -> None:
    """Turn the first `count` numbers of row r of `scores` into weights, as `_weigh` does."""
    start = r * _U(_BLOCK)
    largest = maxima[r]
    for j in range(count):
        largest = scores[start + j] if scores[start + j] > largest else largest
    if largest > maxima[r]:
        shrink = exp(maxima[r] - largest)
        maxima[r] = largest
        totals[r] *= shrink
        for d in range(dim):
            sums[r * dim + d] *= shrink
    sum_ = _F(0.0)
    for j in range(count):
        p = exp(scores[start + j] - largest)
        scores[start + j] = p
        sum_ += p
    totals[r] += sum_


@inlined
def _weigh(scores: Any, i: Any, maxima: Any, totals: Any, sums: Any, r: Any, width: Any, halves: Any) -> None:
    """Turn row i of `scores` into weights, relative to the largest score of query row r so far; rescale its sums."""
    largest = _largest(scores, i, maxima[r], halves)
    shrink = exp(maxima[r] - largest)
    maxima[r] = largest
    total = _F(0.0)
    for j in range(_U(_BLOCK)):
        p = exp(scores[_U(i * _BLOCK) + j] - largest)
        scores[_U(i * _BLOCK) + j] = p
        total += p
    totals[r] = totals[r] * shrink + total
    if shrink != _F(1.0):
        for d in range(_U(width)):
            sums[_U(r * width) + d] *= shrink


@inlined
def _attend_many(load: Any, memory: Any, scales: Any, q: Any, out: Any, page_table: Any, row: Any, token: Any,
                 position: Any, size: Any, head: Any, group: Any, kv_heads: Any, page_size: Any, dim: Any, window: Any,
                 scale: Any) -> None:  # fmt: skip
    """Attend from `size` tokens at positions [position, position + size), all query heads of one key head."""
    num_rows, width = size * group, _wide(dim)
    padded = (num_rows + TALL - 1) // TALL * TALL
    queries = np.zeros(padded * dim, np.float32)
    sums = np.zeros(padded * width, np.float32)
    maxima = np.full(padded, _LOWEST, np.float32)
    totals = np.zeros(padded, np.float32)
    keys = np.zeros(dim * _BLOCK, np.float32)
    values = np.zeros(_BLOCK * width, np.float32)
    scores = np.empty(TALL * _BLOCK, np.float32)
    zeros = np.zeros(WIDTH, np.float32)
    halves = np.empty(_BLOCK // 2, np.float32)
    _load_queries(q, queries, token, head * group, group, num_rows, dim, scale)
    end = position + size
    for first in range(max(0, position + 1 - window) // _BLOCK * _BLOCK, end, _BLOCK):
        last = min(first + _BLOCK, end)
        load(memory, scales, page_table, row, head, kv_heads, page_size, dim, first, last, keys, values)
        for r in range(0, num_rows, TALL):
            low, high = position + r // group, position + (min(r + TALL, num_rows) - 1) // group
            if first > high or last <= low - window + 1:
                continue  # no row sees a key of this block
            for column in range(0, _BLOCK, WIDTH):
                multiply_tall(queries, r * dim, TALL, 1, keys, column, _BLOCK, dim, zeros, 0, 0, scores, column, _BLOCK)
            if last > low + 1 or last < first + _BLOCK or first <= high - window:
                for i in range(TALL):
                    own = position + min(r + i, num_rows - 1) // group
                    for j in range(_BLOCK):
                        seen = first + j <= own and first + j > own - window
                        scores[i * _BLOCK + j] = scores[i * _BLOCK + j] if seen else _F(-np.inf)
            for i in range(TALL):
                _weigh(scores, i, maxima, totals, sums, r + i, width, halves)
            for column in range(0, width, WIDTH):
                at = r * width + column
                multiply_tall(scores, 0, 1, _BLOCK, values, column, width, _BLOCK, sums, at, width, sums, at, width)
    for r in range(num_rows):
        to, start = _U(token + r // group), _U((head * group + r % group) * dim)
        for d in range(_U(dim)):
            out[to, start + d] = sums[_U(r * width) + d] / totals[r]


@inlined
def _hand_out(sums: Any, totals: Any, out: Any, token: Any, first_head: Any, group: Any, dim: Any) -> None:
    """Write the weighted means of a token's heads."""
    for r in range(_U(group)):
        share = _F(1.0) / totals[r]
        for d in range(_U(dim)):
            out[_U(token), (_U(first_head) + r) * _U(dim) + d] = sums[r * _U(dim) + d] * share


@inlined
def _first_keys(page_table: Any, rows: Any, starts: Any, items: Any, item: Any, kv_heads: Any, page_size: Any,
                dim: Any, window: Any) -> Any:  # fmt: skip
    """Return where in the memory the page begins that an item reads first; an item that is none: the last one's."""
    item = min(item, items.shape[0] - 1)
    grant, head, skipped = items[item, 0], items[item, 1], items[item, 2]
    first_page = max(0, starts[grant] + skipped + 1 - window) // page_size
    return (page_table[rows[grant], first_page] * 2 * kv_heads + head) * page_size * dim


def attend_item(dim: int, *, codes: bool) -> Any:
    """Return the function that computes one item for heads of `dim` elements: known lengths make its loops fast.

    Args:
        dim: D.
        codes: whether the memory holds int8 codes with scales, or float32 and no scales.
    """
    loops = head_loops(dim)
    score, blend, most_rows = loops.score, loops.blend, loops.most_rows

    @inlined
    def few(memory: Any, scales: Any, q: Any, out: Any, page_table: Any, row: Any, token: Any, head: Any, group: Any,
            kv_heads: Any, page_size: Any, first_key: Any, last_key: Any, scale: Any, after: Any) -> None:  # fmt: skip
        """Attend from one token, all query heads of one key head, to keys [first_key, last_key) where they lie.

        `after` is where the keys are that are read next: they are asked for, as all others are a page ahead.
        """
        half = kv_heads * page_size * dim
        head_at = head * page_size * dim
        queries = np.empty(group * dim, np.float32)
        sums = np.zeros(group * dim, np.float32)
        maxima = np.full(group, _LOWEST, np.float32)
        totals = np.zeros(group, np.float32)
        scores = np.empty(group * _BLOCK, np.float32)
        for i in range(_U(group * dim)):
            queries[i] = q[_U(token), _U(head * group * dim) + i] * scale
        first = first_key
        while first < last_key:
            last = min(first + _BLOCK, last_key)
            key = first
            while key < last:
                offset = key % page_size
                size = min(page_size - offset, last - key)
                at = page_table[row, key // page_size] * 2 * half + head_at + offset * dim
                ahead = after
                if key + size < last_key:
                    ahead = page_table[row, (key + size) // page_size] * 2 * half + head_at
                for r in range(0, group, most_rows):
                    score(min(most_rows, group - r), queries, r * dim, memory, at, at + half, ahead, size, scores,
                          r * _BLOCK + key - first, _BLOCK)  # fmt: skip
                key += size
            for r in range(_U(group)):
                _weigh_some(scores, r, _U(last - first), maxima, totals, sums, _U(dim))
            key = first
            while key < last:
                offset = key % page_size
                size = min(page_size - offset, last - key)
                at = page_table[row, key // page_size] * 2 * half + half + head_at + offset * dim
                for r in range(0, group, most_rows):
                    blend(min(most_rows, group - r), scores, r * _BLOCK + key - first, _BLOCK, memory, at, size, sums,
                          r * dim)  # fmt: skip
                key += size
            first = last
        _hand_out(sums, totals, out, token, head * group, group, dim)

    @inlined
    def few_codes(memory: Any, scales: Any, q: Any, out: Any, page_table: Any, row: Any, token: Any, head: Any,
                  group: Any, kv_heads: Any, page_size: Any, first_key: Any, last_key: Any, scale: Any,
                  after: Any) -> None:  # fmt: skip
        """As `few`, from codes, which are turned into numbers block by block."""
        queries = np.empty(group * dim, np.float32)
        sums = np.zeros(group * dim, np.float32)
        maxima = np.full(group, _LOWEST, np.float32)
        totals = np.zeros(group, np.float32)
        scores = np.empty(group * _BLOCK, np.float32)
        keys, values = np.empty(_BLOCK * dim, np.float32), np.empty(_BLOCK * dim, np.float32)
        for i in range(_U(group * dim)):
            queries[i] = q[_U(token), _U(head * group * dim) + i] * scale
        for first in range(first_key, last_key, _BLOCK):
            size = min(_BLOCK, last_key - first)
            _load_code_rows(memory, scales, page_table, row, head, kv_heads, page_size, dim, first, first + size, keys,
                            values)  # fmt: skip
            for r in range(0, group, most_rows):
                score(min(most_rows, group - r), queries, r * dim, keys, 0, 0, 0, size, scores, r * _BLOCK, _BLOCK)
            for r in range(_U(group)):
                _weigh_some(scores, r, _U(size), maxima, totals, sums, _U(dim))
            for r in range(0, group, most_rows):
                blend(min(most_rows, group - r), scores, r * _BLOCK, _BLOCK, values, 0, size, sums, r * dim)
        _hand_out(sums, totals, out, token, head * group, group, dim)

    attend_one, load = (few_codes, _load_code_block) if codes else (few, _load_block)

    @inlined
    def attend(memory: Any, scales: Any, q: Any, out: Any, page_table: Any, rows: Any, starts: Any, offsets: Any,
               items: Any, item: Any, following: Any, kv_heads: Any, page_size: Any, window: Any,
               scale: Any) -> None:  # fmt: skip
        group = q.shape[1] // (kv_heads * dim)
        grant, head, skipped, size = items[item, 0], items[item, 1], items[item, 2], items[item, 3]
        row, position, token = rows[grant], starts[grant] + skipped, offsets[grant] + skipped
        if size * group >= _MANY:
            _attend_many(load, memory, scales, q, out, page_table, row, token, position, size, head, group, kv_heads,
                         page_size, dim, window, _F(scale))  # fmt: skip
        else:
            after = _first_keys(page_table, rows, starts, items, following, kv_heads, page_size, dim, window)
            for i in range(size):
                attend_one(memory, scales, q, out, page_table, row, token + i, head, group, kv_heads, page_size,
                           max(0, position + i + 1 - window), position + i + 1, _F(scale), after)  # fmt: skip

    return attend
