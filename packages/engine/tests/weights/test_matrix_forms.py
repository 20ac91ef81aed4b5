"""The forms of weights: what they stand for, how far rounding moves them, and what they refuse."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pagewood.engine.runner.cpu.compiled.products.weight_kind import WeightKind
from pagewood.engine.weights.matrix_forms import (
    BFloat16,
    Float16,
    Float32,
    Int4,
    Int8,
    Int8Group,
    quantise_int4,
    quantise_int8,
    stacked,
    to_bfloat16,
)
from pagewood.engine.weights.matrix_parts import columns_of
from weight_makers import MAKERS, grouped


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def error(values: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    return float(np.linalg.norm(values - found) / np.linalg.norm(values))


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_means_what_a_loop_over_its_numbers_says(group: int, has_zeros: bool) -> None:
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, (3, 128), dtype=np.uint8)
    scales = rng.random((3, 256 // group), dtype=np.float32)
    zeros = rng.integers(0, 16, scales.shape, dtype=np.uint8) if has_zeros else None
    weight = Int4(codes, scales, zeros, group)
    expected = np.empty((3, 256), np.float32)
    for n in range(3):
        for k in range(256):
            code = int(codes[n, k // 2]) >> 4 * (k % 2) & 15
            zero = 8 if zeros is None else int(zeros[n, k // group])
            expected[n, k] = np.float32(code - zero) * scales[n, k // group]
    assert np.array_equal(weight.dequantised(), expected)
    assert weight.shape == (3, 256)
    assert weight.nbytes == codes.nbytes + scales.nbytes + (0 if zeros is None else zeros.nbytes)


@pytest.mark.parametrize("has_zeros", [False, True])
def test_int8_in_groups_means_what_a_loop_over_its_numbers_says(has_zeros: bool) -> None:
    rng = np.random.default_rng(1)
    codes = rng.integers(-128, 128, (3, 96), dtype=np.int8)
    scales = rng.random((3, 3), dtype=np.float32)
    zeros = rng.integers(-128, 128, (3, 3), dtype=np.int8) if has_zeros else None
    expected = [
        [(int(codes[n, k]) - (0 if zeros is None else int(zeros[n, k // 32]))) * scales[n, k // 32] for k in range(96)]
        for n in range(3)
    ]
    assert np.array_equal(Int8Group(codes, scales, zeros, 32).dequantised(), np.array(expected, np.float32))


def test_bfloat16_rounds_as_torch_does() -> None:
    special = np.array([[0.0, -0.0, np.inf, -np.inf, 1e-40, 3.4e38, 1.00390625, 1.01171875]], np.float32)
    for values in (normal(50, 37) * 1e3, special):
        expected = torch.from_numpy(values).bfloat16()
        found = to_bfloat16(values)
        assert np.array_equal(found.bits, expected.view(torch.int16).numpy().view(np.uint16))
        assert np.array_equal(found.dequantised(), expected.float().numpy())
    assert np.isnan(to_bfloat16(np.array([[np.nan]], np.float32)).dequantised()).all()


def test_float16_widens_exactly() -> None:
    values = normal(9, 8).astype(np.float16)
    assert np.array_equal(Float16(values).dequantised(), torch.from_numpy(values).float().numpy())


def test_int8_moves_a_weight_by_at_most_half_a_scale() -> None:
    values = normal(40, 300) * np.logspace(-6, 6, 40, dtype=np.float32)[:, None]
    values[7] = 0
    weight = quantise_int8(values)
    assert weight.codes.min() >= -127
    moved = np.abs(weight.dequantised() - values)
    assert (moved <= weight.scales[:, None] * np.float32(0.5001)).all()
    assert np.array_equal(np.abs(weight.codes).max(axis=1), [127 if n != 7 else 0 for n in range(40)])
    assert error(normal(40, 300), quantise_int8(normal(40, 300)).dequantised()) < 0.008


@pytest.mark.parametrize(
    ("group", "symmetric", "most"), [(32, True, 0.083), (32, False, 0.079), (64, True, 0.092), (128, True, 0.099)]
)
def test_the_error_of_int4_on_normal_numbers(group: int, symmetric: bool, most: float) -> None:
    values = normal(200, 512)
    found = quantise_int4(values, group=group, symmetric=symmetric)
    assert (found.zeros is None) == symmetric
    assert 0.06 < error(values, found.dequantised()) < most


def test_candidates_of_scales_make_int4_better_than_the_full_range_alone() -> None:
    values = normal(200, 512)
    grouped = values.reshape(-1, 32)
    scales = np.abs(grouped).max(axis=1, keepdims=True) / 7
    plain = (np.clip(np.rint(grouped / scales), -8, 7) * scales).reshape(values.shape)
    assert error(values, quantise_int4(values).dequantised()) < 0.93 * error(values, plain)


def test_int4_keeps_groups_whose_numbers_it_can_state() -> None:
    """Scales times -8 to 7 that reach both ends, a group of zeros, and tiny and huge scales."""
    wholes = np.random.default_rng(2).integers(-8, 8, (20, 64)).astype(np.float32)
    wholes[:, ::32], wholes[:, 1::32] = -8, 7
    wholes[3, :32] = 0
    values = wholes * np.logspace(-20, 20, 20, dtype=np.float32)[:, None]
    for symmetric in (True, False):
        np.testing.assert_allclose(quantise_int4(values, symmetric=symmetric).dequantised(), values, rtol=1e-6)


def test_what_is_not_finite_makes_its_own_scale_nan() -> None:
    values = normal(4, 64)
    values[1, 5], values[2, 40] = np.nan, np.inf
    int8, int4 = quantise_int8(values), quantise_int4(values)
    assert np.isnan(int8.dequantised()[1:3]).all()
    assert np.isfinite(int8.dequantised()[[0, 3]]).all()
    assert np.array_equal(np.isnan(int4.scales), [[False, False], [True, False], [False, True], [False, False]])


def test_many_rows_are_quantised_as_alone() -> None:
    values = normal(700, 2048)  # more than a slice
    whole, alone = quantise_int4(values), quantise_int4(values[650:651])
    assert np.array_equal(whole.codes[650], alone.codes[0])
    assert np.array_equal(quantise_int8(values).codes[650], quantise_int8(values[650:651]).codes[0])
    assert np.array_equal(to_bfloat16(values).bits[650], to_bfloat16(values[650:651]).bits[0])


def test_parts_are_stacked() -> None:
    a, b = normal(3, 64), normal(5, 64, seed=1)
    both = np.concatenate([a, b])
    for make in (quantise_int8, quantise_int4, to_bfloat16, Float32, lambda x: Float16(x.astype(np.float16))):
        assert np.array_equal(stacked([make(a), make(b)]).dequantised(), make(both).dequantised())
    mixed = [quantise_int4(a), quantise_int4(b, symmetric=False)]
    expected = np.concatenate([part.dequantised() for part in mixed])
    assert np.array_equal(stacked(mixed).dequantised(), expected)
    with pytest.raises(ValueError, match="parts must have one form and 64 inputs, got Int8 and BFloat16"):
        stacked([quantise_int8(a), to_bfloat16(b)])
    with pytest.raises(ValueError, match="parts must have one form"):
        stacked([quantise_int4(a), quantise_int4(b, group=64)])


def test_invalid_arrays_are_refused() -> None:
    values = normal(4, 64)
    with pytest.raises(ValueError, match="group must divide the 40 inputs, got 32"):
        quantise_int4(normal(4, 40))
    with pytest.raises(ValueError, match="group must be one of 32, 64, 128, got 48"):
        quantise_int4(normal(4, 96), group=48)
    with pytest.raises(ValueError, match="values must be float32 of two dimensions, got float64"):
        quantise_int8(values.astype(np.float64))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"values must be float32 of two dimensions, got float32 of shape \(64,\)"):
        Float32(values[0])
    with pytest.raises(ValueError, match="bits must be uint16"):
        BFloat16(values)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"scales must be float32 of shape \(4,\), got float32 of shape \(3,\)"):
        Int8(np.zeros((4, 8), np.int8), np.ones(3, np.float32))
    with pytest.raises(ValueError, match=r"scales must be float32 of shape \(4, 2\), got float32 of shape \(4, 1\)"):
        Int4(np.zeros((4, 32), np.uint8), np.ones((4, 1), np.float32), None, 32)
    with pytest.raises(ValueError, match="zeros must be uint8"):
        Int4(np.zeros((4, 32), np.uint8), np.ones((4, 2), np.float32), np.zeros((4, 2), np.int8), 32)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("inputs", [range(64), range(64, 192), range(32, 96), range(96, 256)])
@pytest.mark.parametrize("kind", MAKERS)
def test_some_inputs_of_a_matrix_have_its_numbers(kind: WeightKind, inputs: range) -> None:
    """Groups of 64 inputs or more are cut into smaller ones."""
    weight = MAKERS[kind](normal(7, 256))
    part = columns_of(weight, inputs)
    assert type(part) is type(weight)
    assert part.shape == (7, len(inputs))
    assert np.array_equal(part.dequantised(), weight.dequantised()[:, inputs.start : inputs.stop])


def test_groups_that_cannot_be_cut() -> None:
    short = grouped(normal(3, 128), group=32)
    assert columns_of(short, range(16, 64)).shape == (3, 48)
    for weight, start, multiple in (
        (short, 24, 16), (grouped(normal(3, 128), group=32, has_zeros=True), 48, 32),
        (quantise_int4(normal(3, 128)), 48, 32),
    ):  # fmt: skip
        message = f"begin and end at a multiple of {multiple} inputs, because these share a scale, got {start} to 128"
        with pytest.raises(ValueError, match=message):
            columns_of(weight, range(start, 128))
