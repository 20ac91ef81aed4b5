"""Matrices of every form that is packed, from numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.runner.cpu.compiled.products.weight_kind import WeightKind
from pagewood.engine.weights.matrix_forms import (
    Float4,
    Float16,
    Int4,
    Int8Group,
    Weight,
    quantise_int4,
    quantise_int8,
    to_bfloat16,
)

Array = NDArray[np.float32]


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def grouped(values: Array, *, has_zeros: bool = False, has_offsets: bool = False, group: int = 64) -> Int8Group:
    rng = np.random.default_rng(len(values))
    shape = len(values), values.shape[1] // group
    zeros = rng.integers(-128, 128, shape, dtype=np.int8) if has_zeros else None
    codes, scales = rng.integers(-128, 128, values.shape, dtype=np.int8), rng.random(shape, np.float32)
    return Int8Group(codes, scales, zeros, group, normal(*shape, seed=5) if has_offsets else None)


def with_offsets(values: Array) -> Int4:
    """Return codes as in GGUF's Q4_1 and Q4_K."""
    weight = quantise_int4(values)
    return Int4(weight.codes, weight.scales, None, 32, normal(*weight.scales.shape, seed=5))


def float4(values: Array, *, group: int) -> Float4:
    """Return random numbers of four bits, with every code and scales of every size that activations of one bear."""
    rng = np.random.default_rng(len(values))
    codes = rng.integers(0, 256, (len(values), values.shape[1] // 2), dtype=np.uint8)
    low, high = (120, 130) if group == 32 else (0, 0x7F)
    scales = rng.integers(low, high, (len(values), values.shape[1] // group), dtype=np.uint8)
    factors = None if group == 32 else (rng.random(len(values), np.float32) / 100).astype(np.float32)
    return Float4(codes, scales, factors)


MAKERS: dict[WeightKind, Callable[[Array], Weight]] = {
    WeightKind.BFLOAT16: to_bfloat16,
    WeightKind.FLOAT16: lambda values: Float16(values.astype(np.float16)),
    WeightKind.INT8: quantise_int8,
    WeightKind.INT4: quantise_int4,
    WeightKind.INT4_ZEROS: lambda values: quantise_int4(values, group=64, symmetric=False),
    WeightKind.INT4_OFFSETS: with_offsets,
    WeightKind.INT8_GROUP: grouped,
    WeightKind.INT8_GROUP_ZEROS: functools.partial(grouped, has_zeros=True),
    WeightKind.INT8_GROUP_OFFSETS: functools.partial(grouped, has_offsets=True),
    WeightKind.INT8_16: functools.partial(grouped, group=16),
    WeightKind.INT8_16_OFFSETS: functools.partial(grouped, has_offsets=True, group=16),
    WeightKind.MXFP4: functools.partial(float4, group=32),
    WeightKind.NVFP4: functools.partial(float4, group=16),
}
