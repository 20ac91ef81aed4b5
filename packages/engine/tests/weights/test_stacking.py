"""Matrices of different forms that are stacked keep their numbers, in the smallest form with codes that holds all."""

from __future__ import annotations

import numpy as np
import pytest

from pagewood.engine.weights.matrix_forms import BFloat16, Int4, Int8Group, Weight, quantise_int4, quantise_int8
from pagewood.engine.weights.nearest import joined
from pagewood.engine.weights.stacking import in_one_form

COLUMNS = 128


def numbers(*shape: int, seed: int = 0) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def eights(group: int, *, has_zeros: bool = False, has_offsets: bool = False) -> Int8Group:
    random, shape = np.random.default_rng(group), (5, COLUMNS // group)
    zeros = random.integers(-128, 128, shape, dtype=np.int8) if has_zeros else None
    codes = random.integers(-128, 128, (5, COLUMNS), dtype=np.int8)
    return Int8Group(codes, numbers(*shape), zeros, group, numbers(*shape, seed=2) if has_offsets else None)


def offset(group: int) -> Int4:
    weight = quantise_int4(numbers(4, COLUMNS), group=group)
    return Int4(weight.codes, weight.scales, None, group, numbers(4, COLUMNS // group, seed=3))


PLAIN, ZEROS = quantise_int4(numbers(3, COLUMNS)), quantise_int4(numbers(3, COLUMNS), group=64, symmetric=False)
CASES: dict[str, tuple[list[Weight], tuple[type[Weight], int, bool]]] = {
    "int4 of two groups": ([PLAIN, ZEROS], (Int4, 32, False)),
    "int4 with and without offsets": ([PLAIN, offset(64), ZEROS], (Int4, 32, True)),
    "Q4_K_M": ([offset(32), offset(32), eights(16)], (Int8Group, 16, True)),
    "int4 and int8": ([PLAIN, ZEROS, eights(32)], (Int8Group, 32, False)),
    "zeros in groups of 16": ([eights(64, has_zeros=True), eights(16)], (Int8Group, 16, True)),
    "zeros and offsets": ([eights(64, has_zeros=True), eights(128, has_offsets=True)], (Int8Group, 64, True)),
    "int8 by output": ([quantise_int8(numbers(3, COLUMNS)), ZEROS, eights(128)], (Int8Group, 64, False)),
}


@pytest.mark.parametrize("name", CASES)
def test_numbers_stay(name: str) -> None:
    parts, (kind, group, has_offsets) = CASES[name]
    whole = joined(parts)
    assert isinstance(whole, Int4 | Int8Group)
    assert (type(whole), whole.group, whole.offsets is not None) == (kind, group, has_offsets)
    expected = np.concatenate([part.dequantised() for part in parts])
    largest = np.abs(expected).max(axis=1, keepdims=True)
    assert (np.abs(whole.dequantised() - expected) <= 2.0**-21 * largest).all()


def test_plain_numbers_have_no_codes() -> None:
    assert in_one_form([PLAIN, BFloat16(np.zeros((2, COLUMNS), np.uint16))]) is None


def test_offsets_and_zeros_exclude_each_other() -> None:
    zeros = np.zeros((3, 2), np.uint8)
    with pytest.raises(ValueError, match=r"zeros must be None where there are offsets, got zeros of shape \(3, 2\)"):
        Int4(ZEROS.codes, ZEROS.scales, zeros, 64, np.zeros((3, 2), np.float32))
    with pytest.raises(ValueError, match=r"offsets must be float32 of shape \(3, 2\), got float32 of shape \(3, 1\)"):
        Int4(ZEROS.codes, ZEROS.scales, None, 64, np.zeros((3, 1), np.float32))
    with pytest.raises(ValueError, match=r"zeros must be None in groups of 16"):
        Int8Group(np.zeros((1, 16), np.int8), np.ones((1, 1), np.float32), np.zeros((1, 1), np.int8), 16)
