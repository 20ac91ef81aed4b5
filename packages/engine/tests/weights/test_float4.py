"""Numbers of four bits: what they stand for, and which scales are kept as they are stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pagewood.engine.runner.cpu.weights.packing import pack
from pagewood.engine.weights.float4 import MXFP4, NVFP4, kept_mxfp4
from pagewood.engine.weights.matrix_forms import Float4, Int8Group, quantise_int4, rows_of
from pagewood.engine.weights.nearest import joined

_VALUES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
_ROWS, _COLUMNS = 5, 96

Bytes = NDArray[np.uint8]


def codes(seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, (_ROWS, _COLUMNS // 2), dtype=np.uint8)


def mxfp4(seed: int = 0) -> Float4:
    return Float4(codes(seed), np.random.default_rng(seed).integers(110, 130, (_ROWS, 3), dtype=np.uint8), None)


def nvfp4(factor: float = 0.01) -> Float4:
    scales = np.random.default_rng(2).integers(0, 0x7F, (_ROWS, 6), dtype=np.uint8)
    return Float4(codes(), scales, np.full(_ROWS, factor, np.float32))


def e4m3(byte: int) -> float:
    exponent, mantissa = byte >> 3, byte & 7
    return mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


@pytest.mark.parametrize("weight", [mxfp4(), nvfp4()], ids=["mxfp4", "nvfp4"])
def test_numbers_are_what_a_loop_says(weight: Float4) -> None:
    expected = np.empty((_ROWS, _COLUMNS))
    for n in range(_ROWS):
        for k in range(_COLUMNS):
            code, stored = int(weight.codes[n, k // 2]) >> 4 * (k % 2) & 15, int(weight.scales[n, k // weight.group])
            number = _VALUES[code & 7] * (-1 if code & 8 else 1)
            scale = 2.0 ** (stored - 127) if weight.factors is None else e4m3(stored) * weight.factors[n]
            expected[n, k] = number * scale
    exact = weight.factors is None
    np.testing.assert_allclose(weight.dequantised(), expected, rtol=0 if exact else 2**-22)
    assert weight.shape == (_ROWS, _COLUMNS)


def test_memory_is_that_of_the_file() -> None:
    """4.25 bits for a number of MXFP4, 4.5 of NVFP4, besides the fill to whole panels."""
    many = Float4(np.zeros((64, 128), np.uint8), np.full((64, 8), 127, np.uint8), None)
    assert pack(many).memory.nbytes == many.nbytes == 64 * 256 * 4.25 / 8
    factored = Float4(many.codes, np.zeros((64, 16), np.uint8), np.ones(64, np.float32))
    assert pack(factored).memory.nbytes == factored.nbytes == 64 * 256 * 4.5 / 8 + 4 * 64


def test_zeros_may_have_any_power_of_two() -> None:
    """Tools store the least exponent for blocks of zeros, positive and negative ones."""
    packed, exponents = codes(), np.full((_ROWS, 3), 120, np.uint8)
    packed[1, :16], packed[2, 16:32] = 0, 0x88
    exponents[1, 0], exponents[2, 1] = 0, 1
    before = exponents.copy()
    kept = kept_mxfp4(packed, exponents)
    assert isinstance(kept.weight, Float4)
    assert not kept.weight.dequantised()[1, :32].any()
    assert not kept.weight.dequantised()[2, 32:64].any()
    assert np.array_equal(exponents, before)  # the caller's memory, which may be a file, stays as it was


def test_powers_of_two_below_normal_numbers_are_kept_with_int8() -> None:
    packed, exponents = codes(), np.full((_ROWS, 3), 120, np.uint8)
    packed[0, 0], exponents[0, 0] = 0x01, 0
    kept = kept_mxfp4(packed, exponents)
    assert isinstance(kept.weight, Int8Group)
    assert "not a positive normal number" in kept.why
    assert kept.weight.dequantised()[0, 0] == np.float32(2.0**-128)


@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x80, 0x9A])
def test_scales_that_are_nan_or_negative_are_kept_with_int8(byte: int) -> None:
    form = NVFP4(codes=".c", scales=".s", whole=".w", divides=False)
    found: dict[str, Any] = {".c": codes(), ".s": np.full((_ROWS, 6), 0x38, np.uint8), ".w": np.float32(1)}
    assert isinstance(form.read(found, _ROWS, _COLUMNS).weight, Float4)
    found[".s"][3, 2] = byte
    weight = form.read(found, _ROWS, _COLUMNS).weight
    assert isinstance(weight, Int8Group)
    assert np.isnan(weight.dequantised()[3, 32:48]).all() == (byte in (0x7F, 0xFF))
    assert np.isfinite(np.delete(weight.dequantised(), 3, axis=0)).all()


def test_matrices_with_other_factors_are_joined_as_they_are() -> None:
    parts = [nvfp4(0.01), nvfp4(0.5)]
    whole = joined(parts)
    assert isinstance(whole, Float4)
    assert np.array_equal(whole.dequantised(), np.concatenate([part.dequantised() for part in parts]))
    assert np.array_equal(rows_of(whole, slice(4, 7)).dequantised(), whole.dequantised()[4:7])


@pytest.mark.parametrize("other", [nvfp4(), quantise_int4(np.ones((2, _COLUMNS), np.float32))], ids=["nvfp4", "int4"])
def test_matrices_of_other_forms_are_joined_exactly(other: Any) -> None:
    whole = joined([mxfp4(), other])
    assert isinstance(whole, Int8Group)
    assert np.array_equal(whole.dequantised(), np.concatenate([mxfp4().dequantised(), other.dequantised()]))


def test_exponents_that_are_nan_are_refused() -> None:
    found = {"_blocks": np.zeros((2, 1, 16), np.uint8), "_scales": np.full((2, 1), 255, np.uint8)}
    with pytest.raises(ValueError, match=r"powers of two, got a byte 255"):
        MXFP4().read(found, 2, 32)


def test_arrays_that_do_not_fit_are_refused() -> None:
    many = np.zeros((2, 32), np.uint8)
    with pytest.raises(ValueError, match=r"scales must be in \[2, 254\], got 0 to 9"):
        Float4(many, np.array([[0, 5], [9, 9]], np.uint8), None)
    with pytest.raises(ValueError, match=r"scales must be in \[0, 126\], got 0 to 127"):
        Float4(many, np.array([[0, 127, 0, 0]] * 2, np.uint8), np.ones(2, np.float32))
    with pytest.raises(ValueError, match=r"scales must be uint8 of shape \(2, 2\), got uint8 of shape \(2, 4\)"):
        Float4(many, np.full((2, 4), 9, np.uint8), None)
    with pytest.raises(ValueError, match=r"factors must be float32 of shape \(2,\), got float32 of shape \(1,\)"):
        Float4(many, np.full((2, 4), 9, np.uint8), np.ones(1, np.float32))
    with pytest.raises(ValueError, match="group must divide the 48 inputs, got 32"):
        Float4(np.zeros((2, 24), np.uint8), np.full((2, 1), 9, np.uint8), None)
