"""Products with packed weights against float64 on the widened numbers, for every form, height and instruction level."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagewood.engine.api import ActivationFormat
from pagewood.engine.models.stored.stacked_rows import StackedRows
from pagewood.engine.runner.cpu.compiled.products.dot import DotLevel, dot_level, dot_levels
from pagewood.engine.runner.cpu.compiled.products.packed_weights import ProductLevel
from pagewood.engine.runner.cpu.compiled.products.weight_kind import WeightKind
from pagewood.engine.runner.cpu.compiled.step import StepKernel
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program.ops import CPUOps
from pagewood.engine.runner.cpu.weights.packer import Packer
from pagewood.engine.runner.cpu.weights.packing import pack
from pagewood.engine.weights.matrix_forms import (
    BFloat16,
    Float4,
    Float16,
    Int4,
    Int8,
    Int8Group,
    Weight,
    quantise_int4,
    quantise_int8,
)
from stand_ins.tapes import write_down
from weight_makers import MAKERS, Array, normal

LEVELS = dot_levels()
"""Those that this processor has."""


CODES = [kind for kind in MAKERS if kind.has_codes]
SIDES = {
    WeightKind.BFLOAT16: 2, WeightKind.FLOAT16: 2, WeightKind.INT8: 1, WeightKind.INT4: 32, WeightKind.INT4_OFFSETS: 32,
    WeightKind.INT8_16: 16, WeightKind.INT8_16_OFFSETS: 16, WeightKind.MXFP4: 32, WeightKind.NVFP4: 16,
}  # fmt: skip
"""The number of inputs is a multiple of this, or of 64."""
NAME = attrgetter("name")
OF_EACH_LAYOUT = (WeightKind.INT8, WeightKind.INT4, WeightKind.INT4_ZEROS, WeightKind.INT8_16_OFFSETS, WeightKind.MXFP4)
"""Kinds whose kernels are compiled in every run; each takes seconds."""


def few(kinds: Iterable[WeightKind]) -> list[Any]:
    """Return kinds as parameters, most of those with codes as slow tests."""
    slow = [kind for kind in CODES if kind not in OF_EACH_LAYOUT]
    return [pytest.param(kind, marks=[pytest.mark.slow] if kind in slow else [], id=kind.name) for kind in kinds]


@functools.cache
def step_kernel(kind: WeightKind, level: ProductLevel) -> StepKernel:
    return warm_up(16, packed=[(kind, level)])


def compute(
    operation: Callable[..., Any], ops: CPUOps, *inputs: NDArray[np.generic], num_threads: int = 2
) -> NDArray[np.float32]:
    [variant] = ops.variants
    return write_down(operation, *inputs, kernel=step_kernel(*variant), num_threads=num_threads)().copy()


def product(
    x: Array,
    weight: Weight,
    bias: Array | None,
    *,
    level: DotLevel = LEVELS[0],
    activations: ActivationFormat = "auto",
    num_threads: int = 2,
) -> NDArray[np.float32]:
    if isinstance(weight, BFloat16):
        activations = "float32"
    ops = CPUOps(Packer("float32", activations=activations), level=level)
    linear = ops.linear(weight, None if bias is None else torch.from_numpy(bias))
    return compute(linear, ops, x, num_threads=num_threads)


def activation_codes(x: Array) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return eight-bit codes `[T, K]` and scales `[T, 1]`, with the arithmetic that the documentation states."""
    largest = np.abs(x).max(axis=1, keepdims=True)
    factor = np.divide(np.float32(127), largest, where=largest > 0, out=np.zeros_like(largest))
    return np.rint(x * factor).astype(np.float64), (largest / np.float32(127)).astype(np.float64)


def expected(x: Array, weight: Weight, bias: Array | None) -> NDArray[np.float64]:
    wide = weight.dequantised().astype(np.float64).T
    offset = 0.0 if bias is None else bias.astype(np.float64)
    if isinstance(weight, BFloat16 | Float16):
        return x.astype(np.float64) @ wide + offset
    codes, scales = activation_codes(x)
    return codes @ wide * scales + offset


@pytest.mark.parametrize("kind", few(MAKERS))
@settings(max_examples=8, deadline=None)
@given(
    num_rows=st.one_of(st.integers(1, 30), st.integers(90, 210)),
    sides=st.integers(1, 4),
    size=st.one_of(st.integers(1, 100), st.sampled_from([32, 64, 500])),
    has_bias=st.booleans(),
    num_threads=st.sampled_from([1, 2, 5]),
)
def test_products(kind: WeightKind, num_rows: int, sides: int, size: int, has_bias: bool, num_threads: int) -> None:
    inputs = SIDES.get(kind, 64) * sides
    x, weight = normal(num_rows, inputs), MAKERS[kind](normal(size, inputs, seed=1))
    bias = normal(size, seed=2) if has_bias else None
    found, wanted = product(x, weight, bias, num_threads=num_threads), expected(x, weight, bias)
    largest = np.abs(x) @ np.abs(weight.dequantised()).T + 1
    assert (np.abs(found - wanted) <= 1e-6 * largest).all()


