"""The block types of GGUF as forms: their codes are kept, five and six bits in eight, with scales in float32.

Source: ggml-quants.c of llama.cpp. Legend: N outputs, K inputs, B blocks of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.weights.checkpoint_formats import Array, Kept, Part, inputs, outputs
from pagewood.engine.weights.gguf.architecture import Order
from pagewood.engine.weights.gguf.file import BLOCKS
from pagewood.engine.weights.gguf.small_blocks import SMALL_BLOCKS
from pagewood.engine.weights.matrix_forms import F32, SHORT_GROUP, Int8Group
from pagewood.engine.weights.matrix_parts import with_heads
from pagewood.engine.weights.nearest import kept_integers, kept_with_offsets

Bytes = NDArray[np.uint8]
_GROUP = 32
_PAIRS = np.array([0, 2, 4, 6], np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFBlocks:
    """A matrix of blocks."""

    kind: str
    """A type of `file.BLOCKS` with blocks of more than one number."""
    heads: Order | None = None
    """The stored place of each head among the inputs, if blocks have inputs of several heads; None: they stay where
    they are."""

    @property
    def name(self) -> str:
        """Name for messages."""
        return f"gguf {self.kind}"

    def parts(self, rows: int, columns: int) -> Sequence[Part]:
        """Return the one tensor."""
        [block] = (numbers for name, numbers, _ in BLOCKS.values() if name == self.kind)
        axes = (outputs(1), inputs(block)) if self.heads is None else None
        return [Part(suffix=".weight", shape=(rows, columns), dtypes=(self.kind,), axes=axes)]

    def read(self, found: Mapping[str, Array], rows: int, columns: int) -> Kept:
        """Return the matrix; `found` has the bytes of its blocks `[N, B * bytes]`."""
        kept = self._read(found, rows, columns)
        return kept if self.heads is None else replace(kept, weight=with_heads(kept.weight, self.heads))

    def _read(self, found: Mapping[str, Array], rows: int, columns: int) -> Kept:
        raw: Bytes = found[".weight"]
        match self.kind:
            case "Q8_0":
                blocks = raw.reshape(rows, -1, 34)
                codes = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8).reshape(rows, columns)
                return Kept(weight=Int8Group(codes, _half(blocks, 0), None, _GROUP))
            case "Q4_0":
                blocks = raw.reshape(rows, -1, 18)
                return kept_integers(_nibbles(blocks[:, :, 2:], rows), _half(blocks, 0), None, num_bits=4)
            case "Q5_0":
                blocks = raw.reshape(rows, -1, 22)
                return kept_integers(_five_bits(blocks, 2, rows), _half(blocks, 0), None, num_bits=5)
            case "Q4_1":
                blocks = raw.reshape(rows, -1, 20)
                return kept_with_offsets(
                    _nibbles(blocks[:, :, 4:], rows), _half(blocks, 0), _half(blocks, 2), num_bits=4
                )
            case "Q5_1":
                blocks = raw.reshape(rows, -1, 24)
                codes = _five_bits(blocks, 4, rows)
                return kept_with_offsets(codes, _half(blocks, 0), _half(blocks, 2), num_bits=5)
            case "Q4_K":
                return _q4_k(raw.reshape(rows, -1, 144))
            case "Q5_K":
                return _q5_k(raw.reshape(rows, -1, 176))
            case "Q6_K":
                return _q6_k(raw.reshape(rows, -1, 210))
            case kind if kind in SMALL_BLOCKS:
                return SMALL_BLOCKS[kind](raw)
            case _:
                raise ValueError(f"kind must be a type with blocks, got {self.kind}")


def _half(blocks: Bytes, at: int) -> F32:
    """Return the float16 at byte `at` of each block, `[N, B]`."""
    halves = np.ascontiguousarray(blocks[:, :, at : at + 2]).view("<f2")
    return halves[:, :, 0].astype(np.float32)


def _nibbles(packed: Bytes, rows: int) -> Bytes:
    """Return the codes `[N, K]` of blocks of 32: the low four bits of 16 bytes, then the high ones."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=2).reshape(rows, -1)


def _five_bits(blocks: Bytes, at: int, rows: int) -> Bytes:
    """Return the codes `[N, K]` of blocks of 32: fifth bits in four bytes from `at` on, then lower bits in 16 bytes."""
    high = np.unpackbits(blocks[:, :, at : at + 4], axis=2, bitorder="little").reshape(rows, -1)
    return _nibbles(blocks[:, :, at + 4 :], rows) | high << np.uint8(4)


def _q4_k(blocks: Bytes) -> Kept:
    packed = blocks[:, :, 16:].reshape(*blocks.shape[:2], 4, 32)
    codes = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=3)
    return kept_with_offsets(codes.reshape(len(blocks), -1), *_six_bit_scales(blocks), num_bits=4)


def _q5_k(blocks: Bytes) -> Kept:
    packed = blocks[:, :, 48:].reshape(*blocks.shape[:2], 4, 32)
    codes = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=3).reshape(*blocks.shape[:2], 8, 32)
    fifth = blocks[:, :, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    codes |= fifth << np.uint8(4)
    return kept_with_offsets(codes.reshape(len(blocks), -1), *_six_bit_scales(blocks), num_bits=5)


def _six_bit_scales(blocks: Bytes) -> tuple[F32, F32]:
    """Return scales and offsets `[N, 8 B]` of blocks of 256.

    They have two float16, of which the second is negated, and eight scales and minima of six bits in bytes 4 to 15.
    """
    packed = blocks[:, :, 4:16]
    low, middle, high = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    scales = np.concatenate([low & np.uint8(63), high & np.uint8(15) | low >> np.uint8(6) << np.uint8(4)], axis=2)
    minima = np.concatenate([middle & np.uint8(63), high >> np.uint8(4) | middle >> np.uint8(6) << np.uint8(4)], axis=2)
    rows = len(blocks)
    wide = (_half(blocks, 0)[:, :, None] * scales.astype(np.float32)).reshape(rows, -1)
    return wide, (-_half(blocks, 2)[:, :, None] * minima.astype(np.float32)).reshape(rows, -1)


def _q6_k(blocks: Bytes) -> Kept:
    """Return blocks of 256 with codes of six bits less 32, in groups of 16 inputs."""
    low, high = blocks[:, :, :128].reshape(*blocks.shape[:2], 2, 64), blocks[:, :, 128:192]
    codes = np.stack([low & np.uint8(15), low >> np.uint8(4)], axis=3).reshape(*blocks.shape[:2], 2, 4, 32)
    codes |= (high.reshape(*blocks.shape[:2], 2, 1, 32) >> _PAIRS[:, None] & np.uint8(3)) << np.uint8(4)
    signed = codes.reshape(len(blocks), -1).view(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[:, :, 192:208]).view(np.int8).astype(np.float32)
    scales *= _half(blocks, 208)[:, :, None]
    return Kept(weight=Int8Group(signed, scales.reshape(len(blocks), -1), None, SHORT_GROUP))
