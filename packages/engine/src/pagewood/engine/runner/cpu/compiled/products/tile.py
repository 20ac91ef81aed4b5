"""A tile of a few rows times a panel of 32 columns, with its sums in vector registers: the inner loop of every product.

numba's loops keep their sums in memory. This one is emitted as vectors, so that a sum is read and written once.
"""

# pyright: basic
# numba and llvmlite have no types.

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from pagewood.engine.runner.cpu.compiled.machine.vectors import (
    INDEX,
    data_at,
    load,
    load_half,
    multiply_add,
    prefetch,
    spread,
    store,
    vector_of,
)

WIDTH = 32
"""Columns of a panel."""
NARROW = 16
"""Columns of a narrow one."""
TALL = 12 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 3
"""Rows of the largest tile: its sums fill the vector registers except for a few, which the panel needs."""
LOW = min(TALL, 8)
"""Most rows of a tile that is read where it is: there is a register for the address of each, and a place for each in
any set of a first-level cache, whatever the distance between them. A taller tile is packed."""
TWO_PANELS = 0
"""In place of a number of rows: one row, times two panels that follow each other. Its sums take turns in the adders of
the processor, which give a result after four cycles."""
_LANES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operands:
    """Pointers and numbers of a tile, as values of LLVM."""

    x: Any
    x_step: Any
    """From one k to the next."""
    x_stride: Any
    """From one row to the next."""
    panel: Any
    """To float32, or to bfloat16 if `is_half`."""
    panel_step: Any
    depth: Any
    initial: Any
    initial_stride: Any
    out: Any
    out_stride: Any
    ahead: Any = None
    """Memory that is prefetched, a little with every k; it need not exist."""
    ahead_step: Any = None
    width: int = WIDTH
    """Columns of the panel."""
    is_half: bool = False


def _emit(builder: Any, rows: int, of: _Operands) -> None:
    """Emit a loop over k < depth, ascending, that computes for r < rows and j < `of.width` what is written here.

    sums[r, j] = initial[r * initial_stride + j]
    sums[r, j] += x[k * x_step + r * x_stride] * panel[k * panel_step + j]
    out[r * out_stride + j] = sums[r, j]
    """
    vector, halves = vector_of(_LANES), range(0, of.width, _LANES)

    def sides(base: Any, stride: Any, r: int) -> list[Any]:
        return [builder.gep(base, [builder.add(builder.mul(stride, INDEX(r)), INDEX(half))]) for half in halves]

    first = [[load(builder, at, vector) for at in sides(of.initial, of.initial_stride, r)] for r in range(rows)]
    before, loop, after = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("after")
    builder.branch(loop)

    builder.position_at_end(loop)
    k = builder.phi(INDEX)
    sums = [[builder.phi(vector) for _ in halves] for _ in range(rows)]
    if of.ahead is not None:
        asked = builder.gep(of.ahead, [builder.mul(k, of.ahead_step)])
        for start in halves[:1] if of.is_half else halves:  # a line of a cache has 16 float32
            prefetch(builder, builder.gep(asked, [INDEX(start)]))
    row = builder.gep(of.panel, [builder.mul(k, of.panel_step)])
    columns = [(load_half if of.is_half else load)(builder, at, vector) for at in sides(row, INDEX(0), 0)]
    new: list[list[Any]] = []
    for r in range(rows):
        at = builder.add(builder.mul(k, of.x_step), builder.mul(of.x_stride, INDEX(r)))
        value = spread(builder, builder.load(builder.gep(of.x, [at])), vector)
        new.append([multiply_add(builder, value, *pair) for pair in zip(columns, sums[r], strict=True)])
    next_k = builder.add(k, INDEX(1))
    k.add_incoming(INDEX(0), before)
    k.add_incoming(next_k, loop)
    for r in range(rows):
        for h in range(len(halves)):
            sums[r][h].add_incoming(first[r][h], before)
            sums[r][h].add_incoming(new[r][h], loop)
    builder.cbranch(builder.icmp_signed("<", next_k, of.depth), loop, after)

    builder.position_at_end(after)
    for r in range(rows):
        for at, total in zip(sides(of.out, of.out_stride, r), new[r], strict=True):
            store(builder, total, at)


def by_height(builder: Any, height: Any, emit: Callable[[int], None]) -> None:
    """Emit code for every number of rows that a tile may have, of which that for `height` runs.

    Args:
        builder: emits the instructions; afterwards at the end of all.
        height: 1 to TALL.
        emit: called with each number of rows.
    """
    _by_case(builder, height, {rows: partial(emit, rows) for rows in range(1, TALL + 1)})


def by_height_and_panels(builder: Any, height: Any, emit: Callable[[int, int], None]) -> None:
    """Like `by_height`, with the further height TWO_PANELS; `emit` is called with numbers of rows and of panels."""
    cases = {rows: partial(emit, rows, 1) for rows in range(1, TALL + 1)}
    _by_case(builder, height, {TWO_PANELS: partial(emit, 1, 2), **cases})


def _by_case(builder: Any, value: Any, cases: Mapping[int, Callable[[], None]]) -> None:
    """Emit the code of each case, of which that for `value` runs; the builder is then at the end of all."""
    done = builder.append_basic_block("done")
    choice = builder.switch(value, done)
    for case, emit in cases.items():
        block = builder.append_basic_block(f"case{case}")
        choice.add_case(ir.Constant(INDEX, case), block)
        builder.position_at_end(block)
        emit()
        builder.branch(done)
    builder.position_at_end(done)


