"""The instructions of latent attention: latents of new tokens, absorbed queries and values, and attending to pages.

The positions of a sequence are cut into segments. A query row attends to each segment apart, and the results are merged
in ascending order. Where this cut lies depends on positions only, and so do a row's bits. In a step of few tokens the
segments of a token are items of their own, which threads share, and another instruction merges them. Otherwise one item
goes through all segments of a tile of tokens. Both compute the same bits.

In int8, the C elements of a latent have one scale and its R rotated ones another. The latents of a segment are turned
into numbers before any row attends to them.

Legend: T tokens, H heads, N and R elements of a head without and with rotation, C elements of a latent before its
rotated key, D = C + R.
Source: DeepSeek-AI, DeepSeek-V2, 2024; Dao et al., Flash-Decoding, 2023.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from pagewood.engine.runner.cpu.compiled.attention.latent_loops import AHEAD, KEYS, ROWS, latent_loops
from pagewood.engine.runner.cpu.compiled.attention.pages import begin_of, store_code
from pagewood.engine.runner.cpu.compiled.attention.softmax import BLOCK, weigher
from pagewood.engine.runner.cpu.compiled.instruction import (
    First,
    Following,
    InScope,
    Instruction,
    Last,
    NumRows,
    Part,
    Real,
    Unit,
    blocks_of_rows,
    instruction,
)
from pagewood.engine.runner.cpu.compiled.layout import Column
from pagewood.engine.runner.cpu.compiled.machine.kernel import exact, inlined, strict
from pagewood.engine.runner.cpu.compiled.machine.memory import codes, floats, integer_rows, integers, vector
from pagewood.engine.runner.cpu.compiled.machine.numeric import exp
from pagewood.engine.runner.cpu.compiled.products.matmul import BLOCK as TILES
from pagewood.engine.runner.cpu.compiled.products.tile import LOW, WIDTH, multiply_rows

_F = np.float32
_U = np.uint64  # type of indices: numba does not test an unsigned index for negative values
SEGMENT = 256
"""Positions that are attended to apart."""
MOST_PARTIALS = 256
"""Results of single segments, one for each token and segment, for which there is memory."""
_UNSEEN = _F(-np.inf)
_LOWEST = _F(-1e30)  # below every score, and finite, so that differences of maxima are numbers


@exact
def _inverse_root(total: Any, size: Any, epsilon: Any) -> Any:
    return _F(1.0) / np.sqrt(total / _F(size) + _F(epsilon))


@inlined
def _rotate(x: Any, at: Any, row: Any, cosines: Any, sines: Any, has_pairs: Any, out: Any, to: Any) -> None:
    """Write R rotated elements of a row of `x` from column `at` on to `out` from column `to` on, in two halves."""
    half = _U(cosines.shape[1])
    step, gap = (_U(2), _U(1)) if has_pairs != 0 else (_U(1), half)
    for i in range(half):
        a = x[row, at + i * step]
        b = x[row, at + i * step + gap]
        out[row, to + i] = a * cosines[row, i] - b * sines[row, i]
        out[row, to + half + i] = b * cosines[row, i] + a * sines[row, i]


@instruction(blocks_of_rows)
@inlined
def make_latents(
    x_at: Any, cosines_at: Any, sines_at: Any, weight_at: Any, out_at: Any, size: Any, rank: Any, has_pairs: Any,
    epsilon: Real, first: First, last: Last,
) -> None:  # fmt: skip
    """Write to `out` `[T, D]`, D = `size`, the norm of the first C = `rank` columns of `x`, and the rest rotated."""
    half = (size - rank) // 2
    x, out, weight = floats(x_at, 0, size), floats(out_at, 0, size), vector(weight_at, rank)
    cosines, sines = floats(cosines_at, 0, half), floats(sines_at, 0, half)
    for row in range(_U(first), _U(last)):
        total = _F(0.0)
        for i in range(_U(rank)):
            total += x[row, i] * x[row, i]
        scale = _inverse_root(total, rank, epsilon)
        for i in range(_U(rank)):
            out[row, i] = x[row, i] * scale * weight[i]
        _rotate(x, _U(rank), row, cosines, sines, has_pairs, out, _U(rank))


@instruction(blocks_of_rows)
@inlined
def rotate_queries(
    q_at: Any, cosines_at: Any, sines_at: Any, out_at: Any, num_heads: Any, plain_dim: Any, half: Any, rank: Any,
    has_pairs: Any, first: First, last: Last,
) -> None:  # fmt: skip
    """Write the last R = 2 `half` of N + R elements of each head of `q`, rotated, to the last R of D of `out`."""
    size, to_size = plain_dim + 2 * half, rank + 2 * half
    q, out = floats(q_at, 0, num_heads * size), floats(out_at, 0, num_heads * to_size)
    cosines, sines = floats(cosines_at, 0, half), floats(sines_at, 0, half)
    for row in range(_U(first), _U(last)):
        for head in range(_U(num_heads)):
            _rotate(
                q, head * _U(size) + _U(plain_dim), row, cosines, sines, has_pairs, out,
                head * _U(to_size) + _U(rank),
            )  # fmt: skip


@inlined
def _num_tiles(num_rows: Any) -> Any:
    return (num_rows + LOW - 1) // LOW


@inlined
def _num_head_products(num_rows: Any, num_heads: Any, size: Any) -> Any:
    return (_num_tiles(num_rows) + TILES - 1) // TILES * num_heads * ((size + WIDTH - 1) // WIDTH)


@instruction(_num_head_products)
@strict
def multiply_heads(
    x_at: Any, panels_at: Any, out_at: Any, num_heads: Any, x_size: Any, depth: Any, out_size: Any, size: Any,
    num_rows: NumRows, part: Part, following: Following,
) -> None:  # fmt: skip
    """Multiply each head by a matrix of its own.

    Args:
        x_at: `[T, H, x_size]`, of which the first `depth` elements of a head are read.
        panels_at: `[H, panels, depth, 32]`, see `products.matmul`.
        out_at: `[T, H, out_size]`, of which the first `size` elements of a head are written.
        num_heads: H.
        x_size: elements of a head of `x`.
        depth: inputs.
        out_size: elements of a head of `out`.
        size: outputs.
        num_rows: T.
        part: a block of tiles of rows times one panel, head by head, panel by panel.
        following: the part that the same thread computes next; its panel is prefetched meanwhile.
    """
    num_panels, count = (size + WIDTH - 1) // WIDTH, _num_tiles(num_rows)
    num_blocks = (count + TILES - 1) // TILES
    panel, block = part // num_blocks, part % num_blocks
    head, column = panel // num_panels, panel % num_panels * WIDTH
    x_stride, out_stride = num_heads * x_size, num_heads * out_size
    x, out = vector(x_at, num_rows * x_stride), vector(out_at, num_rows * out_stride)
    panels = vector(panels_at, num_heads * num_panels * depth * WIDTH)
    zeros = np.zeros(WIDTH, _F)
    width = min(size - column, WIDTH)
    target = np.empty(LOW * WIDTH, _F) if width < WIDTH else out
    first_tile, last_tile = block * TILES, min(block * TILES + TILES, count)
    ahead_step = (WIDTH + last_tile - first_tile - 1) // (last_tile - first_tile)
    ahead = following // num_blocks * depth * WIDTH
    for tile in range(first_tile, last_tile):
        first, last = num_rows * tile // count, num_rows * (tile + 1) // count
        place = first * out_stride + head * out_size + column
        at, stride = (0, WIDTH) if width < WIDTH else (place, out_stride)
        multiply_rows(
            last - first, x, first * x_stride + head * x_size, x_stride, panels, panel * depth * WIDTH, depth, zeros, 0,
            target, at, stride, ahead, ahead_step,
        )  # fmt: skip
        ahead += depth * ahead_step
        if width < WIDTH:
            for row in range(last - first):
                for j in range(width):
                    out[place + row * out_stride + j] = target[row * WIDTH + j]


@inlined
def _grants(scope: Any) -> Any:
    """Return the page table, and the row, the first position and the first token of every grant."""
    num_grants = scope[Column.NUM_GRANTS]
    return (
        integer_rows(scope[Column.PAGE_TABLE], 0, scope[Column.PAGES_PER_ROW]),
        integers(scope[Column.ROWS], num_grants),
        integers(scope[Column.STARTS], num_grants),
        integers(scope[Column.OFFSETS], num_grants + 1),
    )


@instruction(blocks_of_rows)
@inlined
def store_latents(
    scope: InScope, latents_at: Any, memory_at: Any, scales_at: Any, size: Any, rank: Any, page_size: Any, first: First,
    last: Last,
) -> None:  # fmt: skip
    """Write `latents` `[T, D]`, D = `size`, to their pages in `memory` `[pages, P, D]`.

    With `scales` `[pages, P, 2]` they are stored as int8: the first C = `rank` elements, and the rest.
    """
    page_table, rows, starts, offsets = _grants(scope)
    latents = floats(latents_at, 0, size)
    for grant in range(rows.shape[0]):
        for token in range(max(first, offsets[grant]), min(last, offsets[grant + 1])):
            position = starts[grant] + token - offsets[grant]
            slot = np.int64(page_table[rows[grant], position // page_size]) * page_size + position % page_size
            if scales_at != 0:
                target_codes, scales = codes(memory_at + slot * size, size), vector(scales_at + 8 * slot, 2)
                store_code(target_codes, _U(0), scales, _U(0), latents, _U(token), _U(0), _U(rank))
                store_code(target_codes, _U(rank), scales, _U(1), latents, _U(token), _U(rank), _U(size - rank))
            else:
                target = vector(memory_at + 4 * slot * size, size)
                for d in range(_U(size)):
                    target[d] = latents[_U(token), d]


@inlined
def _num_segments(scope: Any, num_rows: Any) -> Any:
    """Return how many segments are items of their own; 0: one item goes through all of them.

    A thread that is late asks for a step whose tables are those of the next one already. So this must not read any.
    """
    count = (scope[Column.LONGEST] + SEGMENT - 1) // SEGMENT
    return count if count > 1 and count * num_rows <= MOST_PARTIALS else 0


@strict
def _merge(
    sums: Any, maxima: Any, totals: Any, r: Any, size: Any, others: Any, at: Any, maximum: Any, total: Any
) -> None:  # fmt: skip
    """Add what a later segment has summed up, `others[at : at + size]`, to row r of `sums` `[rows, size]`."""
    largest = maximum if maximum > maxima[r] else maxima[r]
    own, other = exp(maxima[r] - largest), exp(maximum - largest)
    totals[r] = totals[r] * own + total * other
    maxima[r] = largest
    for d in range(_U(size)):
        place = _U(r * size) + d
        sums[place] = sums[place] * own + others[_U(at) + d] * other


@inlined
def _num_items(scope: Any, num_rows: Any) -> Any:
    return scope[Column.NUM_ITEMS] * max(_num_segments(scope, num_rows), 1)


@cache
def attend_latents(size: int, rank: int, *, int8: bool = False) -> Instruction:
    """Return the instruction that attends to latents of D = `size` elements, of which C = `rank` are values.

    With `int8` they are codes with scales, otherwise float32.
    """
    loops, weigh = latent_loops(size, rank), weigher(rank)
    score, blend = loops.score, loops.blend
    num_widened = SEGMENT * size if int8 else 0

    @inlined
    def find(memory_at: Any, scales_at: Any, slot: Any, widened: Any, i: Any) -> Any:
        """Return the address of a latent."""
        return memory_at + 4 * size * slot

    @inlined
    def widen(memory_at: Any, scales_at: Any, slot: Any, widened: Any, i: Any) -> Any:
        """Return the address of row i of `widened` `[SEGMENT, D]`, after the numbers of a latent were written to it."""
        own, scales, at = codes(memory_at + size * slot, size), vector(scales_at + 8 * slot, 2), _U(i * size)
        for d in range(_U(rank)):
            widened[at + d] = _F(own[d]) * scales[0]
        for d in range(_U(rank), _U(size)):
            widened[at + d] = _F(own[d]) * scales[1]
        return np.int64(widened.ctypes.data + 4 * size * i)

    place_of = widen if int8 else find

    @strict
    def attend_segment(memory_at: Any, scales_at: Any, page_table: Any, row: Any, page_size: Any, begin: Any,
                       position: Any, num_tokens: Any, padded: Any, first: Any, queries: Any, widened: Any, places: Any,
                       scores: Any, maxima: Any, totals: Any, sums: Any) -> None:  # fmt: skip
        """Attend from `num_tokens` tokens from `position` on, `padded` rows each, to the segment from `first` on.

        Nothing before `begin` is seen or read: the slots there may hold anything.
        """
        last = min(first + SEGMENT, position + num_tokens)
        for i in range(last - first):
            at = max(first + i, begin)
            slot = np.int64(page_table[row, at // page_size]) * page_size + at % page_size
            places[i] = place_of(memory_at, scales_at, slot, widened, i)
        for i in range(last - first, last - first + AHEAD + KEYS):
            places[i] = places[last - first - 1]
        for r in range(num_tokens * padded):
            maxima[r], totals[r] = _LOWEST, _F(0.0)
        for i in range(_U(num_tokens * padded * rank)):
            sums[i] = _F(0.0)
        for block in range(first, last, BLOCK):
            if block + BLOCK <= begin:
                continue
            latents = places.ctypes.data + 8 * (block - first)
            for token in range(num_tokens):
                seen = min(block + BLOCK, last, position + token + 1) - block
                if seen <= 0:
                    continue
                for r in range(token * padded, (token + 1) * padded, ROWS):
                    for j in range(0, seen, KEYS):
                        score(queries.ctypes.data + 4 * r * size, latents + 8 * j, scores.ctypes.data + 4 * j, BLOCK)
                    for i in range(ROWS):
                        for j in range(begin - block):
                            scores[i * BLOCK + j] = _UNSEEN
                        for j in range(seen, BLOCK):
                            scores[i * BLOCK + j] = _UNSEEN
                        weigh(scores, i * BLOCK, _F(0), maxima, totals, sums, r + i)
                    blend(scores.ctypes.data, BLOCK, latents, seen, sums.ctypes.data + 4 * r * rank)

    @instruction(_num_items)
    @strict
    def attend_latents(
        scope: InScope, q_at: Any, memory_at: Any, scales_at: Any, partials_at: Any, out_at: Any, num_heads: Any,
        page_size: Any, scale: Real, num_rows: NumRows, part: Part,
    ) -> None:  # fmt: skip
        """Write to `out` `[T, H C]` what `q` `[T, H D]` attends to, or to `partials` for `merge_segments`."""
        page_table, rows, starts, offsets = _grants(scope)
        items = integer_rows(scope[Column.ITEMS], scope[Column.NUM_ITEMS], 4)
        num_segments = _num_segments(scope, num_rows)
        item, segment = (part // num_segments, part % num_segments) if num_segments > 0 else (part, 0)
        grant, skipped, num_tokens = items[item, 0], items[item, 2], np.int64(items[item, 3])
        row, position, token = rows[grant], np.int64(starts[grant] + skipped), np.int64(offsets[grant] + skipped)
        begin = begin_of(scope, grant)
        if segment * SEGMENT >= position + num_tokens:
            return
        q, out = floats(q_at, num_rows, num_heads * size), floats(out_at, num_rows, num_heads * rank)
        padded = (num_heads + ROWS - 1) // ROWS * ROWS
        height = num_tokens * padded
        queries, sums = np.zeros(height * size, _F), np.empty(height * rank, _F)
        maxima, totals = np.empty(height, _F), np.empty(height, _F)
        scores, places = np.empty(ROWS * BLOCK, _F), np.empty(SEGMENT + AHEAD + KEYS, np.int64)
        widened = np.empty(num_widened, _F)
        for t in range(num_tokens):
            for i in range(_U(num_heads * size)):
                queries[_U(t * padded * size) + i] = q[_U(token + t), i] * _F(scale)
        if num_segments > 0:
            attend_segment(memory_at, scales_at, page_table, row, page_size, begin, position, num_tokens, padded,
                           segment * SEGMENT, queries, widened, places, scores, maxima, totals, sums)  # fmt: skip
            for t in range(num_tokens):
                for head in range(num_heads):
                    r = t * padded + head
                    at = ((token + t) * num_segments + segment) * num_heads + head
                    partial = vector(partials_at + 4 * at * (rank + 2), rank + 2)
                    for d in range(_U(rank)):
                        partial[d] = sums[_U(r * rank) + d]
                    partial[rank], partial[rank + 1] = maxima[r], totals[r]
            return
        whole, all_maxima, all_totals = np.zeros(height * rank, _F), np.full(height, _LOWEST), np.zeros(height, _F)
        for first in range(0, position + num_tokens, SEGMENT):
            attend_segment(memory_at, scales_at, page_table, row, page_size, begin, position, num_tokens, padded, first,
                           queries, widened, places, scores, maxima, totals, sums)  # fmt: skip
            for r in range(max(first - position, 0) * padded, height):  # tokens before the segment see nothing of it
                _merge(whole, all_maxima, all_totals, r, rank, sums, r * rank, maxima[r], totals[r])
        for t in range(num_tokens):
            for head in range(num_heads):
                r = t * padded + head
                for d in range(_U(rank)):
                    out[_U(token + t), _U(head * rank) + d] = whole[_U(r * rank) + d] / all_totals[r]

    return attend_latents


@inlined
def _num_merged(scope: Any, num_rows: Any, num_heads: Any) -> Any:
    return num_rows * num_heads if _num_segments(scope, num_rows) > 0 else 0


@instruction(_num_merged)
@strict
def merge_segments(
    scope: InScope, partials_at: Any, out_at: Any, num_heads: Any, rank: Any, num_rows: NumRows, part: Part
) -> None:
    """Write one head of a token to `out` `[T, H C]`, C = `rank`, from its segments in `partials`.

    They are `[T, segments, H, C + 2]`: the sums, their largest score, and the sum of weights.
    """
    num_segments, token, head = _num_segments(scope, num_rows), part // num_heads, part % num_heads
    _, _, starts, offsets = _grants(scope)
    position = np.int64(0)
    for grant in range(starts.shape[0]):
        if offsets[grant] <= token < offsets[grant + 1]:
            position = np.int64(starts[grant]) + token - offsets[grant]
    whole, maxima, totals = np.zeros(rank, _F), np.full(1, _LOWEST), np.zeros(1, _F)
    for segment in range(position // SEGMENT + 1):
        at = (token * num_segments + segment) * num_heads + head
        partial = vector(partials_at + 4 * at * (rank + 2), rank + 2)
        _merge(whole, maxima, totals, 0, rank, partial, 0, partial[rank], partial[rank + 1])
    out = floats(out_at, num_rows, num_heads * rank)
    for d in range(_U(rank)):
        out[_U(token), _U(head * rank) + d] = whole[d] / totals[0]


@cache
def latents_unit(size: int, rank: int, *, int8: bool) -> Unit:
    """Return the instructions for latents of `size` elements, of which `rank` are values, in float32 or int8."""
    return Unit(
        "latents", make_latents, rotate_queries, multiply_heads, store_latents,
        attend_latents(size, rank, int8=int8), merge_segments, variant=(size << 16 | rank) * 2 + int8,
    )  # fmt: skip
