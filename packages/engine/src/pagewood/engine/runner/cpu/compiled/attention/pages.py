"""Attention over pages, for any mix of grants: single tokens and chunks of prompts, or whole texts of encoders.

The work is cut into items: (grant, key head, a tile of query tokens). An item reads its keys and values once for all
query heads that share the key head. A tile of few query rows reads pages in place; a tile of many rows first copies
blocks of 64 keys, transposed, so that the inner loops run over keys. Both keep a running maximum and sum per query row.

Both compute the same bits. Blocks begin at positions that are multiples of 64, so the order in which a row's keys are
added depends on its position only: not on its grant, the other grants, the page size or the threads. A score has one
order of addition (`head`), a block of scores one function that weighs it (`softmax`), and values are added in ascending
order of their positions. The weight of a key that a row does not see is 0 and changes nothing.

The keys and values of a layer lie in a section of each page, `[2, G, P, D]`, and scales of codes in one, `[2, G, P]`.
Those of the next page lie `stride` elements and `scale_stride` scales further: there may be other layers between.

A window w > 0 shows a token the last w positions, its own included. A window -c < 0 shows it the positions of its own
chunk of c positions, up to its own. In an encoder, a window w shows a token w positions on both sides, all in its own
grant. The tokens of an image may see all of it: then a table says where the positions end that a token sees. A sink is
a score without a value: a row's sums begin with it. A bias is added to the score of a key by its distance from the
token, in encoders only.

Legend: T tokens, H query heads, G key heads, D head_dim, P page size, N items.
Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018; Dao et al., FlashAttention, 2022.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from typing import Any

import numpy as np

from pagewood.engine.models.parts.distances import MOST_DISTANCE, NUM_DISTANCES
from pagewood.engine.runner.cpu.compiled.attention.head import head_loops
from pagewood.engine.runner.cpu.compiled.attention.softmax import BLOCK, weigher
from pagewood.engine.runner.cpu.compiled.layout import Column
from pagewood.engine.runner.cpu.compiled.machine.kernel import exact, inlined, strict
from pagewood.engine.runner.cpu.compiled.machine.memory import integer_rows, integers, vector
from pagewood.engine.runner.cpu.compiled.products.tile import TALL, WIDTH, multiply_tall

_F = np.float32
_U = np.uint64  # type of indices: numba does not test an unsigned index for negative values
_LARGEST_CODE = _F(127.0)
_MANY = 16  # query rows for which copying a block of keys pays
_UNSEEN = _F(-np.inf)  # the score of a key that a row does not see
_LOWEST = _F(-1e30)  # below every score, and finite, so that differences of maxima are numbers


@inlined
def _places(scope: Any, first_row: Any) -> Any:
    """Return a page table, and the row, the first position and the first token of every grant.

    The table is the one whose first row is `first_row` of all tables.
    """
    num_grants = scope[Column.NUM_GRANTS]
    return (
        integer_rows(
            scope[Column.PAGE_TABLE] + 4 * first_row * scope[Column.PAGES_PER_ROW], 0, scope[Column.PAGES_PER_ROW]
        ),
        integers(scope[Column.ROWS], num_grants),
        integers(scope[Column.STARTS], num_grants),
        integers(scope[Column.OFFSETS], num_grants + 1),
    )


@inlined
def store(memory: Any, scales: Any, k: Any, v: Any, scope: Any, first_row: Any, kv_heads: Any, page_size: Any,
          stride: Any, scale_stride: Any, first: Any, last: Any) -> None:  # fmt: skip
    """Write the keys and values of tokens [first, last) of the scope to their pages; `scales` is empty."""
    page_table, rows, starts, offsets = _places(scope, first_row)
    dim = _U(k.shape[1] // kv_heads)
    half = _U(page_size * k.shape[1])  # elements of the keys of a page
    head_size = _U(page_size) * dim
    for grant in range(rows.shape[0]):
        for token in range(max(first, offsets[grant]), min(last, offsets[grant + 1])):
            position = starts[grant] + token - offsets[grant]
            page = page_table[rows[grant], position // page_size]
            base = _U(page) * _U(stride) + _U(position % page_size) * dim
            for head in range(_U(kv_heads)):
                to = base + head * head_size
                for d in range(dim):
                    memory[to + d] = k[_U(token), head * dim + d]
                    memory[to + half + d] = v[_U(token), head * dim + d]


@exact
def store_code(memory: Any, to: Any, scales: Any, scale_to: Any, x: Any, token: Any, start: Any, dim: Any) -> None:
    """Write `dim` elements of a row of `x` as codes from `memory[to]` on, and their scale to `scales[scale_to]`."""
    largest = _F(0.0)
    for d in range(dim):
        size = abs(x[token, start + d])
        largest = size if size > largest or size != size else largest  # NaN makes the scale NaN
    scale = largest / _LARGEST_CODE
    scales[scale_to] = scale
    divisor = scale if scale > _F(0.0) else _F(1.0)
    for d in range(dim):
        code = np.rint(x[token, start + d] / divisor)
        memory[to + d] = np.int8(min(max(code, -_LARGEST_CODE), _LARGEST_CODE))


@inlined
def store_codes(memory: Any, scales: Any, k: Any, v: Any, scope: Any, first_row: Any, kv_heads: Any, page_size: Any,
                stride: Any, scale_stride: Any, first: Any, last: Any) -> None:  # fmt: skip
    """Like `store`, in int8: `memory` holds codes, `scales` the value of code 1, one for each token and head."""
    page_table, rows, starts, offsets = _places(scope, first_row)
    dim = _U(k.shape[1] // kv_heads)
    half = _U(page_size * kv_heads)  # tokens and heads of the keys of a page
    for grant in range(rows.shape[0]):
        for token in range(max(first, offsets[grant]), min(last, offsets[grant + 1])):
            position = starts[grant] + token - offsets[grant]
            page = page_table[rows[grant], position // page_size]
            for head in range(_U(kv_heads)):
                place = head * _U(page_size) + _U(position % page_size)
                to, scale_to = _U(page) * _U(stride) + place * dim, _U(page) * _U(scale_stride) + place
                store_code(memory, to, scales, scale_to, k, _U(token), head * dim, dim)
                store_code(memory, to + half * dim, scales, scale_to + half, v, _U(token), head * dim, dim)


@inlined
def _load_block(memory: Any, scales: Any, page_table: Any, row: Any, head: Any, kv_heads: Any, page_size: Any,
                stride: Any, scale_stride: Any, dim: Any, first: Any, begin: Any, last: Any, keys: Any,
                values: Any) -> None:  # fmt: skip
    """Copy keys [begin, last) of the block at `first`, transposed, to `keys` `[dim, 64]`, and values to `[64, width]`.

    The other values become zeros. Their keys are not changed, because their scores are masked: those before `begin` may
    lie in pages that have been given back.
    """
    width = _U(_wide(dim))
    half = _U(kv_heads * page_size * dim)
    for i in range(_U(begin - first) * width):
        values[i] = _F(0.0)
    key = begin
    while key < last:
        offset = key % page_size
        size = min(page_size - offset, last - key)
        base = _U(page_table[row, key // page_size]) * _U(stride) + _U((head * page_size + offset) * dim)
        to = _U(key - first)
        for j in range(_U(size)):
            for d in range(_U(dim)):
                keys[d * _U(BLOCK) + to + j] = memory[base + j * _U(dim) + d]
            for d in range(_U(dim)):
                values[(to + j) * width + d] = memory[base + half + j * _U(dim) + d]
        key += size
    for i in range(_U(last - first) * width, _U(BLOCK) * width):
        values[i] = _F(0.0)


@inlined
def _load_code_block(memory: Any, scales: Any, page_table: Any, row: Any, head: Any, kv_heads: Any, page_size: Any,
                     stride: Any, scale_stride: Any, dim: Any, first: Any, begin: Any, last: Any, keys: Any,
                     values: Any) -> None:  # fmt: skip
    """Like `_load_block`, from codes."""
    width = _U(_wide(dim))
    half = _U(kv_heads * page_size)
    for i in range(_U(begin - first) * width):
        values[i] = _F(0.0)
    for key in range(begin, last):
        page, place = _U(page_table[row, key // page_size]), _U(head * page_size + key % page_size)
        at, scale_at = page * _U(stride) + place * _U(dim), page * _U(scale_stride) + place
        k_scale, v_scale, to = scales[scale_at], scales[scale_at + half], _U(key - first)
        for d in range(_U(dim)):
            keys[d * _U(BLOCK) + to] = _F(memory[at + d]) * k_scale
        for d in range(_U(dim)):
            values[to * width + d] = _F(memory[at + half * _U(dim) + d]) * v_scale
    for i in range(_U(last - first) * width, _U(BLOCK) * width):
        values[i] = _F(0.0)


@inlined
def _load_code_rows(memory: Any, scales: Any, page_table: Any, row: Any, head: Any, kv_heads: Any, page_size: Any,
                    stride: Any, scale_stride: Any, dim: Any, first: Any, last: Any, keys: Any,
                    values: Any) -> None:  # fmt: skip
    """Copy keys and values [first, last) from codes to `keys` and `values`, each `[64, dim]`."""
    half = _U(kv_heads * page_size)
    for key in range(first, last):
        page, place = _U(page_table[row, key // page_size]), _U(head * page_size + key % page_size)
        at, scale_at = page * _U(stride) + place * _U(dim), page * _U(scale_stride) + place
        k_scale, v_scale, to = scales[scale_at], scales[scale_at + half], _U(key - first) * _U(dim)
        for d in range(_U(dim)):
            keys[to + d] = _F(memory[at + d]) * k_scale
        for d in range(_U(dim)):
            values[to + d] = _F(memory[at + half * _U(dim) + d]) * v_scale


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
def _are_finite(values: Any) -> Any:
    """Whether all of `values` are finite numbers."""
    poison = _F(0.0)
    for i in range(_U(values.shape[0])):
        poison += values[i] * _F(0.0)
    return poison == _F(0.0)


@exact
def _blend_some(scores: Any, scores_at: Any, first: Any, last: Any, values: Any, sums: Any, at: Any,
                width: Any) -> None:  # fmt: skip
    """Add values [first, last) of a block to a row of sums, each times its weight, in ascending order."""
    for j in range(first, last):
        weight = scores[_U(scores_at + j)]
        for d in range(_U(width)):
            sums[_U(at) + d] += weight * values[_U(j * width) + d]


@inlined
def begin_of(scope: Any, grant: Any) -> Any:
    """Return the first position that a grant attends to."""
    at = scope[Column.BEGINS]
    return np.int64(integers(at, 0)[grant]) if at != 0 else np.int64(0)


@inlined
def _seen_from(position: Any, window: Any) -> Any:
    """Return the first position that a window shows to the token at `position`; it may be negative."""
    return position + 1 - window if window > 0 else position // -window * -window


@inlined
def _seen_from_both(position: Any, window: Any) -> Any:
    """Return the first position that an encoder's token at `position` sees; it may be negative."""
    return position - window


