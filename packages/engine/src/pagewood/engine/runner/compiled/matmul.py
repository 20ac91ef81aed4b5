"""Matrix products with weights laid out in panels, for any number of rows.

A projection `[out, in]` is kept as panels of 32 outputs: `panels[p, k, j]` weighs input k for output 32 p + j.
A tile of a few rows times one panel is computed in vector registers, in one pass over the panel, which lies in memory
as it is read. So one row costs what reading the weights costs, many rows cost what the arithmetic costs, and there is
one copy of the weights. Every element is summed over k in ascending order, whatever the tile: a row of the result
depends on nothing but its own input, to the last bit.

Legend: T rows, K inputs, N outputs, P panels.
Source: Goto and van de Geijn, Anatomy of high-performance matrix multiplication, 2008.
"""

# pyright: basic
# numba and llvmlite have no types.

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from pagewood.engine.runner.compiled.kernel import inlined, kernel

WIDTH = 32
"""Outputs of a panel."""
_LANES = 16
_TALL = 12 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 3
"""Rows of the largest tile: its sums fill the vector registers, and leave some for the weights."""
_MIDDLE = 4 if _TALL > 4 else 2
_BLOCK = 8 * _TALL  # rows that one thread takes at a time


def _tile(rows: int) -> Any:
    """Return a function that multiplies a tile of `rows` rows with a panel, its sums in registers."""

    def typed(
        context: Any, x: Any, x_at: Any, panels: Any, panel_at: Any, depth: Any, bias: Any, bias_at: Any, out: Any,
        out_at: Any, out_stride: Any,
    ) -> Any:  # fmt: skip
        index = types.int64
        signature = types.void(x, index, panels, index, index, bias, index, out, index, index)
        return signature, lambda ctx, builder, sig, args: _generate(ctx, builder, sig, args, rows)

    return intrinsic(typed)


