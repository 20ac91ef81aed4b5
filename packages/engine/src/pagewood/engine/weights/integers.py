"""Matrices of whole numbers as compressed-tensors and torchao store them: packed in words, or one in a byte.

Legend: N outputs, K inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pagewood.engine.weights.checkpoint_formats import HALVES, WORDS, Array, Axis, Kept, Part, divided, inputs, outputs
from pagewood.engine.weights.matrix_forms import F32
from pagewood.engine.weights.nearest import kept_int4, kept_integers, kept_values
from pagewood.engine.weights.words import unpack_dense


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scales:
    """The names and shapes of the scales and zeros of a matrix of whole numbers."""

    group: int
    """Inputs that share a scale; -1: all inputs of an output; 0: the whole matrix has one scale."""

    def shapes(self, rows: int, columns: int) -> list[tuple[int, ...]]:
        """Return the shapes that scales may have."""
        if self.group == 0:
            return [(), (1,), (1, 1)]
        groups = divided(columns, self.group, "group_size")
        return [(rows, groups), (rows,)] if groups == 1 else [(rows, groups)]

    def axes(self, columns: int) -> Sequence[Axis]:
        """Return the axes of scales."""
        return () if self.group == 0 else (outputs(1), inputs(self.group if 0 < self.group < columns else 0))

    def spread(self, stored: Array, rows: int) -> Array:
        """Return scales or zeros `[N, G]`."""
        return np.broadcast_to(stored.reshape(1, 1), (rows, 1)) if self.group == 0 else stored.reshape(rows, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Codes without gaps in words along the inputs, each moved by half of its range; zeros along the outputs."""

    num_bits: int
    """1 to 8."""
    scales: _Scales
    is_symmetric: bool

    @property
    def name(self) -> str:
        """For messages."""
        return f"pack-quantized with {self.num_bits} bits"

    def parts(self, rows: int, columns: int) -> Sequence[Part]:
        """Return weight_packed `[N, K b/32]`, weight_scale, weight_zero_point `[N b/32, G]`, weight_shape, g_idx."""
        shapes = self.scales.shapes(rows, columns)
        unit = 32 if 32 % self.num_bits else 32 // self.num_bits  # numbers of codes that fill words
        words = (rows, -(-columns * self.num_bits // 32))
        inputs_of_group = columns // (shapes[0][-1] if shapes[0] else 1)
        parts = [
            Part(suffix=".weight_packed", shape=words, dtypes=WORDS, axes=(outputs(1), inputs(unit))),
            Part(suffix=".weight_scale", shape=shapes, dtypes=HALVES, axes=self.scales.axes(columns)),
            Part(suffix=".weight_shape", shape=(2,), dtypes=("I32", "I64"), is_optional=True, axes=(), is_shape=True),
            Part(
                suffix=".weight_g_idx",
                shape=(columns,),
                dtypes=("I32", "I64"),
                is_optional=True,
                axes=(),
                group=inputs_of_group,
            ),
        ]
        if not self.is_symmetric:
            packed = (-(-rows * self.num_bits // 32), shapes[0][-1] if self.scales.group else 1)
            zeros = [packed] if self.scales.group else [(), (1,), (1, 1)]
            axes = (outputs(unit), *self.scales.axes(columns)[1:]) if self.scales.group else ()
            dtypes = WORDS if self.scales.group else ("I8", "I32")
            parts.append(Part(suffix=".weight_zero_point", shape=zeros, dtypes=dtypes, axes=axes))
        return parts

    def read(self, found: Mapping[str, Array], rows: int, columns: int) -> Kept:
        """Return the matrix."""
        shape = found.get(".weight_shape")
        if shape is not None and tuple(shape) != (rows, columns):
            raise ValueError(f".weight_shape must hold {(rows, columns)}, got {tuple(int(size) for size in shape)}")
        scales: F32 = self.scales.spread(found[".weight_scale"], rows)
        zeros = None
        if not self.is_symmetric:
            stored = found[".weight_zero_point"]
            if self.scales.group == 0:
                zeros = self.scales.spread(stored, rows).astype(np.int32) + (1 << self.num_bits - 1)
            else:
                zeros = unpack_dense(np.ascontiguousarray(stored.T), self.num_bits, rows).T
        words = found[".weight_packed"]
        order = in_disorder(found.get(".weight_g_idx"), columns, scales.shape[1], ".weight_g_idx")
        if order is not None:
            codes = unpack_dense(words, self.num_bits, columns)
            offsets = np.full(scales.shape, 1 << self.num_bits - 1) if zeros is None else zeros
            return kept_out_of_order(codes, scales, offsets, order)
        if self.num_bits == 4 and columns % 8 == 0:
            return kept_int4(words.astype("<i4", copy=False).view(np.uint8), scales, zeros)
        return kept_integers(unpack_dense(words, self.num_bits, columns), scales, zeros, num_bits=self.num_bits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Signed codes, one in a byte."""

    name: str
    num_bits: int
    """1 to 8: codes are in [-2 ** (num_bits - 1), 2 ** (num_bits - 1))."""
    scales: _Scales
    zeros: Literal["none", "stored", "if there"]
    prefix: str = ".weight"
    """Beginning of the suffixes of scales and zeros."""
    codes: str = ".weight"

    def parts(self, rows: int, columns: int) -> Sequence[Part]:
        """Return the codes `[N, K]`, scales, and zeros of the same shape."""
        shapes = self.scales.shapes(rows, columns)
        axes = self.scales.axes(columns)
        parts = [
            Part(suffix=self.codes, shape=(rows, columns), dtypes=("I8",), axes=(outputs(1), inputs(1))),
            Part(suffix=f"{self.prefix}_scale", shape=shapes, dtypes=HALVES, axes=axes),
        ]
        if self.zeros != "none":
            name, optional = f"{self.prefix}_zero_point", self.zeros == "if there"
            parts.append(Part(suffix=name, shape=shapes, dtypes=("I8", *HALVES), is_optional=optional, axes=axes))
        return parts

    def read(self, found: Mapping[str, Array], rows: int, columns: int) -> Kept:
        """Return the matrix."""
        middle = 1 << (self.num_bits - 1)
        stored = found[self.codes]
        if self.num_bits < 8 and (stored.min() < -middle or stored.max() >= middle):
            raise ValueError(
                f"{self.codes} must be in [{-middle}, {middle}), got {int(stored.min())} to {int(stored.max())}"
            )
        codes = (stored.view(np.uint8) + np.uint8(middle)) & np.uint8(2 * middle - 1)
        scales = self.scales.spread(found[f"{self.prefix}_scale"], rows)
        zeros = found.get(f"{self.prefix}_zero_point")
        if zeros is None:
            return kept_integers(codes, scales, None, num_bits=self.num_bits)
        if (zeros != np.rint(zeros)).any():
            spread = self.scales.spread(zeros, rows)
            order = np.arange(columns) // (columns // scales.shape[1])
            return kept_out_of_order(codes, scales, spread + middle, order, why="its zeros are not whole")
        moved = self.scales.spread(zeros, rows).astype(np.int32) + middle
        return kept_integers(codes, scales, moved, num_bits=self.num_bits)


def scales_of(group: int) -> _Scales:
    """Return scales for groups of `group` inputs; -1: for outputs; 0: one for the matrix."""
    return _Scales(group=group)


def in_disorder(order: Array | None, columns: int, num_groups: int, name: str) -> Array | None:
    """Return the group of each input `[K]` if groups are not consecutive inputs, otherwise None.

    Raises:
        ValueError: a group does not exist.
    """
    if order is None or (order == -1).all():  # compressed-tensors: none yet
        return None
    outside = (order < 0) | (order >= num_groups)
    if outside.any():
        raise ValueError(f"{name} must be in [0, {num_groups}), got {int(order[outside][0])}")
    return None if (order == np.arange(columns) // (columns // num_groups)).all() else order


def kept_out_of_order(
    codes: Array, scales: F32, zeros: Array, order: Array, *, why: str = "its groups are of inputs out of order"
) -> Kept:
    """Keep codes `[N, K]` whose input k belongs to group order[k]: value = (code - zero) * scale."""

    def decode(run: slice) -> F32:
        centred = codes[run].astype(np.float32) - zeros[run][:, order].astype(np.float32)
        return centred * scales[run][:, order]

    return kept_values(codes.shape[0], codes.shape[1], decode, why=why)
