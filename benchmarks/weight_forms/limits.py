# pyright: basic
# numba and llvmlite have no types.
"""The arithmetic that a processor can do at most: loops that touch registers only."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from time import perf_counter
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from pagewood.engine.runner.cpu.compiled.machine.vectors import INDEX, multiply_add, spread, total, vector_of
from pagewood.engine.runner.cpu.compiled.products.dot import ByteDot, DotLevel, dot_level, processor_has
from pagewood.engine.runner.cpu.compiled.products.pair_dot import PairDot, PairLevel, pair_level

_SECONDS = 0.01  # of one pass
_PASSES = 40
_PAIR_LANES = 16
_CHAINS = 24  # sums that do not wait for each other, as in the largest tile of the kernels


def _lanes() -> int:
    """Return the float32 elements of a vector register."""
    return 16 if processor_has("avx512f") else 8 if processor_has("avx") else 4


def _chains(lanes: int) -> int:
    """Return how many sums fit into the registers; 32 of them where vectors have 512 bits."""
    return _CHAINS if lanes == 16 else _CHAINS // 2


def _pair_chains() -> int:
    """Return how many sums of products of pairs fit into the registers."""
    return _chains(_lanes()) * _lanes() // _PAIR_LANES


def _loop(builder: Any, count: Any, firsts: list[Any], step: Callable[[Any], Any]) -> list[Any]:
    """Emit a loop that applies `step` to each of some values, and return their last values."""
    before, loop, after = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("after")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(INDEX)
    values = [builder.phi(first.type) for first in firsts]
    new = [step(value) for value in values]
    following = builder.add(index, INDEX(1))
    index.add_incoming(INDEX(0), before)
    index.add_incoming(following, loop)
    for value, first, one in zip(values, firsts, new, strict=True):
        value.add_incoming(first, before)
        value.add_incoming(one, loop)
    builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
    builder.position_at_end(after)
    return new


def _multiply_adds(context: Any, count: Any, factor: Any) -> Any:
    def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
        lanes = _lanes()
        vector = vector_of(lanes)
        x = spread(builder, args[1], vector)
        firsts = [spread(builder, ir.Constant(ir.FloatType(), float(i)), vector) for i in range(_chains(lanes))]
        ends = _loop(builder, args[0], firsts, lambda value: multiply_add(builder, x, x, value))
        while len(ends) > 1:
            ends.append(builder.fadd(ends.pop(0), ends.pop(0)))
        return total(builder, ends[0])

    return types.float32(types.int64, types.float32), generate


_fma_loop: Any = intrinsic(_multiply_adds)


@cache
def _dot_loop(level: DotLevel) -> Any:
    def products(context: Any, count: Any, word: Any) -> Any:
        def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
            dot = ByteDot(builder, level)
            words = spread(builder, args[1], dot.sums)
            weights = dot.prepare(builder.bitcast(words, ir.VectorType(ir.IntType(8), 4 * dot.lanes)), bits=8)
            firsts = [spread(builder, ir.IntType(32)(i), dot.sums) for i in range(_chains(dot.lanes))]
            ends = _loop(builder, args[0], firsts, lambda value: dot.add(value, weights, args[1]))
            while len(ends) > 1:
                ends.append(builder.add(ends.pop(0), ends.pop(0)))
            return builder.extract_element(ends[0], ir.IntType(32)(0))

        return types.int32(types.int64, types.int32), generate

    return intrinsic(products)


@cache
def _pair_loop(level: PairLevel) -> Any:
    def products(context: Any, count: Any, word: Any) -> Any:
        def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
            dot = PairDot(builder, level)
            pairs = dot.spread(args[1])
            vector = vector_of(_PAIR_LANES)
            firsts = [spread(builder, ir.Constant(ir.FloatType(), float(i)), vector) for i in range(_pair_chains())]
            ends = _loop(builder, args[0], firsts, lambda value: dot.add(value, pairs, pairs))
            while len(ends) > 1:
                ends.append(builder.fadd(ends.pop(0), ends.pop(0)))
            return total(builder, ends[0])

        return types.float32(types.int64, types.int32), generate

    return intrinsic(products)


def multiply_add_limit(num_threads: int) -> float:
    """Return the float32 operations per second of `num_threads` threads: two for each element of a multiply-add."""
    emitted = _fma_loop

    @numba.njit(nogil=True)
    def run(count: Any, factor: Any) -> Any:
        return emitted(count, factor)

    lanes = _lanes()
    return _rate(lambda count: run(count, np.float32(0.5)), 2 * lanes * _chains(lanes), num_threads)


def dot_limit(num_threads: int, *, level: DotLevel | None = None) -> float:
    """Return the operations per second of sums of products of bytes: two for each product."""
    level = dot_level() if level is None else level
    emitted = _dot_loop(level)

    @numba.njit(nogil=True)
    def run(count: Any, word: Any) -> Any:
        return emitted(count, word)

    return _rate(
        lambda count: run(count, np.int32(0x01020304)), 2 * 4 * level.lanes * _chains(level.lanes), num_threads
    )


def pair_limit(num_threads: int) -> float:
    """Return the operations per second of sums of products of bfloat16 numbers: two for each product."""
    emitted = _pair_loop(pair_level())

    @numba.njit(nogil=True)
    def run(count: Any, word: Any) -> Any:
        return emitted(count, word)

    return _rate(lambda count: run(count, np.int32(0x3C003C00)), 2 * 2 * _PAIR_LANES * _pair_chains(), num_threads)


def _rate(run: Callable[[int], object], each: int, num_threads: int) -> float:
    """Return the best rate of all threads together, with `each` operations in one turn of a loop."""
    run(1)
    start, count = perf_counter(), 100_000
    run(count)
    count = max(1, int(count * _SECONDS / (perf_counter() - start)))
    best = float("inf")
    with ThreadPoolExecutor(num_threads) as threads:
        for _ in range(_PASSES):
            start = perf_counter()
            list(threads.map(run, [count] * num_threads))
            best = min(best, perf_counter() - start)
    return num_threads * count * each / best
