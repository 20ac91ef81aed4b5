"""Query rows times keys, and weights times values, of one head.

A score is the same bits in both of its loops: one for a few rows and keys that lie in pages, one for a tile of rows and
keys that have been transposed. Element d of a head belongs to class d % C. The products of a class are added in
ascending order of d, and the classes are added by halves: class c and class c + C/2, then c and c + C/4, and so on.
C is 16, or the largest power of two that divides D. In the first loop the classes are the lanes of a vector.

Legend: D head_dim, R query rows, C classes.
"""

# pyright: basic
# numba and llvmlite have no types.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from pagewood.engine.runner.cpu.compiled.machine.vectors import (
    INDEX,
    data_at,
    load,
    multiply_add,
    prefetch,
    spread,
    store,
    total,
    vector_of,
)
from pagewood.engine.runner.cpu.compiled.products.tile import TALL, WIDTH

_MOST_LANES = 16
_REGISTERS = 16  # vectors that queries or sums may take
_FEW = TALL // 3  # rows of a tile whose scores are computed at the same time


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLoops:
    """The loops over the keys and the values of heads of one size."""

    most_rows: int
    """Query rows that `score` and `blend` take at a time."""
    score_tall: Any
    """(queries, queries_at, keys, keys_at, partial, scores, scores_at): write to `scores[r, j]`, r < TALL and j < 32,
    rows of `block` elements, the product of row r of a tile of queries `[D, TALL]` and key j of `[D, block]`;
    `partial` `[4, TALL / 3, 32]` is scratch."""
    score: Any
    """(num_rows, queries, queries_at, memory, keys_at, values_at, ahead_at, count, scores, scores_at, scores_stride):
    write to `scores[r, j]` the product of query row r and key j, for j < count; meanwhile prefetch the values
    at values_at and the keys at ahead_at."""
    blend: Any
    """(num_rows, scores, scores_at, scores_stride, memory, values_at, count, sums, sums_at): add to row r of `sums`
    `[R, D]` value j times `scores[r, j]`, for j < count in ascending order."""


