"""Matrices of 4-bit floating point numbers: MXFP4, and NVFP4 in the words of two libraries.

Twice such a number is whole, so int8 in groups holds them exactly.

Source: Open Compute Project, OCP Microscaling Formats, 2023 (MXFP4: gpt-oss, compressed-tensors); NVIDIA's NVFP4.
Legend: N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pagewood.engine.weights.checkpoint_formats import FLOAT8, HALVES, Array, Axis, Kept, Part, divided, inputs, outputs
from pagewood.engine.weights.matrix_forms import F32, Int8Group
from pagewood.engine.weights.small_floats import E2M1_DOUBLED, E4M3, nibbles, powers_of_two

_MX_GROUP = 32
_NV_GROUP = 16


def _axes(group: int) -> Sequence[Axis]:
    return outputs(1), inputs(group)


@dataclass(frozen=True, slots=True, kw_only=True)
class MXFP4:
    """Numbers E2M1 with a power of two for each 32 inputs."""

    codes: str = "_blocks"
    """Suffix of the numbers: `_blocks` `[N, K/32, 16]` (gpt-oss) or another for `[N, K/2]`."""
    scales: str = "_scales"

    @property
    def name(self) -> str:
        """For messages."""
        return "mxfp4"

    def parts(self, rows: int, columns: int) -> Sequence[Part]:
        """Return numbers, two in a byte, low four bits first, and exponents `[N, K/32]`."""
        groups = divided(columns, _MX_GROUP, "groups of mxfp4")
        packed = (rows, groups, _MX_GROUP // 2) if self.codes == "_blocks" else (rows, columns // 2)
        return [
            Part(suffix=self.codes, shape=packed, dtypes=("U8",), axes=_axes(_MX_GROUP)),
            Part(suffix=self.scales, shape=(rows, groups), dtypes=("U8", "F8_E8M0"), axes=_axes(_MX_GROUP)),
        ]

    def read(self, found: Mapping[str, Array], rows: int, columns: int) -> Kept:
        """Return the matrix."""
        codes = E2M1_DOUBLED[nibbles(found[self.codes].reshape(rows, -1))]
        return Kept(weight=Int8Group(codes, powers_of_two(found[self.scales], bias=128), None, _MX_GROUP))


@dataclass(frozen=True, slots=True, kw_only=True)
class NVFP4:
    """Numbers E2M1 with a scale E4M3 for each 16 inputs, and a scale of the whole matrix."""

    codes: str
    """Suffix of the numbers `[N, K/2]`, two in a byte, low four bits first."""
    scales: str
    whole: str
    """Suffix of the scale of the whole matrix."""
    divides: bool
    """Whether values are divided by the scale of the whole matrix, and not multiplied."""

    @property
    def name(self) -> str:
        """For messages."""
        return "nvfp4"

    def parts(self, rows: int, columns: int) -> Sequence[Part]:
        """Return numbers, scales `[N, K/16]` and the scale of the whole matrix."""
        groups = divided(columns, _NV_GROUP, "groups of nvfp4")
        return [
            Part(suffix=self.codes, shape=(rows, columns // 2), dtypes=("U8",), axes=_axes(_NV_GROUP)),
            Part(suffix=self.scales, shape=(rows, groups), dtypes=FLOAT8, axes=_axes(_NV_GROUP)),
            Part(suffix=self.whole, shape=[(), (1,), (1, 1)], dtypes=HALVES, axes=()),
        ]

    def read(self, found: Mapping[str, Array], rows: int, columns: int) -> Kept:
        """Return the matrix."""
        packed, whole = found[self.codes], np.float32(found[self.whole].reshape(()))
        if self.divides and not whole:
            raise ValueError(f"{self.whole} must not be 0, because values are divided by it")
        own = E4M3[found[self.scales]]
        scales: F32 = (own / (2 * whole) if self.divides else own * whole / 2).astype(np.float32, copy=False)
        return Kept(weight=Int8Group(E2M1_DOUBLED[nibbles(packed)], scales, None, _NV_GROUP))
