"""A few query rows times the keys, and weights times the values, of one head where they lie: the loops of decoding.

Legend: D head_dim, R query rows.
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

from pagewood.engine.runner.cpu.compiled.vectors import (
    FUSED,
    INDEX,
    data_at,
    load,
    prefetch,
    spread,
    store,
    total,
    vector_of,
)

_MOST_LANES = 16
_REGISTERS = 16  # vectors that queries or sums may take


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLoops:
    """The loops over keys and over values of heads of one size."""

    most_rows: int
    """Query rows that they take at a time."""
    score: Any
    """(num_rows, queries, queries_at, memory, keys_at, values_at, ahead_at, count, scores, scores_at, scores_stride):
    write to `scores[r, j]` the product of query row r and key j, for j < count; meanwhile ask for the values at
    values_at and the keys at ahead_at."""
    blend: Any
    """(num_rows, scores, scores_at, scores_stride, memory, values_at, count, sums, sums_at): add to row r of `sums`
    `[R, D]` value j times `scores[r, j]`, for j < count in ascending order."""


def head_loops(dim: int) -> HeadLoops:
    """Return the loops for heads of `dim` elements."""
    lanes = _MOST_LANES
    while dim % lanes:
        lanes //= 2
    most_rows = max(1, min(4, _REGISTERS * lanes // dim))
    return HeadLoops(
        most_rows=most_rows,
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
    """Emit a loop for every number of rows, and a choice between them."""
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
        products = builder.fmul(query[r][0], key[0], flags=FUSED)
        for q, k in zip(query[r][1:], key[1:], strict=True):
            products = builder.fadd(products, builder.fmul(q, k, flags=FUSED), flags=FUSED)
        at = builder.gep(out, [builder.add(builder.mul(stride, INDEX(r)), j)])
        builder.store(total(builder, products), at)
    _close(builder, j, count, before, loop, after)


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
        new.append(
            [
                builder.fadd(sum_, builder.fmul(weight, v, flags=FUSED), flags=FUSED)
                for sum_, v in zip(sums[r], value, strict=True)
            ]
        )
    for r, row in enumerate(sums):
        for i, phi in enumerate(row):
            phi.add_incoming(first[r][i], before)
            phi.add_incoming(new[r][i], loop)
    _close(builder, j, count, before, loop, after)
    for row, values_of_row in zip(places, new, strict=True):
        for at, value_ in zip(row, values_of_row, strict=True):
            store(builder, value_, at)


def _close(builder: Any, j: Any, count: Any, before: Any, loop: Any, after: Any) -> None:
    """End the loop over j at `count`, and go on after it."""
    following = builder.add(j, INDEX(1))
    j.add_incoming(INDEX(0), before)
    j.add_incoming(following, loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
    builder.position_at_end(after)