def head_loops(dim: int, *, block: int) -> HeadLoops:
    """Return the loops for heads of `dim` elements.

    Args:
        dim: D, a multiple of 4.
        block: keys in a row of transposed keys.
    """
    lanes = _MOST_LANES
    while dim % lanes:
        lanes //= 2
    most_rows = max(1, min(4, _REGISTERS * lanes // dim))
    return HeadLoops(
        most_rows=most_rows,
        score_tall=intrinsic(_score_tall(dim, lanes, block)),
        score=intrinsic(_score(dim, lanes, most_rows)),
        blend=intrinsic(_blend(dim, lanes, most_rows)),
    )


def _score(dim: int, lanes: int, most_rows: int) -> Any:
    def typed(
        context: Any, num_rows: Any, queries: Any, queries_at: Any, memory: Any, keys_at: Any, values_at: Any,
        ahead_at: Any, count: Any, scores: Any, scores_at: Any, scores_stride: Any,
    ) -> Any:  # fmt: skip
        n = types.int64

        def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
            row = data_at(ctx, builder, sig.args[1], args[1], args[2])
            keys, *asked = (data_at(ctx, builder, sig.args[3], args[3], args[i]) for i in (4, 5, 6))
            out = data_at(ctx, builder, sig.args[8], args[8], args[9])
            _each_height(builder, args[0], most_rows, lambda rows: _emit_score(
                builder, rows, row, keys, asked, args[7], out, args[10], dim=dim, lanes=lanes))  # fmt: skip
            return ctx.get_dummy_value()

        return types.void(n, queries, n, memory, n, n, n, n, scores, n, n), generate

    return typed


def _score_tall(dim: int, num_classes: int, block: int) -> Any:
    def typed(
        context: Any, queries: Any, queries_at: Any, keys: Any, keys_at: Any, partial: Any, scores: Any, scores_at: Any
    ) -> Any:
        n = types.int64

        def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
            query, key, out = (data_at(ctx, builder, sig.args[i], args[i], args[i + 1]) for i in (0, 2, 5))
            partial_at = data_at(ctx, builder, sig.args[4], args[4], INDEX(0))
            _emit_score_tall(builder, query, key, partial_at, out, dim=dim, num_classes=num_classes, block=block)
            return ctx.get_dummy_value()

        return types.void(queries, n, keys, n, partial, scores, n), generate

    return typed


def _blend(dim: int, lanes: int, most_rows: int) -> Any:
    def typed(
        context: Any, num_rows: Any, scores: Any, scores_at: Any, scores_stride: Any, memory: Any, values_at: Any,
        count: Any, sums: Any, sums_at: Any,
    ) -> Any:  # fmt: skip
        n = types.int64

        def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
            weights = data_at(ctx, builder, sig.args[1], args[1], args[2])
            values = data_at(ctx, builder, sig.args[4], args[4], args[5])
            out = data_at(ctx, builder, sig.args[7], args[7], args[8])
            _each_height(builder, args[0], most_rows, lambda rows: _emit_blend(
                builder, rows, weights, args[3], values, args[6], out, dim=dim, lanes=lanes))  # fmt: skip
            return ctx.get_dummy_value()

        return types.void(n, scores, n, n, memory, n, n, sums, n), generate

    return typed


def _each_height(builder: Any, height: Any, most_rows: int, emit: Any) -> None:
    """Emit a loop for every number of rows, and a switch between them."""
    done = builder.append_basic_block("done")
    choice = builder.switch(height, done)
    for rows in range(1, most_rows + 1):
        block = builder.append_basic_block(f"rows{rows}")
        choice.add_case(ir.Constant(INDEX, rows), block)
        builder.position_at_end(block)
        emit(rows)
        builder.branch(done)
    builder.position_at_end(done)


def _offsets(builder: Any, base: Any, dim: int, lanes: int) -> list[Any]:
    return [builder.gep(base, [INDEX(d)]) for d in range(0, dim, lanes)]


def _emit_score(
    builder: Any, rows: int, queries: Any, keys: Any, asked: Sequence[Any], count: Any, out: Any, stride: Any, *,
    dim: int, lanes: int,
) -> None:  # fmt: skip
    vector = vector_of(lanes)
    query = [
        [load(builder, at, vector) for at in _offsets(builder, builder.gep(queries, [INDEX(r * dim)]), dim, lanes)]
        for r in range(rows)
    ]
    before, loop, after = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("after")
    builder.branch(loop)

    builder.position_at_end(loop)
    j = builder.phi(INDEX)
    start = builder.mul(j, INDEX(dim))
    for base in asked:
        for at in _offsets(builder, builder.gep(base, [start]), dim, _MOST_LANES):
            prefetch(builder, at)
    key = [load(builder, at, vector) for at in _offsets(builder, builder.gep(keys, [start]), dim, lanes)]
    for r in range(rows):
        products = builder.fmul(query[r][0], key[0])
        for q, k in zip(query[r][1:], key[1:], strict=True):
            products = multiply_add(builder, q, k, products)
        at = builder.gep(out, [builder.add(builder.mul(stride, INDEX(r)), j)])
        builder.store(total(builder, products), at)
    _close(builder, j, count, before, loop, after)


def _emit_score_tall(
    builder: Any, queries: Any, keys: Any, partial: Any, out: Any, *, dim: int, num_classes: int, block: int
) -> None:
    """Emit a loop over groups of a few rows, and in it a loop over the first quarter of the classes.

    Each class is added to the three classes that are one, two and three quarters further. With few rows, three sets of
    sums fit into registers. At most four such totals remain for each score, and are added in the end.
    """
    vector = vector_of(_MOST_LANES)
    columns = range(0, WIDTH, _MOST_LANES)
    quarter = num_classes // 4
    places = [(r, column) for r in range(_FEW) for column in columns]
    start, rows = builder.block, builder.append_basic_block("rows")
    classes, added_up = builder.append_basic_block("classes"), builder.append_basic_block("added_up")
    after = builder.append_basic_block("after")
    builder.branch(rows)

    builder.position_at_end(rows)
    group = builder.phi(INDEX)
    queries = builder.gep(queries, [builder.mul(group, INDEX(_FEW))])
    out = builder.gep(out, [builder.mul(group, INDEX(_FEW * block))])
    builder.branch(classes)

    builder.position_at_end(classes)
    j = builder.phi(INDEX)
    query_at = builder.gep(queries, [builder.mul(j, INDEX(TALL))])
    key_at = builder.gep(keys, [builder.mul(j, INDEX(block))])

    def of_class(first: int) -> list[Any]:
        """Return the sums of the products of class j + first."""
        sums: list[Any] = []
        for d in range(first, dim, num_classes):
            key = [load(builder, builder.gep(key_at, [INDEX(d * block + column)]), vector) for column in columns]
            for r in range(_FEW):
                query = spread(builder, builder.load(builder.gep(query_at, [INDEX(d * TALL + r)])), vector)
                for i, half in enumerate(key):
                    if d == first:
                        sums.append(builder.fmul(query, half))
                    else:
                        at = r * len(columns) + i
                        sums[at] = multiply_add(builder, query, half, sums[at])
        return sums

    def added(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
        return [builder.fadd(a, b) for a, b in zip(first, second, strict=True)]

    even = added(of_class(0), of_class(2 * quarter))
    odd = added(of_class(quarter), of_class(3 * quarter))
    tile_at = builder.gep(partial, [builder.mul(j, INDEX(_FEW * WIDTH))])
    for (r, column), value in zip(places, added(even, odd), strict=True):
        store(builder, value, builder.gep(tile_at, [INDEX(r * WIDTH + column)]))
    _close(builder, j, INDEX(quarter), rows, classes, added_up)

    for r, column in places:
        tiles = [
            load(builder, builder.gep(partial, [INDEX((t * _FEW + r) * WIDTH + column)]), vector)
            for t in range(quarter)
        ]
        while len(tiles) > 1:
            tiles = added(tiles[: len(tiles) // 2], tiles[len(tiles) // 2 :])
        store(builder, tiles[0], builder.gep(out, [INDEX(r * block + column)]))
    _close(builder, group, INDEX(TALL // _FEW), start, rows, after, latch=added_up)


def _emit_blend(
    builder: Any, rows: int, weights: Any, stride: Any, values: Any, count: Any, out: Any, *, dim: int, lanes: int
) -> None:  # fmt: skip
    vector = vector_of(lanes)
    places = [_offsets(builder, builder.gep(out, [INDEX(r * dim)]), dim, lanes) for r in range(rows)]
    first = [[load(builder, at, vector) for at in row] for row in places]
    before, loop, after = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("after")
    builder.branch(loop)

    builder.position_at_end(loop)
    j = builder.phi(INDEX)
    sums = [[builder.phi(vector) for _ in row] for row in places]
    start = builder.mul(j, INDEX(dim))
    value = [load(builder, at, vector) for at in _offsets(builder, builder.gep(values, [start]), dim, lanes)]
    new: list[list[Any]] = []
    for r in range(rows):
        at = builder.gep(weights, [builder.add(builder.mul(stride, INDEX(r)), j)])
        weight = spread(builder, builder.load(at), vector)
        new.append([multiply_add(builder, weight, v, sum_) for sum_, v in zip(sums[r], value, strict=True)])
    for r, row in enumerate(sums):
        for i, phi in enumerate(row):
            phi.add_incoming(first[r][i], before)
            phi.add_incoming(new[r][i], loop)
    _close(builder, j, count, before, loop, after)
    for row, values_of_row in zip(places, new, strict=True):
        for at, value_ in zip(row, values_of_row, strict=True):
            store(builder, value_, at)


def _close(builder: Any, j: Any, count: Any, before: Any, loop: Any, after: Any, *, latch: Any = None) -> None:
    """End the loop over j at `count`, and continue after it; its last block is `latch`, by default its first."""
    following = builder.add(j, INDEX(1))
    j.add_incoming(INDEX(0), before)
    j.add_incoming(following, latch or loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
    builder.position_at_end(after)
