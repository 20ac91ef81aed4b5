"""A few query rows times a few latents, and weights times latents: the inner loops of latent attention.

All heads see the same latents, so that a latent is loaded once for several query rows. A score is the same bits
whichever rows and latents are computed with it: its products are added in ascending order by lane, and then the lanes
by halves. Sums of latents are added in ascending order of positions.

Legend: D elements of a latent, C of its part that is a value too.
"""

# pyright: basic
# numba and llvmlite have no types.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from pagewood.engine.runner.cpu.compiled.machine.vectors import (
    INDEX,
    load,
    multiply_add,
    prefetch,
    spread,
    store,
    total,
    vector_of,
    with_pointers,
)

ROWS, KEYS = (4, 4) if llvmlite.binding.get_host_cpu_features().get("avx512f") else (2, 2)
"""Query rows and latents that are multiplied at the same time: as many as there are registers for their sums."""
AHEAD = 16
"""How many latents further is what `score` prefetches."""
_FLOAT, _LONG = ir.FloatType().as_pointer(), INDEX.as_pointer()


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentLoops:
    """The loops for latents of one size, with int64 arguments, most of them addresses."""

    score: Any
    """(queries, latents, scores, stride): write to `scores[r * stride + j]` the product of row r of `queries`
    `[ROWS, D]` and the latent at the address `latents[j]`, for r < ROWS and j < KEYS; meanwhile prefetch the latents at
    `latents[AHEAD + j]`."""
    blend: Any
    """(weights, stride, latents, count, sums): add to row r of `sums` `[ROWS, C]` the first C elements of the latent at
    the address `latents[j]`, times `weights[r * stride + j]`, for j < count in ascending order."""


def latent_loops(size: int, rank: int) -> LatentLoops:
    """Return the loops for D = `size` and C = `rank`, multiples of 4."""

    def score(context: Any, queries: Any, latents: Any, scores: Any, stride: Any) -> Any:
        def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
            _emit_score(builder, *with_pointers(builder, args, {0: _FLOAT, 1: _LONG, 2: _FLOAT}), size=size)
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 4), generate

    def blend(context: Any, weights: Any, stride: Any, latents: Any, count: Any, sums: Any) -> Any:
        def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
            _emit_blend(builder, *with_pointers(builder, args, {0: _FLOAT, 2: _LONG, 4: _FLOAT}), rank=rank)
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return LatentLoops(score=intrinsic(score), blend=intrinsic(blend))


def _lanes(size: int) -> int:
    return next(lanes for lanes in (16, 8, 4) if size % lanes == 0)


def _latent(builder: Any, latents: Any, j: Any) -> Any:
    """Return a pointer to the latent at the address `latents[j]`."""
    return builder.inttoptr(builder.load(builder.gep(latents, [j])), _FLOAT)


def _emit_score(builder: Any, queries: Any, latents: Any, scores: Any, stride: Any, *, size: int) -> None:
    lanes = _lanes(size)
    vector = vector_of(lanes)
    keys = [_latent(builder, latents, INDEX(j)) for j in range(KEYS)]
    asked = [_latent(builder, latents, INDEX(AHEAD + j)) for j in range(KEYS)]
    zeros = ir.Constant(vector, [0.0] * lanes)
    before, loop, after = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("after")
    builder.branch(loop)

    builder.position_at_end(loop)
    d = builder.phi(INDEX)
    sums = [[builder.phi(vector) for _ in keys] for _ in range(ROWS)]
    for at in asked:
        prefetch(builder, builder.gep(at, [d]))
    key = [load(builder, builder.gep(at, [d]), vector) for at in keys]
    new: list[list[Any]] = []
    for r in range(ROWS):
        query = load(builder, builder.gep(queries, [builder.add(d, INDEX(r * size))]), vector)
        new.append([multiply_add(builder, query, *pair) for pair in zip(key, sums[r], strict=True)])
    following = builder.add(d, INDEX(lanes))
    d.add_incoming(INDEX(0), before)
    d.add_incoming(following, loop)
    for row, row_after in zip(sums, new, strict=True):
        for phi, value in zip(row, row_after, strict=True):
            phi.add_incoming(zeros, before)
            phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following, INDEX(size)), loop, after)

    builder.position_at_end(after)
    for r, row in enumerate(new):
        for j, value in enumerate(row):
            place = builder.add(builder.mul(stride, INDEX(r)), INDEX(j))
            builder.store(total(builder, value), builder.gep(scores, [place]))


def _emit_blend(
    builder: Any, weights: Any, stride: Any, latents: Any, count: Any, sums: Any, *, rank: int
) -> None:  # fmt: skip
    """Emit a loop over latents for every few vectors of the sums, which stay in registers meanwhile."""
    lanes = _lanes(rank)
    for start in range(0, rank, KEYS * lanes):
        columns = range(start, min(start + KEYS * lanes, rank), lanes)
        _emit_blend_columns(builder, weights, stride, latents, count, sums, columns, rank=rank, lanes=lanes)


def _emit_blend_columns(
    builder: Any, weights: Any, stride: Any, latents: Any, count: Any, sums: Any, columns: range, *, rank: int,
    lanes: int,
) -> None:  # fmt: skip
    vector = vector_of(lanes)
    places = [[builder.gep(sums, [INDEX(r * rank + column)]) for column in columns] for r in range(ROWS)]
    first = [[load(builder, place, vector) for place in row] for row in places]
    before, loop, after = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("after")
    builder.branch(loop)

    builder.position_at_end(loop)
    j = builder.phi(INDEX)
    totals = [[builder.phi(vector) for _ in columns] for _ in range(ROWS)]
    latent = _latent(builder, latents, j)
    value = [load(builder, builder.gep(latent, [INDEX(column)]), vector) for column in columns]
    new: list[list[Any]] = []
    for r in range(ROWS):
        place = builder.add(builder.mul(stride, INDEX(r)), j)
        weight = spread(builder, builder.load(builder.gep(weights, [place])), vector)
        new.append([multiply_add(builder, weight, *pair) for pair in zip(value, totals[r], strict=True)])
    following = builder.add(j, INDEX(1))
    j.add_incoming(INDEX(0), before)
    j.add_incoming(following, loop)
    for r in range(ROWS):
        for i, phi in enumerate(totals[r]):
            phi.add_incoming(first[r][i], before)
            phi.add_incoming(new[r][i], loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, after)

    builder.position_at_end(after)
    for row, row_after in zip(places, new, strict=True):
        for place, total_ in zip(row, row_after, strict=True):
            store(builder, total_, place)