def _in_short(kind: WeightKind, level: DotLevel) -> bool:
    """Whether it is the best level, or the other one that this kind has by turns."""
    if kind not in OF_EACH_LAYOUT:
        return False
    return level in (LEVELS[0], LEVELS[1 + OF_EACH_LAYOUT.index(kind) % (len(LEVELS) - 1)])


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        pytest.param(*case, marks=[] if _in_short(*case) else [pytest.mark.slow], id="-".join(map(NAME, case)))
        for case in itertools.product(CODES, LEVELS)
    ],
)
def test_every_level_gives_the_same_bits(kind: WeightKind, level: DotLevel) -> None:
    """Also at the ends of the range of codes, where 16 bits would not hold the sums."""
    weight = MAKERS[kind](normal(70, 256, seed=1))
    if isinstance(weight, Int8 | Int8Group):
        weight.codes[:10], weight.codes[10:20], weight.codes[20:30] = 127, -128, 0
    else:
        assert isinstance(weight, Int4 | Float4)
        weight.codes[:10], weight.codes[10:20] = 0xFF, 0
    x = normal(29, 256)
    x[3], x[4], x[5, ::2] = 1.0, -1.0, 100.0
    bias = normal(70, seed=2)
    found = product(x, weight, bias, level=level)
    assert np.array_equal(found, product(x, weight, bias))
    np.testing.assert_allclose(found, expected(x, weight, bias), rtol=1e-4, atol=1e-3 * np.abs(found).max())


@pytest.mark.parametrize(
    ("kind", "activations"),
    [
        pytest.param(*one.values, activations, marks=one.marks, id=f"{one.id}-{activations}")
        for one in few(MAKERS)
        for activations in ("auto", "float32")
    ],
)
@pytest.mark.parametrize("size", [333, 2080])  # from 2048 outputs on, tiles of many rows of float32 are packed
def test_a_row_of_a_product_does_not_depend_on_the_others(
    kind: WeightKind, activations: ActivationFormat, size: int
) -> None:
    x, weight = normal(150, 320), MAKERS[kind](normal(size, 320, seed=1))
    together = product(x, weight, None, activations=activations, num_threads=4)
    for first, last in [(0, 1), (1, 3), (3, 7), (7, 18), (18, 31), (31, 150), (0, 8), (0, 9), (0, 17)]:
        alone = product(x[first:last], weight, None, activations=activations, num_threads=1)
        assert np.array_equal(alone, together[first:last])


@pytest.mark.parametrize("kind", few(MAKERS))
@settings(max_examples=8, deadline=None)
@given(
    num_rows=st.one_of(st.integers(1, 30), st.integers(90, 130)),
    sides=st.integers(1, 4),
    size=st.one_of(st.integers(1, 100), st.sampled_from([32, 64, 300])),
    num_threads=st.sampled_from([1, 2, 5]),
)
def test_widened_weights_have_the_bits_of_float32(
    kind: WeightKind, num_rows: int, sides: int, size: int, num_threads: int
) -> None:
    """For all forms, whatever fills up their inputs."""
    inputs = SIDES.get(kind, 64) * sides
    x, bias, weight = normal(num_rows, inputs), normal(size, seed=2), MAKERS[kind](normal(size, inputs, seed=1))
    wide = CPUOps().linear(torch.from_numpy(weight.dequantised()), torch.from_numpy(bias))
    expected = write_down(wide, x, kernel=warm_up(16), num_threads=1)()
    found = product(x, weight, bias, activations="float32", num_threads=num_threads)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("kind", few(CODES))
def test_widened_codes_of_bad_scales_and_numbers_stay_where_they_are(kind: WeightKind) -> None:
    """An output whose scale is NaN, and a row with a number that is not finite, spoil nothing else."""
    weight, x = MAKERS[kind](normal(40, 64, seed=1)), normal(14, 64)
    assert isinstance(weight, Int4 | Int8 | Int8Group | Float4)
    good = product(x, weight, None, activations="float32")
    scales = weight.factors if isinstance(weight, Float4) else weight.scales
    if scales is not None:  # powers of two are never NaN
        scales[7] = np.nan
    x[2, 5] = np.inf
    found = product(x, weight, None, activations="float32")
    assert scales is None or np.isnan(found[:, 7]).all()
    assert not np.isfinite(found[2]).any()
    others = np.ix_([row for row in range(14) if row != 2], [column for column in range(40) if column != 7])
    assert np.array_equal(found[others], good[others])


