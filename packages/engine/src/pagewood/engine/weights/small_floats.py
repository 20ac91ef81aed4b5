"""Floating point numbers of 4 and 8 bits, as tables of float32.

Source: Open Compute Project, OCP 8-bit Floating Point and OCP Microscaling Formats, 2023.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

E2M1_DOUBLED: NDArray[np.int8] = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the value of each code of 4 bits: sign, two bits of exponent, one of mantissa."""


def _e4m3() -> NDArray[np.float32]:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    values = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10))
    values = np.where(codes & 0x7F == 0x7F, np.nan, values)
    return np.where(codes & 0x80, -values, values).astype(np.float32)


E4M3: NDArray[np.float32] = _e4m3()
"""The value of each byte: sign, four bits of exponent, three of mantissa; two NaN, no infinity."""


def powers_of_two(exponents: NDArray[np.uint8], *, bias: int = 127) -> NDArray[np.float32]:
    """Return 2 ** (exponent - bias) for bytes E8M0.

    Raises:
        ValueError: a byte is 255, which stands for NaN.
    """
    if (exponents == 255).any():
        raise ValueError("scales must be powers of two, got a byte 255 (NaN)")
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - bias)


def nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the codes `[..., 2n]` of bytes `[..., n]`, low four bits first."""
    codes = np.empty((*packed.shape, 2), np.uint8)
    np.bitwise_and(packed, 15, out=codes[..., 0])
    np.right_shift(packed, 4, out=codes[..., 1])
    return codes.reshape(*packed.shape[:-1], 2 * packed.shape[-1])