@inlined
def _seen_to(position: Any, window: Any, stop: Any) -> Any:
    """Return the end of the positions that a token sees."""
    return position + 1


@inlined
def _seen_to_both(position: Any, window: Any, stop: Any) -> Any:
    """Return the end of the positions that an encoder's token sees, in a text that ends at `stop`."""
    return min(stop, position + window + 1)


@inlined
def _begin_sums(sinks_at: Any, first_head: Any, group: Any, num_rows: Any, maxima: Any, totals: Any) -> None:
    """Begin the sums of query rows with the sink of their heads, if there are any: row r is head r % group."""
    if sinks_at != 0:
        sinks = vector(sinks_at, first_head + group)
        for r in range(num_rows):
            maxima[r], totals[r] = sinks[_U(first_head + r % group)], _F(1.0)


@inlined
def _add_biases(scores: Any, at: Any, first: Any, last: Any, biases: Any, own: Any) -> None:
    """Add to the scores from `at` on, of keys [first, last), their biases for the token at position `own`."""
    for key in range(first, last):
        scores[at + key - first] += biases[MOST_DISTANCE + min(max(key - own, -MOST_DISTANCE), MOST_DISTANCE)]


@inlined
def _seen_to_listed(position: Any, window: Any, stop: Any) -> Any:
    """Return the end of the positions that a token sees, by the table of its grant; `stop`: see `_stop_listed`."""
    return position + 1 if stop == 0 else np.int64(integers(stop + 4 * position, 1)[0])