@pytest.mark.parametrize("kind", few(MAKERS))
def test_a_row_that_is_looked_up_is_the_dequantised_one(kind: WeightKind) -> None:
    weight = MAKERS[kind](normal(75, 192, seed=1))
    tokens = np.random.default_rng(3).integers(0, 75, (40, 1), dtype=np.int32)
    activations: ActivationFormat = "float32" if isinstance(weight, BFloat16) else "auto"
    ops = CPUOps(Packer("float32", activations=activations))
    embedding, linear = ops.tied_embedding(weight)
    found = compute(embedding, ops, tokens)
    assert np.array_equal(found, weight.dequantised()[tokens[:, 0]])
    alone = CPUOps(Packer("float32", activations=activations))
    assert np.array_equal(compute(alone.embedding(weight), alone, tokens), found)
    x = normal(5, 192)
    assert np.array_equal(compute(linear, ops, x), product(x, weight, None))


@pytest.mark.parametrize("kind", [WeightKind.INT8, WeightKind.INT4], ids=NAME)
def test_rows_that_are_not_finite_or_zero_stay_alone(kind: WeightKind) -> None:
    weight, bias = MAKERS[kind](normal(40, 64, seed=1)), normal(40, seed=2)
    x = normal(14, 64)
    good = product(x, weight, bias)
    x[2, 5], x[7, 0], x[9], x[10] = np.nan, -np.inf, 0.0, 1e-38
    found = product(x, weight, bias)
    assert np.isnan(found[[2, 7]]).all()
    assert np.array_equal(found[[9, 10]], np.stack([bias, bias]))
    others = [row for row in range(14) if row not in (2, 7, 9, 10)]
    assert np.array_equal(found[others], good[others])


def test_activations_of_any_size_keep_eight_bits() -> None:
    weight = quantise_int8(normal(33, 96, seed=1))
    x = normal(20, 96) * np.logspace(-25, 25, 20, dtype=np.float32)[:, None]
    np.testing.assert_allclose(product(x, weight, None), expected(x, weight, None), rtol=1e-4, atol=0)


def test_inputs_that_fill_no_whole_group_are_padded() -> None:
    """A tensor of the checkpoint with 40 inputs in int4: the last group of 32 is filled up with zeros."""
    values = normal(45, 40, seed=1)
    ops = CPUOps(Packer("int4"))
    embedding, linear = ops.tied_embedding(torch.from_numpy(values))
    wide = quantise_int4(np.pad(values, ((0, 0), (0, 24)))).dequantised()[:, :40]
    tokens = np.arange(45, dtype=np.int32)[:, None]
    kept = compute(embedding, ops, tokens)
    errors = [((some - values) ** 2).sum(axis=1) for some in (kept, wide)]
    np.testing.assert_allclose(*errors, rtol=1e-5)  # of two scales that are equally good, either may be chosen
    x = normal(13, 40)
    codes, scales = activation_codes(x)
    np.testing.assert_allclose(
        compute(linear, ops, x), codes @ kept.astype(np.float64).T * scales, rtol=1e-4, atol=1e-4
    )


def test_packing_refuses_sums_that_could_overflow() -> None:
    weight = Int8(np.zeros((1, 65568), np.int8), np.ones(1, np.float32))
    with pytest.raises(ValueError, match="at most 65536 inputs, got 65568"):
        pack(weight)


def test_rows_that_cannot_be_read_end_the_packing() -> None:
    """Slices behind those that fail do not wait for the memory that these have taken; the thread ends."""

    class Broken(StackedRows):
        def write_to(self, out: torch.Tensor, first: int) -> None:
            raise OSError(f"row {first} cannot be read")

    rows = Broken([torch.zeros(4096, 4096)])
    packed: list[BaseException] = []

    def work() -> None:
        try:
            Packer("int8", num_threads=2).pack(rows)
        except OSError as error:
            packed.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert str(packed[0]) == "row 0 cannot be read"


def test_levels_are_chosen_by_the_processor_and_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for level in LEVELS:
        monkeypatch.setenv("PAGEWOOD_INTEGER_DOT", level.name.lower())
        assert dot_level() == level
    monkeypatch.setenv("PAGEWOOD_INTEGER_DOT", "mmx")
    with pytest.raises(ValueError, match=r"PAGEWOOD_INTEGER_DOT must be one of .*plain on this processor, got 'mmx'"):
        dot_level()
    monkeypatch.delenv("PAGEWOOD_INTEGER_DOT")
    for features, level in [
        ("+avx2,+avx512f,+avx512bw,+avx512vl,+avx512vnni", DotLevel.AVX512_VNNI),
        ("+avx2,+avxvnni", DotLevel.AVX_VNNI),
        ("+avx2,+avx512f,-avx512vnni", DotLevel.AVX2),
        ("+sse4.2", DotLevel.PLAIN),
    ]:
        monkeypatch.setattr("numba.core.config.CPU_FEATURES", features)
        assert dot_level() == level
