"""A tile of a few rows times a panel of 32 columns, its sums in vector registers: the inner loop of every product.

numba's loops keep their sums in memory; this one is emitted as vectors, so that a sum is read and written once.
"""

# pyright: basic
# numba and llvmlite have no types.

from __future__ import annotations

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

WIDTH = 32
"""Columns of a panel."""
TALL = 12 if llvmlite.binding.get_host_cpu_features().get("avx512f") else 3
"""Rows of the largest tile: its sums fill the vector registers, and leave some for the panel."""
MIDDLE = 4 if TALL > 4 else 2
"""Rows of the second largest."""
_LANES = 16
_FUSED = ("contract",)


def _tile(rows: int) -> Any:
    """Return a function that multiplies a tile of `rows` rows with a panel.

    It computes, for r < rows and j < 32, in ascending order of k < depth:

        sums[r, j] = initial[initial_at + r * initial_stride + j]
        sums[r, j] += x[x_at + k * x_step + r * x_stride] * panel[panel_at + k * panel_step + j]
        out[out_at + r * out_stride + j] = sums[r, j]

    Steps and strides should be constants of the caller: they then cost nothing.
    """

    def typed(
        context: Any, x: Any, x_at: Any, x_step: Any, x_stride: Any, panel: Any, panel_at: Any, panel_step: Any,
        depth: Any, initial: Any, initial_at: Any, initial_stride: Any, out: Any, out_at: Any, out_stride: Any,
    ) -> Any:  # fmt: skip
        n = types.int64
        signature = types.void(x, n, n, n, panel, n, n, n, initial, n, n, out, n, n)
        return signature, lambda ctx, builder, sig, args: _generate(ctx, builder, sig, args, rows)

    return intrinsic(typed)


def _generate(context: Any, builder: Any, signature: Any, arguments: Any, rows: int) -> Any:
    """Emit the loop that `_tile` describes."""
    x_at, x_step, x_stride, panel_at, panel_step, depth = (arguments[i] for i in (1, 2, 3, 5, 6, 7))
    initial_at, initial_stride, out_at, out_stride = (arguments[i] for i in (9, 10, 12, 13))
    vector, index, halves = ir.VectorType(ir.FloatType(), _LANES), ir.IntType(64), range(WIDTH // _LANES)

    def pointer(array: int, offset: Any) -> Any:
        data = context.make_array(signature.args[array])(context, builder, arguments[array]).data
        return builder.gep(data, [offset])

    def half(base: Any, offset: Any, h: int) -> Any:
        return builder.bitcast(builder.gep(base, [builder.add(offset, index(h * _LANES))]), vector.as_pointer())

    def spread(scalar: Any) -> Any:
        undefined = ir.Constant(vector, ir.Undefined)
        first = builder.insert_element(undefined, scalar, ir.IntType(32)(0))
        return builder.shuffle_vector(
            first, undefined, ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES)
        )

    x, panel, initial, out = pointer(0, x_at), pointer(4, panel_at), pointer(8, initial_at), pointer(11, out_at)
    first = [
        [builder.load(half(initial, builder.mul(initial_stride, index(r)), h), align=4) for h in halves]
        for r in range(rows)
    ]
    before, loop, after = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("after")
    builder.branch(loop)

    builder.position_at_end(loop)
    k = builder.phi(index)
    sums = [[builder.phi(vector) for _ in halves] for _ in range(rows)]
    columns = [builder.load(half(panel, builder.mul(k, panel_step), h), align=4) for h in halves]
    new: list[list[Any]] = []
    for r in range(rows):
        at = builder.add(builder.mul(k, x_step), builder.mul(x_stride, index(r)))
        value = spread(builder.load(builder.gep(x, [at])))
        products = [builder.fmul(value, columns[h], flags=_FUSED) for h in halves]
        new.append([builder.fadd(sums[r][h], products[h], flags=_FUSED) for h in halves])
    next_k = builder.add(k, index(1))
    k.add_incoming(index(0), before)
    k.add_incoming(next_k, loop)
    for r in range(rows):
        for h in halves:
            sums[r][h].add_incoming(first[r][h], before)
            sums[r][h].add_incoming(new[r][h], loop)
    builder.cbranch(builder.icmp_signed("<", next_k, depth), loop, after)

    builder.position_at_end(after)
    for r in range(rows):
        for h in halves:
            builder.store(new[r][h], half(out, builder.mul(out_stride, index(r)), h), align=4)
    return context.get_dummy_value()


tall, middle, pair, single = _tile(TALL), _tile(MIDDLE), _tile(2), _tile(1)