@inlined
def _stop(scope: Any, grant: Any, start: Any, offsets: Any) -> Any:
    """Return the end of a grant's positions."""
    return np.int64(start + offsets[grant + 1] - offsets[grant])


@inlined
def _stop_listed(scope: Any, grant: Any, start: Any, offsets: Any) -> Any:
    """Return where a table with the ends of what the grant's tokens see has its position 0; 0: there is none."""
    at = scope[Column.ENDS]
    return at + 4 * (np.int64(offsets[grant]) - np.int64(start)) if at != 0 else np.int64(0)


def attend_item(dim: int, *, codes: bool, sees_later: bool, sees_images: bool) -> Any:
    """Return the function that computes one item for heads of `dim` elements, a constant in its loops.

    Args:
        dim: D.
        codes: whether the memory holds int8 codes with scales, or float32 and no scales.
        sees_later: whether a token sees later ones of its grant, too, as in encoders.
        sees_images: whether a token of an image may see later ones of its image.
    """
    seen_from, seen_to = (_seen_from_both, _seen_to_both) if sees_later else (_seen_from, _seen_to)
    seen_to, find_stop = (_seen_to_listed, _stop_listed) if sees_images else (seen_to, _stop)
    loops = head_loops(dim, block=BLOCK)
    weigh_few, weigh_many = weigher(dim), weigher((dim + WIDTH - 1) // WIDTH * WIDTH)
    score, blend, score_tall, most_rows = loops.score, loops.blend, loops.score_tall, loops.most_rows

    @inlined
    def first_keys(scope: Any, first_row: Any, items: Any, item: Any, page_size: Any, stride: Any, dim: Any,
                    window: Any) -> Any:  # fmt: skip
        """Return where in the memory an item's first page begins; an item out of range is clamped to the last."""
        page_table, rows, starts, _ = _places(scope, first_row)
        item = min(item, items.shape[0] - 1)
        grant, head, skipped = items[item, 0], items[item, 1], items[item, 2]
        first_page = max(begin_of(scope, grant), seen_from(starts[grant] + skipped, window)) // page_size
        return page_table[rows[grant], first_page] * stride + head * page_size * dim

    @strict
    def few(memory: Any, scales: Any, q: Any, out: Any, page_table: Any, row: Any, token: Any, head: Any, group: Any,
            kv_heads: Any, page_size: Any, stride: Any, scale_stride: Any, first_key: Any, last_key: Any, scale: Any,
            sinks_at: Any, biases_at: Any, own: Any, cap: Any, after: Any) -> None:  # fmt: skip
        """Attend from one token, all query heads of one key head, to keys [first_key, last_key) where they lie.

        `after` is where the keys are that are read next. They are prefetched, as all other keys are a page ahead.
        """
        half = kv_heads * page_size * dim
        head_at = head * page_size * dim
        queries = np.empty(group * dim, np.float32)
        sums = np.zeros(group * dim, np.float32)
        maxima = np.full(group, _LOWEST, np.float32)
        totals = np.zeros(group, np.float32)
        _begin_sums(sinks_at, head * group, group, group, maxima, totals)
        scores = np.empty(group * BLOCK, np.float32)
        for i in range(_U(group * dim)):
            queries[i] = q[_U(token), _U(head * group * dim) + i] * scale
        for block in range(first_key // BLOCK * BLOCK, last_key, BLOCK):
            first, last = max(block, first_key), min(block + BLOCK, last_key)
            if last - first < BLOCK:
                scores[:] = _UNSEEN
            key = first
            while key < last:
                offset = key % page_size
                size = min(page_size - offset, last - key)
                at = page_table[row, key // page_size] * stride + head_at + offset * dim
                ahead = after
                if key + size < last_key:
                    ahead = page_table[row, (key + size) // page_size] * stride + head_at
                for r in range(0, group, most_rows):
                    score(min(most_rows, group - r), queries, r * dim, memory, at, at + half, ahead, size, scores,
                          r * BLOCK + key - block, BLOCK)  # fmt: skip
                key += size
            if sees_later and biases_at != 0:
                for r in range(group):
                    biases = vector(biases_at + 4 * NUM_DISTANCES * (head * group + r), NUM_DISTANCES)
                    _add_biases(scores, r * BLOCK + first - block, first, last, biases, own)
            for r in range(group):
                weigh_few(scores, r * BLOCK, cap, maxima, totals, sums, r)
            key = first
            while key < last:
                offset = key % page_size
                size = min(page_size - offset, last - key)
                at = page_table[row, key // page_size] * stride + half + head_at + offset * dim
                for r in range(0, group, most_rows):
                    blend(min(most_rows, group - r), scores, r * BLOCK + key - block, BLOCK, memory, at, size, sums,
                          r * dim)  # fmt: skip
                key += size
        for r in range(group):
            for d in range(_U(dim)):
                out[_U(token), _U((head * group + r) * dim) + d] = sums[_U(r * dim) + d] / totals[r]

    @strict
    def few_codes(memory: Any, scales: Any, q: Any, out: Any, page_table: Any, row: Any, token: Any, head: Any,
                  group: Any, kv_heads: Any, page_size: Any, stride: Any, scale_stride: Any, first_key: Any,
                  last_key: Any, scale: Any, sinks_at: Any, biases_at: Any, own: Any, cap: Any,
                  after: Any) -> None:  # fmt: skip
        """Like `few`, from codes, which are turned into numbers block by block."""
        queries = np.empty(group * dim, np.float32)
        sums = np.zeros(group * dim, np.float32)
        maxima = np.full(group, _LOWEST, np.float32)
        totals = np.zeros(group, np.float32)
        _begin_sums(sinks_at, head * group, group, group, maxima, totals)
        scores = np.empty(group * BLOCK, np.float32)
        keys, values = np.empty(BLOCK * dim, np.float32), np.empty(BLOCK * dim, np.float32)
        for i in range(_U(group * dim)):
            queries[i] = q[_U(token), _U(head * group * dim) + i] * scale
        for block in range(first_key // BLOCK * BLOCK, last_key, BLOCK):
            first, last = max(block, first_key), min(block + BLOCK, last_key)
            size, at = last - first, first - block
            if size < BLOCK:
                scores[:] = _UNSEEN
            _load_code_rows(memory, scales, page_table, row, head, kv_heads, page_size, stride, scale_stride, dim,
                            first, last, keys, values)  # fmt: skip
            for r in range(0, group, most_rows):
                score(min(most_rows, group - r), queries, r * dim, keys, 0, 0, 0, size, scores, r * BLOCK + at,
                      BLOCK)  # fmt: skip
            if sees_later and biases_at != 0:
                for r in range(group):
                    biases = vector(biases_at + 4 * NUM_DISTANCES * (head * group + r), NUM_DISTANCES)
                    _add_biases(scores, r * BLOCK + at, first, last, biases, own)
            for r in range(group):
                weigh_few(scores, r * BLOCK, cap, maxima, totals, sums, r)
            for r in range(0, group, most_rows):
                blend(min(most_rows, group - r), scores, r * BLOCK + at, BLOCK, values, 0, size, sums, r * dim)
        for r in range(group):
            for d in range(_U(dim)):
                out[_U(token), _U((head * group + r) * dim) + d] = sums[_U(r * dim) + d] / totals[r]

    attend_one, load = (few_codes, _load_code_block) if codes else (few, _load_block)

    @strict
    def many(memory: Any, scales: Any, q: Any, out: Any, page_table: Any, row: Any, token: Any, position: Any,
             size: Any, head: Any, group: Any, kv_heads: Any, page_size: Any, stride: Any, scale_stride: Any,
             begin: Any, stop: Any, window: Any, scale: Any, sinks_at: Any, biases_at: Any,
             cap: Any) -> None:  # fmt: skip
        """Attend from `size` tokens at positions [position, position + size), all query heads of one key head.

        A token sees what its `window` shows of positions [begin, stop).
        """
        num_rows, width = size * group, _wide(dim)
        padded = (num_rows + TALL - 1) // TALL * TALL
        queries = np.zeros(padded * dim, np.float32)
        sums = np.zeros(padded * width, np.float32)
        maxima = np.full(padded, _LOWEST, np.float32)
        totals = np.zeros(padded, np.float32)
        _begin_sums(sinks_at, head * group, group, num_rows, maxima, totals)
        keys = np.zeros(dim * BLOCK, np.float32)
        values = np.zeros(BLOCK * width, np.float32)
        scores = np.empty(TALL * BLOCK, np.float32)
        partial = np.empty(4 * TALL // 3 * WIDTH, np.float32)
        _load_queries(q, queries, token, head * group, group, num_rows, dim, scale)
        end, first_key = seen_to(position + size - 1, window, stop), max(begin, seen_from(position, window))
        for first in range(first_key // BLOCK * BLOCK, end, BLOCK):
            last = min(first + BLOCK, end)
            load(memory, scales, page_table, row, head, kv_heads, page_size, stride, scale_stride, dim, first,
                 max(first, first_key), last, keys, values)  # fmt: skip
            is_finite = _are_finite(values)
            for r in range(0, num_rows, TALL):
                low, high = position + r // group, position + (min(r + TALL, num_rows) - 1) // group
                if first >= seen_to(high, window, stop) or last <= seen_from(low, window):
                    continue  # no row sees a key of this block
                for column in range(0, BLOCK, WIDTH):
                    score_tall(queries, r * dim, keys, column, partial, scores, column)
                if sees_later and biases_at != 0:
                    for i in range(min(TALL, num_rows - r)):
                        biases = vector(biases_at + 4 * NUM_DISTANCES * (head * group + (r + i) % group), NUM_DISTANCES)
                        _add_biases(scores, i * BLOCK, first, first + BLOCK, biases, position + (r + i) // group)
                all_seen = (last <= seen_to(low, window, stop) and last == first + BLOCK
                            and first >= seen_from(high, window) and first >= begin)  # fmt: skip
                if not all_seen:
                    for i in range(TALL):
                        own = position + min(r + i, num_rows - 1) // group
                        seen_first, seen_end = max(begin, seen_from(own, window)), seen_to(own, window, stop)
                        for j in range(BLOCK):
                            seen = seen_first <= first + j < seen_end
                            scores[i * BLOCK + j] = scores[i * BLOCK + j] if seen else _UNSEEN
                for i in range(TALL):
                    weigh_many(scores, i * BLOCK, cap, maxima, totals, sums, r + i)
                if all_seen or is_finite:
                    for column in range(0, width, WIDTH):
                        at = r * width + column
                        multiply_tall(
                            scores, 0, 1, BLOCK, values, column, width, BLOCK, sums, at, width, sums, at, width
                        )
                else:  # the weight of an unseen value is 0, but 0 times infinity or NaN is NaN
                    for i in range(TALL):
                        own = position + min(r + i, num_rows - 1) // group
                        seen_first = max(first, begin, seen_from(own, window))
                        seen_end = min(last, seen_to(own, window, stop))
                        _blend_some(scores, i * BLOCK, seen_first - first, seen_end - first, values, sums,
                                    (r + i) * width, width)  # fmt: skip
        for r in range(num_rows):
            to, start = _U(token + r // group), _U((head * group + r % group) * dim)
            for d in range(_U(dim)):
                out[to, start + d] = sums[_U(r * width) + d] / totals[r]

    @inlined
    def attend(memory: Any, scales: Any, q: Any, out: Any, scope: Any, first_row: Any, item: Any, following: Any,
               kv_heads: Any, page_size: Any, stride: Any, scale_stride: Any, window: Any, scale: Any, sinks_at: Any,
               biases_at: Any, soft_cap: Any) -> None:  # fmt: skip
        page_table, rows, starts, offsets = _places(scope, first_row)
        items = integer_rows(scope[Column.ITEMS], scope[Column.NUM_ITEMS], 4)
        group = q.shape[1] // (kv_heads * dim)
        grant, head, skipped, size = items[item, 0], items[item, 1], items[item, 2], items[item, 3]
        row, start, token, begin = rows[grant], starts[grant], offsets[grant] + skipped, begin_of(scope, grant)
        stop = find_stop(scope, grant, start, offsets)
        if head >= kv_heads:
            return  # an item of a layer with more key heads
        if size * group >= _MANY:
            many(memory, scales, q, out, page_table, row, token, start + skipped, size, head, group, kv_heads,
                 page_size, stride, scale_stride, begin, stop, window, _F(scale), sinks_at, biases_at,
                 _F(soft_cap))  # fmt: skip
        else:
            after = first_keys(scope, first_row, items, following, page_size, stride, dim, window)
            for i in range(size):
                own = np.int64(start + skipped + i)
                attend_one(memory, scales, q, out, page_table, row, token + i, head, group, kv_heads, page_size, stride,
                           scale_stride, max(begin, seen_from(own, window)), np.int64(seen_to(own, window, stop)),
                           _F(scale), sinks_at, biases_at, own, _F(soft_cap), after)  # fmt: skip

    return attend
