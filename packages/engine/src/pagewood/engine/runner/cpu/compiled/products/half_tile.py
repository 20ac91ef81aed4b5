"""A tile of a few rows times a panel of 16-bit numbers.

Activations are float32, and the numbers are widened in registers: the sums have the order of `tile`, so the
result has the bits of a product with the widened weights. Or both are bfloat16, and two inputs are added at a time
(`pair_dot`).
"""

# pyright: basic
# numba and llvmlite have no types.

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from typing import Any

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
    vector_of,
    with_pointers,
)
from pagewood.engine.runner.cpu.compiled.products.pair_dot import PairDot, PairLevel, widened
from pagewood.engine.runner.cpu.compiled.products.tile import LOW, WIDTH, by_height_and_panels
from pagewood.engine.runner.cpu.compiled.products.weight_kind import WeightKind

_LANES = 16
_HALVES = range(0, WIDTH, _LANES)
_LINE = 64  # bytes of a cache line


def _pairs(builder: Any, at: Any) -> list[Any]:
    """Return two rows of a panel in bfloat16, `[2]` vectors of int32; `at` points to their first byte."""
    words = ir.VectorType(ir.IntType(32), _LANES)
    places = [builder.gep(at, [INDEX(4 * start)]) for start in _HALVES]
    return [builder.load(builder.bitcast(place, words.as_pointer()), align=4) for place in places]


def _widened(builder: Any, kind: WeightKind, at: Any) -> list[list[Any]]:
    """Return two rows of a panel, `[2][2]` vectors of float32; `at` points to their first byte."""
    if kind == WeightKind.BFLOAT16:
        return [list(row) for row in zip(*(widened(builder, both) for both in _pairs(builder, at)), strict=True)]
    vector, halves = vector_of(_LANES), ir.VectorType(ir.HalfType(), _LANES)

    def row(k: int, start: int) -> Any:
        place = builder.gep(at, [INDEX(2 * (k * WIDTH + start))])
        return builder.fpext(builder.load(builder.bitcast(place, halves.as_pointer()), align=2), vector)

    return [[row(k, start) for start in _HALVES] for k in range(2)]


def _add_widened(
    builder: Any, kind: WeightKind, rows: int, x: Any, depth: Any, pair: Any, places: Sequence[Any], sums: Any
) -> list[list[Any]]:
    """Return `sums` `[rows][2 panels]` plus the products of two inputs with each of some panels.

    `x` points to the rows, see `multiply_halves`, and `places` to the first byte of the inputs' weights in each panel.
    """
    vector = vector_of(_LANES)
    widened_panels = [_widened(builder, kind, at) for at in places]
    columns = [[half for panel in widened_panels for half in panel[k]] for k in range(2)]
    step, stride = (INDEX(1), depth) if rows <= LOW else (INDEX(rows), INDEX(1))
    new = [list(of_row) for of_row in sums]
    for k in range(2):
        start = builder.mul(builder.add(builder.mul(pair, INDEX(2)), INDEX(k)), step)
        for r in range(rows):
            place = builder.add(start, builder.mul(stride, INDEX(r)))
            value = spread(builder, builder.load(builder.gep(x, [place])), vector)
            new[r] = [multiply_add(builder, value, *one) for one in zip(columns[k], new[r], strict=True)]
    return new


def _add_pairs(
    builder: Any, level: PairLevel, rows: int, x: Any, pair: Any, places: Sequence[Any], sums: Any
) -> list[list[Any]]:
    """Like `_add_widened`; `x` points to `[D / 2, rows, 2] bfloat16`."""
    dot = PairDot(builder, level)
    columns = [dot.prepare(pairs) for at in places for pairs in _pairs(builder, at)]
    words = builder.bitcast(x, ir.IntType(32).as_pointer())
    start = builder.mul(pair, INDEX(rows))
    new: list[list[Any]] = []
    for r in range(rows):
        activations = dot.spread(builder.load(builder.gep(words, [builder.add(start, INDEX(r))])))
        new.append([dot.add(total, column, activations) for total, column in zip(sums[r], columns, strict=True)])
    return new


def _emit(builder: Any, kind: WeightKind, level: IntEnum, rows: int, num_panels: int, args: Any) -> None:
    """Emit a loop over pairs of inputs, ascending; see `multiply_halves` for `args`."""
    x, panel, bias, out, stride, depth, ahead, ahead_step = args
    vector, starts = vector_of(_LANES), range(0, num_panels * WIDTH, _LANES)
    first = [load(builder, builder.gep(bias, [INDEX(start)]), vector) for start in starts]
    before, loop, after = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("after")
    builder.branch(loop)
    builder.position_at_end(loop)
    pair = builder.phi(INDEX)
    sums = [[builder.phi(vector) for _ in starts] for _ in range(rows)]
    asked = builder.gep(ahead, [builder.mul(pair, ahead_step)])
    for line in range(num_panels * 4 * WIDTH // _LINE):
        prefetch(builder, builder.gep(asked, [INDEX(line * _LINE)]))
    at = builder.gep(panel, [builder.mul(pair, INDEX(4 * WIDTH))])
    places = [builder.gep(at, [builder.mul(depth, INDEX(2 * WIDTH * one))]) for one in range(num_panels)]
    if kind == WeightKind.BFLOAT16_PAIRS:
        assert isinstance(level, PairLevel)
        new = _add_pairs(builder, level, rows, x, pair, places, sums)
    else:
        new = _add_widened(builder, kind, rows, x, depth, pair, places, sums)
    following = builder.add(pair, INDEX(1))
    pair.add_incoming(INDEX(0), before)
    pair.add_incoming(following, loop)
    for r in range(rows):
        for h in range(len(starts)):
            sums[r][h].add_incoming(first[h], before)
            sums[r][h].add_incoming(new[r][h], loop)
    builder.cbranch(builder.icmp_signed("<", following, builder.lshr(depth, INDEX(1))), loop, after)
    builder.position_at_end(after)
    for r in range(rows):
        for start, total in zip(starts, new[r], strict=True):
            place = builder.add(builder.mul(stride, INDEX(r)), INDEX(start))
            store(builder, total, builder.gep(out, [place]))


@cache
def multiply_halves(kind: WeightKind, level: IntEnum) -> Any:
    """Return the function that computes a tile, with int64 arguments, most of them addresses.

    (height, x, panel, bias, out, stride, depth, ahead, ahead_step): `height` <= TALL rows, `[height, depth] float32`
    or, above LOW, packed `[depth, height]`, or, for BFLOAT16_PAIRS, `[depth / 2, height, 2] bfloat16`, times a panel of
    `kind`, plus `bias` `[32]`, to `out` with `stride` floats between rows. Or, with TWO_PANELS as `height`, one row
    times two panels, to 64 floats. `depth` is even. Meanwhile prefetches the bytes from `ahead` on, `ahead_step` for
    every two inputs.
    """

    def tile(context: Any, height: Any, x: Any, panel: Any, bias: Any, out: Any, stride: Any, depth: Any,
             ahead: Any, ahead_step: Any) -> Any:  # fmt: skip
        def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
            byte, number = ir.IntType(8).as_pointer(), ir.FloatType().as_pointer()
            values = with_pointers(builder, args, {1: number, 2: byte, 3: number, 4: number, 7: byte})

            def emit(rows: int, num_panels: int) -> None:
                _emit(builder, kind, level, rows, num_panels, values[1:])

            by_height_and_panels(builder, args[0], emit)
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 9), generate

    return intrinsic(tile)
