"""Sums of products of bytes, exact in int32, by the instructions that the processor has for them.

Every level gives the same sums (but for `ByteDot.shift`, which callers take into account), so which one is chosen
changes no bit of any result.
"""

# pyright: basic
# numba and llvmlite have no types.

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, TypeVar

import llvmlite.binding
from llvmlite import ir
from numba.core import config

from pagewood.engine.runner.cpu.compiled.machine.vectors import spread

_BYTE, _SHORT, _WORD = ir.IntType(8), ir.IntType(16), ir.IntType(32)
_TAKES_BYTES = llvmlite.binding.llvm_version_info[0] >= 22  # earlier, vpdpbusd took its bytes as int32

Level = TypeVar("Level", bound=IntEnum)


class DotLevel(IntEnum):
    """Instructions for sums of products of bytes, from the fastest to the most common."""

    AVX512_VNNI = 0
    """`vpdpbusd` of 512 bits."""
    AVX_VNNI = 1
    """`vpdpbusd` of 256 bits."""
    AVX2 = 2
    """`vpmaddubsw` and `vpmaddwd`, on four bits of a weight at a time, so that nothing saturates."""
    SDOT = 4
    """`sdot` of 128 bits, on ARM (aarch64)."""
    PLAIN = 3
    """Shifts and products of int32, on any processor."""

    @property
    def lanes(self) -> int:
        """Sums of a vector."""
        return {DotLevel.AVX512_VNNI: 16, DotLevel.SDOT: 4}.get(self, 8)


def processor_has(feature: str) -> bool:
    """Return whether kernels may use a feature of the processor, by its name in LLVM.

    numba compiles for this machine, or for what NUMBA_CPU_NAME and NUMBA_CPU_FEATURES say.
    """
    stated: str | None = getattr(config, "CPU_FEATURES", None)
    if stated is not None:
        return f"+{feature}" in stated.split(",")
    if getattr(config, "CPU_NAME", None) == "generic":
        return False
    return bool(llvmlite.binding.get_host_cpu_features().get(feature))


def dot_levels() -> list[DotLevel]:
    """Return the levels of this processor, the fastest first."""
    has = {
        DotLevel.AVX512_VNNI: all(map(processor_has, ("avx512f", "avx512bw", "avx512vnni"))),
        DotLevel.AVX_VNNI: processor_has("avxvnni") or all(map(processor_has, ("avx512vl", "avx512vnni"))),
        DotLevel.AVX2: processor_has("avx2"),
        DotLevel.SDOT: processor_has("dotprod"),
        DotLevel.PLAIN: True,
    }
    return [level for level in DotLevel if has[level]]


def dot_level() -> DotLevel:
    """Return the fastest level of this processor, or the one that the environment's PAGEWOOD_INTEGER_DOT asks for.

    Raises:
        ValueError: PAGEWOOD_INTEGER_DOT is not the name of a level, or the processor lacks it.
    """
    return chosen_level(dot_levels(), "PAGEWOOD_INTEGER_DOT")


def chosen_level(here: Sequence[Level], variable: str) -> Level:
    """Return the first of the levels that this processor has, or the one that a variable of the environment names.

    Raises:
        ValueError: the variable names something else.
    """
    wanted = os.environ.get(variable)
    if not wanted:
        return here[0]
    for level in here:
        if wanted == level.name.lower():
            return level
    names = ", ".join(level.name.lower() for level in here)
    raise ValueError(f"{variable} must be one of {names} on this processor, got {wanted!r}")


class ByteDot:
    """Emits sums of products at one level.

    A weight vector is `[lanes, 4] uint8`, an activation is 4 int8 in an int32, the same for all lanes.
    """

    __slots__ = ("_builder", "_level", "lanes", "sums")

    def __init__(self, builder: Any, level: DotLevel) -> None:
        self._builder = builder
        self._level = level
        self.lanes = level.lanes
        self.sums: Any = ir.VectorType(_WORD, level.lanes)
        """Type of a vector of sums."""

    def shift(self, bits: int) -> int:
        """Return what the instructions of this level subtract from each weight of that many bits."""
        return 128 if self._level == DotLevel.SDOT and bits == 8 else 0

    def prepare(self, weights: Any, *, bits: int) -> Any:
        """Return `weights` `<4 lanes x i8>`, whose values have that many bits, as `add` wants them."""
        if self._level in (DotLevel.AVX512_VNNI, DotLevel.AVX_VNNI):
            return weights
        builder = self._builder
        if self._level == DotLevel.SDOT:  # its bytes are signed
            return builder.xor(weights, ir.Constant(weights.type, [128] * weights.type.count)) if bits == 8 else weights
        if self._level == DotLevel.AVX2:
            return [weights] if bits == 4 else nibbles(builder, weights)
        words = builder.bitcast(weights, self.sums)
        return [builder.and_(builder.lshr(words, self._all(8 * i)), self._all(255)) for i in range(4)]

    def add(self, sums: Any, weights: Any, activation: Any) -> Any:
        """Return `sums` plus the four products of each lane, less `shift`; `weights` come from `prepare`."""
        builder = self._builder
        spread_out = spread(builder, activation, self.sums)
        if self._level == DotLevel.SDOT:
            signed = builder.bitcast(spread_out, weights.type)
            return self._call("llvm.aarch64.neon.sdot.v4i32.v16i8", self.sums, sums, weights, signed)
        if self._level in (DotLevel.AVX512_VNNI, DotLevel.AVX_VNNI):
            operand = weights.type if _TAKES_BYTES else self.sums
            parts = [builder.bitcast(part, operand) for part in (weights, spread_out)]
            return self._call(f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}", self.sums, sums, *parts)
        if self._level == DotLevel.AVX2:
            shorts = ir.VectorType(_SHORT, 2 * self.lanes)
            signed = builder.bitcast(spread_out, ir.VectorType(_BYTE, 4 * self.lanes))
            for factor, part in zip((1, 16), weights, strict=False):  # 15 * 127 * 2 fits into 16 bits
                pairs = self._call("llvm.x86.avx2.pmadd.ub.sw", shorts, part, signed)
                factors = ir.Constant(shorts, [factor] * shorts.count)
                sums = builder.add(sums, self._call("llvm.x86.avx2.pmadd.wd", self.sums, pairs, factors))
            return sums
        for i, part in enumerate(weights):
            byte = builder.ashr(builder.shl(spread_out, self._all(24 - 8 * i)), self._all(24))
            sums = builder.add(sums, builder.mul(part, byte))
        return sums

    def _all(self, value: int) -> Any:
        return ir.Constant(self.sums, [value] * self.lanes)

    def _call(self, name: str, result: Any, *operands: Any) -> Any:
        module = self._builder.module
        kind = ir.FunctionType(result, [operand.type for operand in operands])
        return self._builder.call(module.globals.get(name) or ir.Function(module, kind, name), operands)


def nibbles(builder: Any, packed: Any) -> list[Any]:
    """Return the low and the high four bits of each byte of a vector, as vectors of bytes."""
    count = packed.type.count
    shorts, mask = ir.VectorType(_SHORT, count // 2), ir.Constant(packed.type, [15] * count)
    shifted = builder.lshr(builder.bitcast(packed, shorts), ir.Constant(shorts, [4] * shorts.count))
    return [builder.and_(packed, mask), builder.and_(builder.bitcast(shifted, packed.type), mask)]
