"""Sums of products of two bfloat16 numbers each in float32, by the instruction that the processor has for them.

A sum of two pairs is `fma(a0, b0, fma(a1, b1, sum))`: the product of the second numbers is added first, as the
instruction does it. A product of bfloat16 numbers is exact in float32, so processors without a fused addition give the
same bits. Levels differ only where a number, a product or a sum is below 2**-126, which the instruction takes for zero.
"""

# pyright: basic
# numba and llvmlite have no types.

from __future__ import annotations

from enum import IntEnum
from typing import Any

from llvmlite import ir

from pagewood.engine.runner.cpu.compiled.machine.vectors import multiply_add, spread, vector_of
from pagewood.engine.runner.cpu.compiled.products.dot import chosen_level, processor_has

_LANES = 16
_WORDS, _SUMS = ir.VectorType(ir.IntType(32), _LANES), vector_of(_LANES)


class PairLevel(IntEnum):
    """Instructions for sums of products of bfloat16 numbers, the fastest first."""

    AVX512_BF16 = 0
    """`vdpbf16ps` of 512 bits."""
    WIDENED = 1
    """Two products of float32, on any processor."""


def pair_levels() -> list[PairLevel]:
    """Return the levels of this processor, the fastest first."""
    has = all(map(processor_has, ("avx512f", "avx512bf16")))
    return [PairLevel.AVX512_BF16, PairLevel.WIDENED] if has else [PairLevel.WIDENED]


def pair_level() -> PairLevel:
    """Return the fastest level of this processor, or the one that the environment's PAGEWOOD_BFLOAT16_DOT asks for.

    Raises:
        ValueError: PAGEWOOD_BFLOAT16_DOT is not the name of a level, or the processor lacks it.
    """
    return chosen_level(pair_levels(), "PAGEWOOD_BFLOAT16_DOT")


class PairDot:
    """Emits sums of products at one level.

    A vector of weights is `[16, 2] bfloat16`, an activation is a pair in an int32, the same for all lanes.
    """

    __slots__ = ("_builder", "_level")

    def __init__(self, builder: Any, level: PairLevel) -> None:
        self._builder = builder
        self._level = level

    def prepare(self, pairs: Any) -> Any:
        """Return `pairs` `<16 x i32>`, weights or a spread activation, as `add` wants them."""
        return pairs if self._level == PairLevel.AVX512_BF16 else widened(self._builder, pairs)

    def spread(self, activation: Any) -> Any:
        """Return a pair `i32` for all lanes, as `add` wants it."""
        return self.prepare(spread(self._builder, activation, _WORDS))

    def add(self, sums: Any, weights: Any, activations: Any) -> Any:
        """Return `sums` plus the two products of each lane; both others come from `prepare`."""
        builder = self._builder
        if self._level == PairLevel.WIDENED:
            for weight, activation in zip(reversed(weights), reversed(activations), strict=True):
                sums = multiply_add(builder, activation, weight, sums)
            return sums
        name, module = "llvm.x86.avx512bf16.dpbf16ps.512", builder.module
        kind = ir.FunctionType(_SUMS, [_SUMS, _WORDS, _WORDS])  # since LLVM 16 of bfloat, to which LLVM changes it
        return builder.call(module.globals.get(name) or ir.Function(module, kind, name), [sums, weights, activations])


def widened(builder: Any, pairs: Any) -> list[Any]:
    """Return the first and the second numbers of `pairs` `<16 x i32>` as vectors of float32."""
    shift, mask = (ir.Constant(_WORDS, [value] * _LANES) for value in (16, 0xFFFF0000))
    return [builder.bitcast(one, _SUMS) for one in (builder.shl(pairs, shift), builder.and_(pairs, mask))]
