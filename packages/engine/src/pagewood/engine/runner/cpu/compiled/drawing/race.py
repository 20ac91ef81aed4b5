"""The race by which a token is drawn: almost every token is ruled out by its hash and a lower bound of a logarithm.

A token d below the largest logit arrives at time E e^d, with its noise E; the first to arrive is drawn. The logarithm
of the time, log E + d, is computed only if a lower bound of it is below that of the first token so far. For the hash h
of a token, E > h / 2^32. And log2 of a float32 is at least its bits divided by 2^23, less 127, because
log2(1 + m) >= m. So the bound needs no logarithm, and it is computed for 16 tokens at once.

Legend: V vocab_size.
Source: Maddison, Tarlow and Minka, A* sampling, 2014 (the race, and bounds that end it early).
"""

# pyright: basic
# numba and llvmlite have no types.

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from pagewood.engine.runner.cpu.compiled.drawing.noise import exponential
from pagewood.engine.runner.cpu.compiled.machine.kernel import exact
from pagewood.engine.runner.cpu.compiled.machine.vectors import INDEX, data_at, load, multiply_add, spread, vector_of
from pagewood.engine.runner.splitmix import TOKEN_FACTORS

_F = np.float32
_BLOCK = 64  # tokens that are bounded together, one bit each
_LANES = 16
_WORD = ir.IntType(32)
_LEAST_LOG = -23.0  # all noise is above e to this power
_MARGIN = 0.01  # of a bound, for its rounding
_LOG_UNIT = math.log(2.0) / (1 << 23)  # from the bits of a float32 to its natural logarithm
# Of h / 2, which is at most E 2^31. Half of the hash, because processors convert signed integers faster.
_LOG_OFFSET = (127.0 + 31.0) * math.log(2.0)


def _may_win(
    context: Any, logits: Any, start: Any, low: Any, high: Any, lowest: Any, top: Any, inverse: Any, reach: Any
) -> Any:
    def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        first = data_at(ctx, builder, sig.args[0], args[0], args[1])
        return _emit_may_win(builder, first, args[1], *args[2:])

    numbers = (types.float32,) * 4
    return types.uint64(logits, types.int64, types.uint32, types.uint32, *numbers), generate


_block_of: Any = intrinsic(_may_win)
"""Returns a bit for each of 64 tokens: whether its logit is at least `lowest` and its bound is at most `reach`.

Called with (logits, start, low, high, lowest, top, inverse, reach): the row and its first token of the block; the
halves of the row's key, uint32; and float32: the largest logit `top`, and the inverse of the temperature.
"""


def _emit_may_win(
    builder: Any, first: Any, start: Any, low: Any, high: Any, lowest: Any, top: Any, inverse: Any, reach: Any
) -> Any:
    vector, words = vector_of(_LANES), ir.VectorType(_WORD, _LANES)
    rows = [load(builder, builder.gep(first, [INDEX(at)]), vector) for at in range(0, _BLOCK, _LANES)]
    lowest, top, inverse, reach = (spread(builder, number, vector) for number in (lowest, top, inverse, reach))
    near = [builder.fcmp_ordered(">=", row, lowest) for row in rows]
    result = cgutils.alloca_once(builder, INDEX)  # in the entry block: in a loop it would grow the stack
    builder.store(INDEX(0), result)
    with builder.if_then(builder.icmp_unsigned("!=", _bits_of(builder, near), INDEX(0))):
        low, high = spread(builder, low, words), spread(builder, high, words)
        token = spread(builder, builder.trunc(start, _WORD), words)
        candidates = []
        for at, (row, is_near) in enumerate(zip(rows, near, strict=True)):
            lanes = ir.Constant(words, [at * _LANES + lane for lane in range(_LANES)])
            bits = _emit_token_bits(builder, builder.add(token, lanes), low, high)
            half = builder.sitofp(builder.lshr(bits, _equal(words, 1)), vector)
            log = builder.sitofp(builder.bitcast(half, words), vector)
            distance = builder.fmul(builder.fsub(top, row), inverse)
            bound = multiply_add(builder, log, _equal(vector, _LOG_UNIT), distance)
            candidates.append(builder.and_(is_near, builder.fcmp_ordered("<=", bound, reach)))
        builder.store(_bits_of(builder, candidates), result)
    return builder.load(result)


def _emit_token_bits(builder: Any, tokens: Any, low: Any, high: Any) -> Any:
    """Return `splitmix.token_bits` of a vector of tokens."""
    kind = tokens.type

    def folded(bits: Any, shift: int) -> Any:
        return builder.xor(bits, builder.lshr(bits, _equal(kind, shift)))

    bits = builder.add(builder.mul(tokens, _equal(kind, TOKEN_FACTORS[0])), low)
    bits = builder.mul(folded(bits, 16), _equal(kind, TOKEN_FACTORS[1]))
    bits = builder.add(folded(bits, 13), high)
    bits = builder.mul(folded(bits, 16), _equal(kind, TOKEN_FACTORS[2]))
    return folded(bits, 15)


def _equal(kind: Any, value: float) -> Any:
    """Return a vector of equal constants."""
    return ir.Constant(kind, [value] * kind.count)


def _bits_of(builder: Any, flags: list[Any]) -> Any:
    """Return vectors of flags as the bits of one integer, the first flag as the lowest bit."""
    result = INDEX(0)
    for at, vector in enumerate(flags):
        mask = builder.zext(builder.bitcast(vector, ir.IntType(_LANES)), INDEX)
        result = builder.or_(result, builder.shl(mask, INDEX(at * _LANES)))
    return result


@exact
def first_to_arrive(logits: Any, best: Any, temperature: Any, nearest: Any, limit: Any, key: Any) -> Any:
    """Return the token that wins the race, the first of equal ones.

    Args:
        logits: `[V] float32`, no NaN.
        best: the token with the largest logit.
        temperature: > 0, float32.
        nearest: how far below the largest logit a logit must be, both divided by the temperature; float32.
        limit: how far it may be; float32. A logit is in between.
        key: of the row's noise, uint64.
    """
    top, largest = logits[best], logits[best] / temperature
    winner, earliest = np.int64(best), math.log(exponential(key, best))
    if not abs(largest) < np.inf:
        return winner
    if nearest > _F(0.0):
        earliest = np.inf
    low, high = np.uint32(key), np.uint32(key >> np.uint64(32))
    margin = _MARGIN + abs(largest) * 2.0**-21
    inverse = _F(1.0) / temperature
    size = logits.shape[0]
    for start in range(0, size, _BLOCK):
        may_win = np.uint64(0xFFFFFFFFFFFFFFFF)
        if start + _BLOCK <= size:
            lowest = _F(top - (min(np.float64(limit), earliest - _LEAST_LOG) + margin) * temperature)
            may_win = _block_of(logits, start, low, high, lowest, top, inverse, _F(earliest + margin + _LOG_OFFSET))
        i = start
        while may_win != np.uint64(0) and i < size:
            if may_win & np.uint64(1) != np.uint64(0):
                distance = largest - logits[i] / temperature
                if nearest <= distance <= limit:
                    time = math.log(exponential(key, i)) + distance
                    if time < earliest or (time == earliest and i < winner):
                        winner, earliest = i, time
            may_win >>= np.uint64(1)
            i += 1
    return winner
