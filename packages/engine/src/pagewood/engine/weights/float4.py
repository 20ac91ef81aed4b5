"""Matrices of 4-bit floating point numbers: MXFP4, and NVFP4 in the words of two libraries.

They are kept as they are stored. Scales that `Float4` does not take, such as NaN or a power of two below the normal
numbers of float32, are kept with int8: twice a number of four bits is whole.

Source: Open Compute Project, OCP Microscaling Formats, 2023 (MXFP4: gpt-oss, compressed-tensors); NVIDIA's NVFP4.
Legend: N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pagewood.engine.weights.checkpoint_formats import FLOAT8, HALVES, Array, Axis, Kept, Part, divided, inputs, outputs
from pagewood.engine.weights.matrix_forms import F32, MX_GROUP, SHORT_GROUP, Float4, Int8Group
from pagewood.engine.weights.small_floats import E2M1_DOUBLED, E4M3, nibbles, powers_of_two

_LEAST_EXPONENT = 2
_LARGEST_E4M3 = 0x7E
_SCALES = "a scale is not a positive normal number"


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
        groups = divided(columns, MX_GROUP, "groups of mxfp4")
        packed = (rows, groups, MX_GROUP // 2) if self.codes == "_blocks" else (rows, columns // 2)
        return [
            Part(suffix=self.codes, shape=packed, dtypes=("U8",), axes=_axes(MX_GROUP)),
            Part(suffix=self.scales, shape=(rows, groups), dtypes=("U8", "F8_E8M0"), axes=_axes(MX_GROUP)),
        ]

    def read(self, found: Mapping[str, Array], rows: int, columns: int) -> Kept:
        """Return the matrix."""
        return kept_mxfp4(found[self.codes].reshape(rows, -1), found[self.scales])


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
        groups = divided(columns, SHORT_GROUP, "groups of nvfp4")
        return [
            Part(suffix=self.codes, shape=(rows, columns // 2), dtypes=("U8",), axes=_axes(SHORT_GROUP)),
            Part(suffix=self.scales, shape=(rows, groups), dtypes=FLOAT8, axes=_axes(SHORT_GROUP)),
            Part(suffix=self.whole, shape=[(), (1,), (1, 1)], dtypes=HALVES, axes=()),
        ]

    def read(self, found: Mapping[str, Array], rows: int, columns: int) -> Kept:
        """Return the matrix."""
        packed, whole = found[self.codes], np.float32(found[self.whole].reshape(()))
        if self.divides and not whole:
            raise ValueError(f"{self.whole} must not be 0, because values are divided by it")
        factor, scales = (1 / whole if self.divides else whole), found[self.scales]
        if (scales <= _LARGEST_E4M3).all() and np.isfinite(factor):
            return Kept(weight=Float4(packed, scales, np.full(rows, factor, np.float32)))
        halves: F32 = E4M3[scales] / np.float32(2) * factor
        return Kept(weight=Int8Group(E2M1_DOUBLED[nibbles(packed)], halves, None, SHORT_GROUP), why=_SCALES)


def kept_mxfp4(packed: Array, exponents: Array) -> Kept:
    """Keep numbers with powers of two.

    Args:
        packed: `[N, K / 2] uint8`, as in `Float4.codes`.
        exponents: `[N, K / 32] uint8`, E8M0.

    Raises:
        ValueError: an exponent is 255, which stands for NaN.
    """
    halves = powers_of_two(exponents, bias=128)
    is_small = exponents < _LEAST_EXPONENT
    if is_small.any():
        magnitudes = packed.reshape(*exponents.shape, -1) & np.uint8(0x77)
        if (magnitudes.any(axis=2) & is_small).any():
            return Kept(weight=Int8Group(E2M1_DOUBLED[nibbles(packed)], halves, None, MX_GROUP), why=_SCALES)
        exponents = np.where(is_small, np.uint8(_LEAST_EXPONENT), exponents)  # of zeros alone
    return Kept(weight=Float4(np.ascontiguousarray(packed), exponents, None))