def _generate(context: Any, builder: Any, signature: Any, arguments: Any, rows: int) -> Any:
    """Emit: sums = bias; for k in range(depth): sums[r] += x[k * rows + r] * panel[k]; out[r] = sums[r]."""
    vector, halves = ir.VectorType(ir.FloatType(), _LANES), range(WIDTH // _LANES)
    index = ir.IntType(64)

    def pointer(array: int, offset: Any) -> Any:
        data = context.make_array(signature.args[array])(context, builder, arguments[array]).data
        return builder.gep(data, [offset])

    def vector_at(base: Any, offset: Any) -> Any:
        return builder.bitcast(builder.gep(base, [offset]), vector.as_pointer())

    x, panel = pointer(0, arguments[1]), pointer(2, arguments[3])
    bias, out = pointer(5, arguments[6]), pointer(7, arguments[8])
    first = [builder.load(vector_at(bias, index(h * _LANES)), align=4) for h in halves]
    before, loop, after = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("after")
    builder.branch(loop)

    builder.position_at_end(loop)
    k = builder.phi(index)
    sums = [[builder.phi(vector) for _ in halves] for _ in range(rows)]
    row_of_panel = builder.mul(k, index(WIDTH))
    weights = [builder.load(vector_at(panel, builder.add(row_of_panel, index(h * _LANES))), align=4) for h in halves]
    column_of_x = builder.mul(k, index(rows))
    new = []
    for r in range(rows):
        scalar = builder.load(builder.gep(x, [builder.add(column_of_x, index(r))]))
        lane = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.IntType(32)(0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES)
        spread = builder.shuffle_vector(lane, ir.Constant(vector, ir.Undefined), zeros)
        fused = ("contract",)
        new.append(
            [builder.fadd(sums[r][h], builder.fmul(spread, weights[h], flags=fused), flags=fused) for h in halves]
        )
    next_k = builder.add(k, index(1))
    k.add_incoming(index(0), before)
    k.add_incoming(next_k, loop)
    for r in range(rows):
        for h in halves:
            sums[r][h].add_incoming(first[h], before)
            sums[r][h].add_incoming(new[r][h], loop)
    builder.cbranch(builder.icmp_signed("<", next_k, arguments[4]), loop, after)

    builder.position_at_end(after)
    for r in range(rows):
        row = builder.mul(arguments[9], index(r))
        for h in halves:
            builder.store(new[r][h], vector_at(out, builder.add(row, index(h * _LANES))), align=4)
    return context.get_dummy_value()


_tall, _middle, _pair, _single = _tile(_TALL), _tile(_MIDDLE), _tile(2), _tile(1)


@inlined
def _height(left: Any) -> Any:
    """Return how many of `left` rows the next tile takes."""
    if left >= _TALL:
        return _TALL
    if left >= _MIDDLE:
        return _MIDDLE
    return 2 if left >= 2 else 1


@inlined
def _pack(x: Any, packed: Any, first: Any, last: Any) -> None:
    """Copy rows [first, last) to `packed`, tile by tile, each tile `[K, rows of the tile]`; `first` starts a tile."""
    depth = x.shape[1]
    row = first
    while row < last:
        height = _height(x.shape[0] - row)
        base = np.uint64(row * depth)
        for k in range(np.uint64(depth)):
            for r in range(np.uint64(height)):
                packed[base + k * np.uint64(height) + r] = x[np.uint64(row) + r, k]
        row += height


@inlined
def _multiply(packed: Any, panels: Any, bias: Any, out: Any, depth: Any, panel: Any, first: Any, last: Any,
              margin: Any) -> None:  # fmt: skip
    """Write rows [first, last) of one panel's outputs; `margin` `[tall, 32]` takes those of a panel that `out` cuts."""
    size = out.shape[1]
    column = panel * WIDTH
    cut = column + WIDTH > size
    row = first
    while row < last:
        height = _height(out.shape[0] - row)
        target, at, stride = (margin, 0, WIDTH) if cut else (out.reshape(-1), row * size + column, size)
        if height == _TALL:
            _tall(packed, row * depth, panels, panel * depth * WIDTH, depth, bias, column, target, at, stride)
        elif height == _MIDDLE:
            _middle(packed, row * depth, panels, panel * depth * WIDTH, depth, bias, column, target, at, stride)
        elif height == 2:
            _pair(packed, row * depth, panels, panel * depth * WIDTH, depth, bias, column, target, at, stride)
        else:
            _single(packed, row * depth, panels, panel * depth * WIDTH, depth, bias, column, target, at, stride)
        if cut:
            for r in range(height):
                for j in range(size - column):
                    out[row + r, column + j] = margin[r * WIDTH + j]
        row += height


@inlined
def _multiply_items(packed: Any, panels: Any, bias: Any, out: Any, depth: Any, first: Any, last: Any) -> None:
    """Compute items [first, last): item i is block i % blocks of the rows, times panel i // blocks."""
    num_rows = out.shape[0]
    num_blocks = (num_rows + _BLOCK - 1) // _BLOCK
    margin = np.empty(_TALL * WIDTH, np.float32)
    for item in range(first, last):
        panel, block = item // num_blocks, item % num_blocks
        _multiply(packed, panels, bias, out, depth, panel, block * _BLOCK, min((block + 1) * _BLOCK, num_rows), margin)


@inlined
def _num_items(out: Any) -> Any:
    return ((out.shape[0] + _BLOCK - 1) // _BLOCK) * ((out.shape[1] + WIDTH - 1) // WIDTH)


@kernel("void(f4[:,::1], f4[::1], f4[::1], f4[:,::1], f4[::1])")
def multiply(x: Any, panels: Any, bias: Any, out: Any, packed: Any) -> None:
    """Write `x` times the weights, plus the bias, to `out`.

    Args:
        x: `[T, K]`.
        panels: `[P * K * 32]`.
        bias: `[P * 32]`.
        out: `[T, N]`, written; 32 (P - 1) < N <= 32 P.
        packed: `[T * K]`, scratch.
    """
    _pack(x, packed, 0, x.shape[0])
    _multiply_items(packed, panels, bias, out, x.shape[1], 0, _num_items(out))


@kernel("void(f4[:,::1], f4[::1], f4[::1], f4[:,::1], f4[::1], i8)", parallel=True)
def multiply_parallel(x: Any, panels: Any, bias: Any, out: Any, packed: Any, num_parts: Any) -> None:
    """As `multiply`, by `num_parts` threads."""
    num_rows, depth, num_items = x.shape[0], x.shape[1], _num_items(out)
    if num_rows <= _TALL:
        _pack(x, packed, 0, num_rows)
    else:
        num_tiles = (num_rows + _TALL - 1) // _TALL
        for part in numba.prange(num_parts):
            last = min(num_tiles * (part + 1) // num_parts * _TALL, num_rows)
            _pack(x, packed, num_tiles * part // num_parts * _TALL, last)
    for part in numba.prange(num_parts):
        first, last = num_items * part // num_parts, num_items * (part + 1) // num_parts
        _multiply_items(packed, panels, bias, out, depth, first, last)
