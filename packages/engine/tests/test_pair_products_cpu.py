"""Products of bfloat16 weights and bfloat16 activations: the same bits as two additions in float32, at every level."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import functools
import struct
from operator import attrgetter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagewood.engine.runner.cpu.compiled.products.pair_dot import PairLevel, pair_level, pair_levels
from pagewood.engine.runner.cpu.compiled.products.round_pairs import round_pairs
from pagewood.engine.runner.cpu.compiled.products.weight_kind import WeightKind
from pagewood.engine.runner.cpu.compiled.step import StepKernel
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program.ops import CPUOps, PackedLinear
from pagewood.engine.runner.cpu.weights.packer import Packer
from pagewood.engine.weights.matrix_forms import Float16, to_bfloat16
from stand_ins.tapes import write_down

Array = NDArray[np.float32]
LEVELS = pair_levels()
"""Those that this processor has."""
NAME = attrgetter("name")


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@functools.cache
def step_kernel(level: PairLevel) -> StepKernel:
    return warm_up(16, packed=[(WeightKind.BFLOAT16_PAIRS, level)])


def product(
    x: Array, weight: Array, bias: Array | None, *, level: PairLevel = LEVELS[0], num_threads: int = 2
) -> Array:
    """Return the product with weights `[N, K]` that are rounded when they are packed."""
    ops = CPUOps(Packer("bfloat16", activations="bfloat16"), pair_level=level)
    linear = ops.linear(torch.from_numpy(weight), None if bias is None else torch.from_numpy(bias))
    assert ops.variants == {(WeightKind.BFLOAT16_PAIRS, level)}
    return write_down(linear, x, kernel=step_kernel(level), num_threads=num_threads)().copy()


def rounded(values: Array) -> Array:
    """Return numbers rounded to bfloat16 by torch."""
    return torch.from_numpy(values).bfloat16().float().numpy()


def expected(x: Array, weight: Array, bias: Array | None) -> Array:
    """Return what the instruction computes: of each two inputs the second is added first.

    Products of two numbers with 8 significant bits are exact in float32, so numpy rounds once in each addition too.
    """
    inputs, outputs = rounded(x), rounded(weight)
    sums = np.zeros((len(x), len(weight)), np.float32)
    if bias is not None:
        sums += bias
    for first in range(0, x.shape[1], 2):
        for k in range(min(first + 1, x.shape[1] - 1), first - 1, -1):
            sums += inputs[:, k, None] * outputs[:, k]
    return sums


@pytest.mark.parametrize("level", LEVELS, ids=NAME)
@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(1, 70),
    inputs=st.one_of(st.integers(1, 70), st.sampled_from([128, 333])),
    size=st.one_of(st.integers(1, 100), st.sampled_from([32, 64, 321])),
    has_bias=st.booleans(),
    num_threads=st.sampled_from([1, 2, 5]),
)
def test_products_have_the_bits_of_the_stated_order(
    level: PairLevel, num_rows: int, inputs: int, size: int, has_bias: bool, num_threads: int
) -> None:
    x, weight = normal(num_rows, inputs), normal(size, inputs, seed=1)
    bias = normal(size, seed=2) if has_bias else None
    found = product(x, weight, bias, level=level, num_threads=num_threads)
    assert np.array_equal(found, expected(x, weight, bias))


@pytest.mark.parametrize("level", LEVELS, ids=NAME)
def test_every_number_of_rows_has_the_same_bits(level: PairLevel) -> None:
    x, weight, bias = normal(150, 130), normal(75, 130, seed=1), normal(75, seed=2)
    together = expected(x, weight, bias)
    for num_rows in (*range(1, 71), 96, 97, 150):
        assert np.array_equal(product(x[-num_rows:], weight, bias, level=level), together[-num_rows:]), num_rows


def test_the_order_is_not_another_one() -> None:
    """What the tests above compare does depend on the order within a pair."""
    x, weight = normal(20, 64), normal(40, 64, seed=1)
    swapped = np.arange(64) ^ 1
    assert not np.array_equal(product(x[:, swapped], weight[:, swapped], None), product(x, weight, None))


def number(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


@pytest.mark.parametrize("level", LEVELS, ids=NAME)
@pytest.mark.parametrize("num_rows", [1, 40])
def test_activations_are_rounded_to_nearest_and_ties_to_even(level: PairLevel, num_rows: int) -> None:
    ties = [number(0x3F808000), number(0x3F818000), -number(0x3F808000), -number(0x3F818000)]
    near = [number(bits) for bits in (0x3F808001, 0x3F807FFF, 0x3FFFFFFF, 0x00800001, 0x7F7FFFFF, 0xFF7F8000)]
    ends = [0.0, np.inf, -np.inf, np.nan, number(0x7F800001), number(0xFFFFFFFF)]
    for value in (*ties, *near, *ends):
        x = np.full((num_rows, 1), value, np.float32)
        [found] = set(product(x, np.ones((3, 1), np.float32), None, level=level).view(np.uint32).ravel().tolist())
        wanted = rounded(x)[0, 0]
        assert number(found) == wanted or (np.isnan(wanted) and np.isnan(number(found))), value


@pytest.mark.parametrize("level", LEVELS, ids=NAME)
def test_rows_that_are_not_finite_stay_alone(level: PairLevel) -> None:
    x, weight, bias = normal(29, 65), normal(40, 65, seed=1), normal(40, seed=2)
    good = product(x, weight, bias, level=level)
    x[2, 5], x[7, 0], x[20, 64] = np.nan, -np.inf, np.inf
    found = product(x, weight, bias, level=level)
    assert not np.isfinite(found[[2, 7, 20]]).any()
    others = [row for row in range(29) if row not in (2, 7, 20)]
    assert np.array_equal(found[others], good[others])


def test_what_fills_up_inputs_is_zero() -> None:
    """Weights there are zero too, but not times what the memory may hold: all bits set are a NaN."""
    x, to = normal(3), np.full(4, 0xFFFF, np.uint16)
    round_pairs.kernel(x.ctypes.data, to.ctypes.data, 3, 4, 1, 0)
    assert to[3] == 0
    assert (to[:3] != 0xFFFF).all()


def test_forms_of_a_checkpoint() -> None:
    """Weights in bfloat16 are multiplied in pairs, with an odd number of inputs too; others as without the choice."""
    values = normal(40, 33, seed=1)
    for weight, kind in [
        (to_bfloat16(values), WeightKind.BFLOAT16_PAIRS),
        (torch.from_numpy(values).bfloat16(), WeightKind.BFLOAT16_PAIRS),
        (torch.from_numpy(values), None),
        (Float16(values[:, :32].astype(np.float16)), WeightKind.FLOAT16),
    ]:
        ops = CPUOps(Packer("auto", activations="bfloat16"))
        linear = ops.linear(weight, None)
        found = linear.weight.shape.kind if isinstance(linear, PackedLinear) else None
        assert found in (kind, None if kind == WeightKind.FLOAT16 else kind)  # some processors cannot widen float16


def test_a_tied_embedding_is_looked_up_with_an_odd_size() -> None:
    values = normal(75, 33, seed=1)
    ops = CPUOps(Packer("bfloat16", activations="bfloat16"))
    embedding, linear = ops.tied_embedding(torch.from_numpy(values))
    [(_, level)] = ops.variants
    assert isinstance(level, PairLevel)
    tokens = np.random.default_rng(3).integers(0, 75, (40, 1), dtype=np.int32)
    found = write_down(embedding, tokens, kernel=step_kernel(level), num_threads=2)()
    assert np.array_equal(found, rounded(values)[tokens[:, 0]])
    x = normal(9, 33)
    found = write_down(linear, x, kernel=step_kernel(level), num_threads=2)()
    assert np.array_equal(found, expected(x, values, None))


def test_levels_are_chosen_by_the_processor_and_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for level in LEVELS:
        monkeypatch.setenv("PAGEWOOD_BFLOAT16_DOT", level.name.lower())
        assert pair_level() == level
        ops = CPUOps(Packer("bfloat16", activations="bfloat16"))
        ops.linear(torch.ones(3, 4), None)
        assert ops.variants == {(WeightKind.BFLOAT16_PAIRS, level)}
    monkeypatch.setenv("PAGEWOOD_BFLOAT16_DOT", "amx")
    with pytest.raises(ValueError, match=r"PAGEWOOD_BFLOAT16_DOT must be one of .*widened on this processor, got 'amx"):
        pair_level()
    monkeypatch.delenv("PAGEWOOD_BFLOAT16_DOT")
    for features, level in [
        ("+avx2,+avx512f,+avx512bf16", PairLevel.AVX512_BF16),
        ("+avx2,+avx512f,-avx512bf16", PairLevel.WIDENED),
        ("+neon,+bf16", PairLevel.WIDENED),  # bfdot of ARM rounds in another way
    ]:
        monkeypatch.setattr("numba.core.config.CPU_FEATURES", features)
        assert pair_level() == level
