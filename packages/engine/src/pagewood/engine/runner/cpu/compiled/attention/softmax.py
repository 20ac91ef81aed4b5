"""The softmax weights of one block of scores, in vector registers.

Scores may have a soft cap c: each becomes c tanh(score / c).

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

from pagewood.engine.runner.cpu.compiled.machine.vectors import (
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
_SMALL = 0.625  # below this, the hyperbolic tangent of x is x plus a polynomial
_TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
_COEFFICIENTS = (1.9841270e-4, 1.3888889e-3, 8.3333333e-3, 4.1666667e-2, 1.6666667e-1, 0.5, 1.0, 1.0)


def weigher(width: int) -> Any:
    """Return the intrinsic that turns a block of scores of a query row into weights, for rows of `width` sums.

    It is called with (scores, at, cap, maxima, totals, sums, r). The 64 scores from `at` on are capped unless `cap` is
    0. Then each is replaced by e to the power of its distance to the largest score of query row r so far. `maxima[r]`,
    `totals[r]` and `sums[r, :]` are rescaled to that largest score, and the weights are added to `totals[r]`. The
    weight of minus infinity is 0.

    It is one intrinsic, because numba counts the references to arrays that a function gets: eight atomic operations.

    Args:
        width: a multiple of 4.
    """

    def typed(context: Any, scores: Any, at: Any, cap: Any, maxima: Any, totals: Any, sums: Any, r: Any) -> Any:
        def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
            def pointer(array: int, index: Any) -> Any:
                return data_at(ctx, builder, sig.args[array], args[array], index)

            scores_at, row_of_sums = pointer(0, args[1]), pointer(5, builder.mul(args[6], INDEX(width)))
            with builder.if_then(builder.fcmp_unordered("!=", args[2], ir.Constant(args[2].type, 0.0))):
                _emit_cap(builder, scores_at, args[2])
            _emit_weigh(builder, scores_at, pointer(3, args[6]), pointer(4, args[6]), row_of_sums, width)
            return ctx.get_dummy_value()

        return types.void(scores, types.int64, types.float32, maxima, totals, sums, types.int64), generate

    return intrinsic(typed)


def _emit_cap(builder: Any, scores: Any, cap: Any) -> None:
    """Replace each score of a block by `cap` times the hyperbolic tangent of their quotient; minus infinity stays."""
    vector = vector_of(_LANES)
    unseen, caps = ir.Constant(vector, [float("-inf")] * _LANES), spread(builder, cap, vector)
    for i in range(0, BLOCK, _LANES):
        place = builder.gep(scores, [INDEX(i)])
        row = load(builder, place, vector)
        capped = builder.fmul(_tanh(builder, builder.fdiv(row, caps)), caps)
        store(builder, builder.select(builder.fcmp_ordered("==", row, unseen), unseen, capped), place)


def _emit_weigh(builder: Any, scores: Any, maximum: Any, total_at: Any, sums: Any, width: int) -> None:
    vector = vector_of(_LANES)
    places = [builder.gep(scores, [INDEX(i)]) for i in range(0, BLOCK, _LANES)]
    rows = [load(builder, place, vector) for place in places]
    lowest = builder.load(maximum)
    folded = _folded(rows, lambda a, b: _larger(builder, a, b))
    largest = _larger(builder, by_halves(builder, folded, _larger), lowest)
    weights = [_exp(builder, builder.fsub(row, spread(builder, largest, vector))) for row in rows]
    for place, weight in zip(places, weights, strict=True):
        store(builder, weight, place)
    with builder.if_then(builder.fcmp_unordered("!=", largest, lowest)):
        shrink = _exp(builder, spread(builder, builder.fsub(lowest, largest), vector))
        factor = builder.extract_element(shrink, INDEX(0))
        builder.store(largest, maximum)
        builder.store(builder.fmul(builder.load(total_at), factor), total_at)
        lanes = next(lanes for lanes in (16, 8, 4) if width % lanes == 0)
        for d in range(0, width, lanes):
            place = builder.gep(sums, [INDEX(d)])
            part = load(builder, place, vector_of(lanes))
            store(builder, builder.fmul(part, spread(builder, factor, vector_of(lanes))), place)
    builder.store(builder.fadd(builder.load(total_at), total(builder, _folded(weights, builder.fadd))), total_at)


def _folded(rows: Sequence[Any], combine: Callable[[Any, Any], Any]) -> Any:
    """Return one vector of several, their number a power of two: the second half is combined with the first."""
    while len(rows) > 1:
        half = len(rows) // 2
        rows = [combine(a, b) for a, b in zip(rows[:half], rows[half:], strict=True)]
    return rows[0]


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _tanh(builder: Any, x: Any) -> Any:
    """Return the hyperbolic tangents of a vector, by those of its absolute values; NaN stays NaN."""
    kind = x.type

    def constant(value: float) -> Any:
        return ir.Constant(kind, [value] * kind.count)

    one, is_negative = constant(1.0), builder.fcmp_ordered("<", x, constant(0.0))
    size = builder.select(is_negative, builder.fsub(constant(0.0), x), x)
    power = _exp(builder, builder.fmul(size, constant(-2.0)))
    large = builder.fdiv(builder.fsub(one, power), builder.fadd(one, power))
    square, p = builder.fmul(x, x), constant(_TANH[0])
    for coefficient in _TANH[1:]:
        p = multiply_add(builder, p, square, constant(coefficient))
    small = multiply_add(builder, builder.fmul(p, square), x, x)
    signed = builder.select(is_negative, builder.fsub(constant(0.0), large), large)
    return builder.select(builder.fcmp_ordered("<", size, constant(_SMALL)), small, signed)


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
