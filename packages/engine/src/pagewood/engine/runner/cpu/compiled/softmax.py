"""The softmax weights of one block of scores, in vector registers.

numba would compare and add the scores one by one, or in an order that the compiler chooses anew for each caller. Here
maximum and sum are taken by halves, so every caller gets the same bits.

Legend: B scores of a block.
"""

# pyright: basic
# numba and llvmlite have no types.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from pagewood.engine.runner.cpu.compiled.vectors import (
    INDEX,
    by_halves,
    data_at,
    floor,
    load,
    multiply_add,
    spread,
    store,
    total,
    vector_of,
)

BLOCK = 64
"""Scores of a block."""
_LANES = 16
_UNDERFLOW = -87.3  # below this, e to the power of x is taken for 0
_COEFFICIENTS = (1.9841270e-4, 1.3888889e-3, 8.3333333e-3, 4.1666667e-2, 1.6666667e-1, 0.5, 1.0, 1.0)


def _weigh(typing_context: Any, scores: Any, at: Any, lowest: Any, found: Any) -> Any:
    def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        block = data_at(ctx, builder, sig.args[0], args[0], args[1])
        vector = vector_of(_LANES)
        places = [builder.gep(block, [INDEX(i)]) for i in range(0, BLOCK, _LANES)]
        rows = [load(builder, place, vector) for place in places]
        folded = _folded(rows, lambda a, b: _larger(builder, a, b))
        largest = _larger(builder, by_halves(builder, folded, _larger), args[2])
        weights = [_exp(builder, builder.fsub(row, spread(builder, largest, vector))) for row in rows]
        for place, weight in zip(places, weights, strict=True):
            store(builder, weight, place)
        sum_ = total(builder, _folded(weights, builder.fadd))
        out = data_at(ctx, builder, sig.args[3], args[3], INDEX(0))
        builder.store(largest, out)
        builder.store(sum_, builder.gep(out, [INDEX(1)]))
        return ctx.get_dummy_value()

    return types.void(scores, types.int64, types.float32, found), generate


weigh_block: Any = intrinsic(_weigh)
"""(scores, at, lowest, found): replace 64 scores from `at` on by e to the power of each less the largest of them and of
`lowest`; write that largest and the sum of the weights to `found` `[2]`. The weight of minus infinity is 0."""


def _folded(rows: Sequence[Any], combine: Callable[[Any, Any], Any]) -> Any:
    """Return one vector of several, their number a power of two: the second half is combined with the first."""
    while len(rows) > 1:
        half = len(rows) // 2
        rows = [combine(a, b) for a, b in zip(rows[:half], rows[half:], strict=True)]
    return rows[0]


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _exp(builder: Any, x: Any) -> Any:
    """Return e to the power of a vector of numbers that are at most 0, as `numeric.exp` does; NaN stays NaN."""
    kind = x.type

    def constant(value: float) -> Any:
        return ir.Constant(kind, [value] * kind.count)

    is_above = builder.fcmp_ordered(">", x, constant(_UNDERFLOW))
    clamped = builder.select(is_above, x, constant(_UNDERFLOW))
    shifted = multiply_add(builder, clamped, constant(1.44269504), constant(0.5))
    n = floor(builder, shifted)
    r = multiply_add(builder, n, constant(-0.693359375), clamped)
    r = multiply_add(builder, n, constant(2.12194440e-4), r)
    p = constant(_COEFFICIENTS[0])
    for coefficient in _COEFFICIENTS[1:]:
        p = multiply_add(builder, p, r, constant(coefficient))
    whole = ir.VectorType(ir.IntType(32), kind.count)
    exponent = builder.add(builder.fptosi(n, whole), ir.Constant(whole, [127] * kind.count))
    power = builder.bitcast(builder.shl(exponent, ir.Constant(whole, [23] * kind.count)), kind)
    is_below = builder.fcmp_ordered("<=", x, constant(_UNDERFLOW))
    return builder.select(is_above, builder.fmul(p, power), builder.select(is_below, constant(0.0), x))
