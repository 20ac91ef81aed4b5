"""Block types of GGUF with two or three bits, and with four bits whose codes stand for numbers of a table.

Source: ggml-quants.c of llama.cpp. Legend: N outputs, K inputs, B blocks of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.weights.checkpoint_formats import Kept
from pagewood.engine.weights.float4 import kept_mxfp4
from pagewood.engine.weights.matrix_forms import F32, Int8Group
from pagewood.engine.weights.nearest import kept_values

Bytes = NDArray[np.uint8]
_GROUP = 32
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
_PAIRS = np.array([0, 2, 4, 6], np.uint8)
_HALVES = np.array([0, 4], np.uint8)


def _half(blocks: Bytes, at: int) -> F32:
    """Return the float16 at byte `at` of each block, `[N, B]`."""
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view("<f2")[:, :, 0].astype(np.float32)


def _from_table(packed: Bytes, table: NDArray[np.int8], scales: F32) -> Kept:
    """Return a matrix of groups of 32: the codes of 16 bytes are low four bits first, then high ones.

    Args:
        packed: `[N, K / 32, 16]`.
        table: the number of each code.
        scales: `[N, K / 32]`.
    """
    codes = np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=2)
    return Kept(weight=Int8Group(table[codes].reshape(len(packed), -1), scales, None, _GROUP))


def _iq4_nl(raw: Bytes) -> Kept:
    blocks = raw.reshape(len(raw), -1, 18)
    return _from_table(blocks[:, :, 2:], _IQ4, _half(blocks, 0))


def _iq4_xs(raw: Bytes) -> Kept:
    blocks = raw.reshape(len(raw), -1, 136)
    low = (blocks[:, :, 4:8, None] >> _HALVES & np.uint8(15)).reshape(*blocks.shape[:2], 8)
    high = (blocks[:, :, 2:4, None] >> _PAIRS & np.uint8(3)).reshape(*blocks.shape[:2], 8)
    scales = (low | high << np.uint8(4)).astype(np.float32)
    scales -= 32
    scales *= _half(blocks, 0)[:, :, None]
    return _from_table(blocks[:, :, 8:].reshape(len(raw), -1, 16), _IQ4, scales.reshape(len(raw), -1))


def _mxfp4(raw: Bytes) -> Kept:
    blocks = raw.reshape(len(raw), -1, 17)
    halves = np.concatenate([blocks[:, :, 1:] & np.uint8(15), blocks[:, :, 1:] >> np.uint8(4)], axis=2)
    packed: Bytes = halves[:, :, ::2] | halves[:, :, 1::2] << np.uint8(4)  # neighbours
    return kept_mxfp4(packed.reshape(len(raw), -1), np.ascontiguousarray(blocks[:, :, 0]))


def _two_bits(packed: Bytes) -> Bytes:
    """Return codes `[N, B, 16, 16]` of `[N, B, 64]` bytes: of each 32 bytes the lowest pairs of bits come first."""
    codes = packed.reshape(*packed.shape[:2], 2, 1, 32) >> _PAIRS[:, None] & np.uint8(3)
    return codes.reshape(*packed.shape[:2], 16, 16)


def _q2_k(raw: Bytes) -> F32:
    blocks = raw.reshape(len(raw), -1, 84)
    values: F32 = _two_bits(blocks[:, :, 16:80]).astype(np.float32)
    own = blocks[:, :, :16]
    values *= (_half(blocks, 80)[:, :, None] * (own & np.uint8(15)).astype(np.float32))[..., None]
    values -= (_half(blocks, 82)[:, :, None] * (own >> np.uint8(4)).astype(np.float32))[..., None]
    return values


def _q3_k(raw: Bytes) -> F32:
    blocks = raw.reshape(len(raw), -1, 110)
    shape = blocks.shape[:2]
    third = blocks[:, :, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    values: F32 = _two_bits(blocks[:, :, 32:96]).astype(np.float32)
    values += 4 * third.reshape(*shape, 16, 16).astype(np.float32)
    values -= 4
    low = (blocks[:, :, None, 96:104] >> _HALVES[:, None] & np.uint8(15)).reshape(*shape, 16)
    high = (blocks[:, :, None, 104:108] >> _PAIRS[:, None] & np.uint8(3)).reshape(*shape, 16)
    whole = (low | high << np.uint8(4)).astype(np.float32) - np.float32(32)
    values *= (_half(blocks, 108)[:, :, None] * whole)[..., None]
    return values


def _in_floats(decode: Callable[[Bytes], F32], why: str) -> Callable[[Bytes], Kept]:
    def read(raw: Bytes) -> Kept:
        columns = decode(raw[:1]).size
        return kept_values(len(raw), columns, lambda run: decode(raw[run]).reshape(-1, columns), why=why)

    return read


SMALL_BLOCKS: Mapping[str, Callable[[Bytes], Kept]] = MappingProxyType(
    {
        "IQ4_NL": _iq4_nl,
        "IQ4_XS": _iq4_xs,
        "MXFP4": _mxfp4,
        "Q2_K": _in_floats(_q2_k, "its groups are of 16 inputs and have minima"),
        "Q3_K": _in_floats(_q3_k, "its groups are of 16 inputs"),
    }
)
"""By name of a type: function from the bytes of the blocks `[N, B * bytes]` to the matrix."""