def _pointers(ctx: Any, builder: Any, sig: Any, args: Any, *places: int) -> list[Any]:
    """Return pointers into the arrays at these places of the arguments, each of which its index follows."""
    return [data_at(ctx, builder, sig.args[place], args[place], args[place + 1]) for place in places]


def _packed_tile(
    context: Any, height: Any, x: Any, x_at: Any, panel: Any, panel_at: Any, depth: Any, bias: Any, bias_at: Any,
    out: Any, out_at: Any, out_stride: Any, ahead_at: Any, ahead_step: Any,
) -> Any:  # fmt: skip
    n = types.int64

    def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        own_x, panels, biases, target = _pointers(ctx, builder, sig, args, 1, 3, 6, 8)
        ahead = data_at(ctx, builder, sig.args[3], args[3], args[11])

        def emit(rows: int) -> None:
            x_step, x_stride = (INDEX(1), args[5]) if rows <= LOW else (INDEX(rows), INDEX(1))
            operands = _Operands(
                x=own_x, x_step=x_step, x_stride=x_stride, panel=panels, panel_step=INDEX(WIDTH),
                depth=args[5], initial=biases, initial_stride=INDEX(0), out=target, out_stride=args[10],
                ahead=ahead, ahead_step=args[12],
            )  # fmt: skip
            _emit(builder, rows, operands)

        by_height(builder, args[0], emit)
        return ctx.get_dummy_value()

    return types.void(n, x, n, panel, n, n, bias, n, out, n, n, n, n), generate


def _rows_by(width: int, *, is_half: bool = False) -> Any:
    """Return the intrinsic that multiplies rows by a panel of so many columns."""

    def rows(
        context: Any, height: Any, x: Any, x_at: Any, x_stride: Any, panel: Any, panel_at: Any, depth: Any,
        initial: Any, initial_at: Any, out: Any, out_at: Any, out_stride: Any, ahead_at: Any, ahead_step: Any,
    ) -> Any:  # fmt: skip
        n = types.int64

        def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
            own_x, panels, initial_row, target = _pointers(ctx, builder, sig, args, 1, 4, 7, 9)
            operands = _Operands(
                x=own_x, x_step=INDEX(1), x_stride=args[3], panel=panels, panel_step=INDEX(width), depth=args[6],
                initial=initial_row, initial_stride=INDEX(0), out=target, out_stride=args[11],
                ahead=data_at(ctx, builder, sig.args[4], args[4], args[12]), ahead_step=args[13],
                width=width, is_half=is_half,
            )  # fmt: skip
            cases = {rows: partial(_emit, builder, rows, operands) for rows in range(1, LOW + 1)}
            _by_case(builder, args[0], cases)
            return ctx.get_dummy_value()

        return types.void(n, x, n, n, panel, n, n, initial, n, out, n, n, n, n), generate

    return intrinsic(rows)


def _tall(
    context: Any, x: Any, x_at: Any, x_step: Any, x_stride: Any, panel: Any, panel_at: Any, panel_step: Any,
    depth: Any, initial: Any, initial_at: Any, initial_stride: Any, out: Any, out_at: Any, out_stride: Any,
) -> Any:  # fmt: skip
    n = types.int64

    def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        own_x, panels, initial_row, target = _pointers(ctx, builder, sig, args, 0, 4, 8, 11)
        operands = _Operands(
            x=own_x, x_step=args[2], x_stride=args[3], panel=panels, panel_step=args[6], depth=args[7],
            initial=initial_row, initial_stride=args[10], out=target, out_stride=args[13],
        )  # fmt: skip
        _emit(builder, TALL, operands)
        return ctx.get_dummy_value()

    return types.void(x, n, n, n, panel, n, n, n, initial, n, n, out, n, n), generate


multiply_packed: Any = intrinsic(_packed_tile)
"""(height, x, x_at, panel, panel_at, depth, bias, bias_at, out, out_at, out_stride, ahead_at, ahead_step): a tile of
`height` <= TALL rows, `[height, depth]` or, above LOW, packed `[depth, height]`, times a panel `[depth, 32]`, plus the
bias; meanwhile prefetches panel[ahead_at + k * ahead_step], which need not exist, for every k < depth."""
multiply_rows: Any = _rows_by(WIDTH)
"""(height, x, x_at, x_stride, panel, panel_at, depth, bias, bias_at, out, out_at, out_stride, ahead_at, ahead_step):
like `multiply_packed` for `height` <= LOW rows that are `x_stride` apart."""
multiply_narrow: Any = _rows_by(NARROW)
"""The same by a panel `[depth, 16]`."""
multiply_rows_by_half: Any = _rows_by(WIDTH, is_half=True)
"""Like `multiply_rows` by a panel of bfloat16 as uint16, which is widened in registers: with the bits of a product with
the widened panel."""
multiply_narrow_by_half: Any = _rows_by(NARROW, is_half=True)
"""The same by a panel `[depth, 16]`."""
multiply_tall: Any = intrinsic(_tall)
"""(x, x_at, x_step, x_stride, panel, panel_at, panel_step, depth, initial, initial_at, initial_stride, out, out_at,
out_stride): TALL rows, laid out in any way. Steps and strides should be constants: they then cost nothing."""
