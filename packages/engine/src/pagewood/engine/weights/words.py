"""Codes of a few bits in words of 32."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.weights.checkpoint_formats import Array


def unpack_words(words: Array, num_bits: int, *, axis: int) -> NDArray[np.uint8]:
    """Return the codes of words `[a, b]` of 32 bits, lowest bits first, along `axis`; no code crosses two words.

    Args:
        words: `[a, b]` int32 or uint32.
        num_bits: 2, 4 or 8.
        axis: along which the codes of a word follow each other: the result is longer by 32 / num_bits there.
    """
    shifts = np.arange(0, 32, num_bits, dtype=np.uint32)
    whole = np.ascontiguousarray(words).view(np.uint32)
    mask = np.uint32((1 << num_bits) - 1)
    if axis == 1:
        codes = (whole[:, :, None] >> shifts & mask).astype(np.uint8)
        return codes.reshape(len(whole), -1)
    codes = (whole[:, None, :] >> shifts[None, :, None] & mask).astype(np.uint8)
    return codes.reshape(-1, whole.shape[1])


def unpack_dense(words: Array, num_bits: int, columns: int) -> NDArray[np.uint8]:
    """Return codes `[N, columns]` of rows of words `[N, ceil(columns * num_bits / 32)]` without gaps: some cross two.

    Args:
        words: int32 or uint32.
        num_bits: 1 to 8.
        columns: codes of a row.
    """
    as_bytes = np.ascontiguousarray(words).astype("<u4", copy=False).view(np.uint8)
    if num_bits == 8:
        return as_bytes[:, :columns]
    bits = np.unpackbits(as_bytes, axis=1, count=columns * num_bits, bitorder="little")
    return np.packbits(bits.reshape(len(words), columns, num_bits), axis=2, bitorder="little")[:, :, 0]
