"""The numbers that a weight matrix may consist of: float32, bfloat16, float16, int8, int4 and float4, with scales.

A form is storage: how the numbers of a matrix lie in a checkpoint or a cache folder, row by row. The kernels of a
device have layouts of their own, which they make from a form.

Legend: N outputs (rows), K inputs (columns), G groups of inputs of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.weights.small_floats import E2M1_DOUBLED, E4M3, nibbles, powers_of_two

GROUPS = (32, 64, 128)
"""Inputs that may share a scale."""
SHORT_GROUP = 16
"""Inputs that may share a scale in `Int8Group` and `Float4` too."""
MX_GROUP = 32
"""Inputs that share a power of two in `Float4`."""
INT4_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""Parts of a group's range for which int4 scales are tried: a smaller part gives finer rounding, but cuts the ends."""
_SLICE_BYTES = 1 << 18  # bytes of float32 values quantised at a time, so that temporary arrays stay in the cache

F32 = NDArray[np.float32]


class _Form:
    """The interface of all forms. Invariant: their arrays have the documented shapes; the first holds the numbers."""

    __slots__ = ()

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        rows, size = getattr(self, fields(cast("Weight", self))[0].name).shape
        return rows, size

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = (getattr(self, field.name) for field in fields(cast("Weight", self)))
        return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))

    def dequantised(self) -> F32:
        """Return the matrix `[N, K]` as float32, in new memory."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class Float32(_Form):
    """Numbers as they are computed with."""

    values: NDArray[np.float32]
    """[N, K] float32"""

    def __post_init__(self) -> None:
        _check_matrix("values", self.values, np.float32)

    def dequantised(self) -> F32:
        """Return a copy."""
        return self.values.copy()


@dataclass(frozen=True, slots=True, eq=False)
class BFloat16(_Form):
    """The upper halves of float32 numbers."""

    bits: NDArray[np.uint16]
    """[N, K] uint16"""

    def __post_init__(self) -> None:
        _check_matrix("bits", self.bits, np.uint16)

    def dequantised(self) -> F32:
        """Return the matrix `[N, K]` as float32; exact."""
        return (self.bits.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Float16(_Form):
    """Half precision."""

    values: NDArray[np.float16]
    """[N, K] float16"""

    def __post_init__(self) -> None:
        _check_matrix("values", self.values, np.float16)

    def dequantised(self) -> F32:
        """Return the matrix `[N, K]` as float32; exact."""
        return self.values.astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Int8(_Form):
    """Whole numbers with a scale for each output: value = code * scale."""

    codes: NDArray[np.int8]
    """[N, K] int8, -127 to 127 (-128 is allowed)"""
    scales: NDArray[np.float32]
    """[N] float32"""

    def __post_init__(self) -> None:
        _check_matrix("codes", self.codes, np.int8)
        _check("scales", self.scales, np.float32, self.codes.shape[:1])

    def dequantised(self) -> F32:
        """Return the matrix `[N, K]` as float32."""
        return self.codes.astype(np.float32) * self.scales[:, None]


@dataclass(frozen=True, slots=True, eq=False)
class Int8Group(_Form):
    """Whole numbers with a scale, and possibly a zero or an offset, for each group of a row.

    value = (code - zero) * scale, or code * scale + offset.
    """

    codes: NDArray[np.int8]
    """[N, K] int8"""
    scales: NDArray[np.float32]
    """[N, G] float32, G = K / group"""
    zeros: NDArray[np.int8] | None
    """[N, G] int8; None: all are 0"""
    group: int
    """16 (then there are no zeros), 32, 64 or 128, a divisor of K"""
    offsets: NDArray[np.float32] | None = None
    """[N, G] float32; None: all are 0. If there are offsets, there are no zeros."""

    def __post_init__(self) -> None:
        _check_matrix("codes", self.codes, np.int8)
        _check_groups(self.group, self.shape, self.scales, (SHORT_GROUP, *GROUPS))
        _check_parts(self.zeros, np.int8, self.offsets, self.scales)
        if self.zeros is not None and self.group == SHORT_GROUP:
            raise ValueError(f"zeros must be None in groups of {SHORT_GROUP}, got zeros of shape {self.zeros.shape}")

    def dequantised(self) -> F32:
        """Return the matrix `[N, K]` as float32."""
        grouped = self.codes.reshape(len(self.codes), -1, self.group).astype(np.float32)
        if self.zeros is not None:
            grouped -= self.zeros[:, :, None].astype(np.float32)
        grouped *= self.scales[:, :, None]
        if self.offsets is not None:
            grouped += self.offsets[:, :, None]
        return grouped.reshape(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Int4(_Form):
    """Codes 0 to 15 with a scale, and a zero or an offset, for each group of a row.

    value = (code - zero) * scale, or code * scale + offset.
    """

    codes: NDArray[np.uint8]
    """[N, K / 2] uint8: byte k of a row holds the codes of inputs 2k (low four bits) and 2k + 1 (high four bits)"""
    scales: NDArray[np.float32]
    """[N, G] float32, G = K / group"""
    zeros: NDArray[np.uint8] | None
    """[N, G] uint8, 0 to 15, one per byte (GPTQ v1 has 16 too); None: all are 8, or there are offsets"""
    group: int
    """32, 64 or 128, a divisor of K"""
    offsets: NDArray[np.float32] | None = None
    """[N, G] float32; None: there are zeros."""

    def __post_init__(self) -> None:
        _check_matrix("codes", self.codes, np.uint8)
        _check_groups(self.group, self.shape, self.scales, GROUPS)
        _check_parts(self.zeros, np.uint8, self.offsets, self.scales)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        rows, half = self.codes.shape
        return rows, 2 * half

    def unpacked(self) -> NDArray[np.uint8]:
        """Return the codes `[N, K]`, one per byte."""
        return nibbles(self.codes)

    def dequantised(self) -> F32:
        """Return the matrix `[N, K]` as float32."""
        rows, size = self.shape
        values = self.unpacked().reshape(rows, size // self.group, self.group).astype(np.float32)
        if self.offsets is None:
            values -= 8 if self.zeros is None else self.zeros[:, :, None].astype(np.float32)
        values *= self.scales[:, :, None]
        if self.offsets is not None:
            values += self.offsets[:, :, None]
        return values.reshape(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Float4(_Form):
    """Numbers E2M1 with a scale of one byte for each group of a row, and possibly a factor for each output.

    value = number * (scale * factor). In groups of 32 (MXFP4) a scale is a power of two, in groups of 16 (NVFP4) E4M3.
    """

    codes: NDArray[np.uint8]
    """[N, K / 2] uint8: byte k of a row holds the numbers of inputs 2k (low four bits) and 2k + 1 (high four bits)"""
    scales: NDArray[np.uint8]
    """[N, K / group] uint8: E8M0 from 2 to 254, so that halves are normal float32; or E4M3 from 0 to 0x7E"""
    factors: NDArray[np.float32] | None
    """[N] float32 in groups of 16; None in groups of 32."""

    def __post_init__(self) -> None:
        _check_matrix("codes", self.codes, np.uint8)
        _check_group(self.group, self.shape[1], (SHORT_GROUP, MX_GROUP))
        _check("scales", self.scales, np.uint8, (self.shape[0], self.shape[1] // self.group))
        low, high = (2, 254) if self.factors is None else (0, 0x7E)
        if self.scales.size and (self.scales.min() < low or self.scales.max() > high):
            raise ValueError(f"scales must be in [{low}, {high}], got {self.scales.min()} to {self.scales.max()}")
        if self.factors is not None:
            _check("factors", self.factors, np.float32, self.codes.shape[:1])

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return MX_GROUP if self.factors is None else SHORT_GROUP

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        rows, half = self.codes.shape
        return rows, 2 * half

    def as_int8(self) -> Int8Group:
        """Return the same values as whole numbers with float32 scales."""
        if self.factors is None:
            halves = powers_of_two(self.scales, bias=128)
        else:
            halves = E4M3[self.scales] / np.float32(2) * self.factors[:, None]
        return Int8Group(E2M1_DOUBLED[nibbles(self.codes)], halves, None, self.group)

    def dequantised(self) -> F32:
        """Return the matrix `[N, K]` as float32."""
        return self.as_int8().dequantised()


Weight: TypeAlias = Float32 | BFloat16 | Float16 | Int8 | Int8Group | Int4 | Float4
"""A matrix of weights `[N, K]` in any form."""


def stacked(parts: Sequence[Weight]) -> Weight:
    """Return matrices of one form and number of inputs, one below the other, in new memory.

    Raises:
        ValueError: they differ in form, in their inputs, in how these are grouped or in whether groups have offsets.
    """
    first = parts[0]
    for part in parts:
        same = type(part) is type(first) and part.shape[1] == first.shape[1]
        if not same or layout(part) != layout(first):
            raise ValueError(
                f"parts must have one form and {first.shape[1]} inputs, got {type(first).__name__} and "
                f"{type(part).__name__} of shape {part.shape}"
            )

    def joined(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        if not any(isinstance(value, np.ndarray) for value in values):
            return values[0]  # the group, or no zeros or offsets
        if name == "zeros":  # symmetric parts beside others
            values = [
                _written_zeros(part) if zeros is None else zeros for part, zeros in zip(parts, values, strict=True)
            ]
        return np.concatenate(values)

    return type(first)(**{field.name: joined(field.name) for field in fields(first)})


def rows_of(weight: Weight, rows: slice | NDArray[np.int64]) -> Weight:
    """Return some outputs of a matrix, which refer to its memory if they are a slice of it."""
    values: dict[str, Any] = {field.name: getattr(weight, field.name) for field in fields(weight)}
    kept: dict[str, Any] = {
        name: one if one is None or isinstance(one, int) else one[rows] for name, one in values.items()
    }
    return type(weight)(**kept)


def layout(weight: Weight) -> tuple[type[Weight], int, bool]:
    """Return the properties that stacked matrices share: form, group (0: none), and whether groups have offsets."""
    return type(weight), getattr(weight, "group", 0), getattr(weight, "offsets", None) is not None


def _written_zeros(part: Weight) -> NDArray[np.generic]:
    assert isinstance(part, Int4 | Int8Group)
    return np.full(
        part.scales.shape, 8 if isinstance(part, Int4) else 0, np.uint8 if isinstance(part, Int4) else np.int8
    )


def to_bfloat16(values: F32) -> BFloat16:
    """Return `values` `[N, K]`, rounded to nearest, ties to even. Values that are bfloat16 already stay as they are."""
    _check_matrix("values", values, np.float32)
    bits = np.empty(values.shape, np.uint16)
    for rows in _slices(values):
        whole = np.ascontiguousarray(values[rows]).view(np.uint32)
        rounded = (whole + (0x7FFF + ((whole >> 16) & 1))) >> 16
        is_nan = np.isnan(values[rows])  # rounding could turn a NaN into infinity
        bits[rows] = np.where(is_nan, 0x7FC0, rounded)
    return BFloat16(bits)


def quantise_int8(values: F32) -> Int8:
    """Round `values` `[N, K]` to int8 with a scale for each output: its largest magnitude becomes 127.

    An output with a value that is not finite gets the scale NaN.
    """
    _check_matrix("values", values, np.float32)
    codes, scales = np.empty(values.shape, np.int8), np.empty(len(values), np.float32)
    for rows in _slices(values):
        part, is_bad = _finite(values[rows])
        scale = np.maximum(np.abs(part).max(axis=1, initial=0) / np.float32(127), np.finfo(np.float32).tiny)
        codes[rows] = np.rint(part / scale[:, None])
        scales[rows] = np.where(is_bad, np.float32(np.nan), scale)
    return Int8(codes, scales)


def quantise_int4(values: F32, *, group: int = 32, symmetric: bool = True) -> Int4:
    """Round `values` `[N, K]` to int4 with a scale for each group of inputs.

    A few scales are tried for each group, and the one with the smallest squared error is taken. Scales are refitted to
    the codes by least squares. A group with a value that is not finite gets the scale NaN.

    Args:
        values: `[N, K] float32`.
        group: inputs that share a scale: 32, 64 or 128, a divisor of K.
        symmetric: whether the zero of all groups is 8; otherwise each has its own.

    Raises:
        ValueError: `group` does not fit.
    """
    _check_matrix("values", values, np.float32)
    _check_group(group, values.shape[1])
    rows, size = values.shape
    codes = np.empty((rows, size // 2), np.uint8)
    scales = np.empty((rows, size // group), np.float32)
    zeros = None if symmetric else np.empty((rows, size // group), np.uint8)
    for part in _slices(values):
        grouped, is_bad = _finite(np.ascontiguousarray(values[part]).reshape(-1, group))
        wholes, found, zero = _fit_int4(grouped, symmetric=symmetric)
        found[is_bad] = np.nan
        flat = wholes.reshape(-1, size)
        codes[part] = flat[:, ::2] | flat[:, 1::2] << 4
        scales[part] = found.reshape(-1, size // group)
        if zeros is not None:
            zeros[part] = zero.reshape(-1, size // group)
    return Int4(codes, scales, zeros, group)


def _fit_int4(grouped: F32, *, symmetric: bool) -> tuple[NDArray[np.uint8], F32, NDArray[np.uint8]]:
    """Return (codes `[n, group]`, scales `[n]`, zeros `[n]`) of the groups `[n, group]`."""
    tiny = np.finfo(np.float32).tiny
    if symmetric:
        # The code 0 stands for -8 scales, 15 for 7: the largest magnitude gets the longer side, regardless of its sign.
        at = np.abs(grouped).argmax(axis=1)
        full = grouped[np.arange(len(grouped)), at] / np.float32(-8)
        full = np.where(np.abs(full) < tiny, tiny, full)
        zero = np.full(len(grouped), 8, np.float32)
    else:
        low, high = np.minimum(grouped.min(axis=1), 0), np.maximum(grouped.max(axis=1), 0)
        full = np.maximum((high - low) / np.float32(15), tiny)
        zero = np.rint(-low / full)
    ratios = grouped / full[:, None]  # at most 15, so that squares do not overflow
    low_ends, high_ends = -zero[:, None], 15 - zero[:, None]
    codes = np.empty(grouped.shape, np.float32)

    def round_to(shares: F32 | np.float32) -> F32:
        """Return codes minus their zeros, in memory that the next call writes over."""
        np.divide(ratios, shares, out=codes)
        np.rint(codes, out=codes)
        np.clip(codes, low_ends, high_ends, out=codes)
        return codes

    best_shares = np.ones(len(grouped), np.float32)
    best_scales = np.ones(len(grouped), np.float32)
    best_gains = np.full(len(grouped), -1, np.float32)
    for share in map(np.float32, INT4_SHARES):
        centred = round_to(share)
        squares = np.einsum("nk,nk->n", centred, centred)
        products = np.einsum("nk,nk->n", centred, ratios)
        gains = products * products / np.maximum(squares, 1)  # reduction of the error by the best scale for these codes
        better = gains > best_gains
        best_gains[better], best_shares[better] = gains[better], share
        best_scales[better] = (products / np.maximum(squares, 1))[better]
    wholes = (round_to(best_shares[:, None]) - low_ends).astype(np.uint8)
    best_scales[best_gains <= 0] = 1  # of zeros alone
    return wholes, best_scales * full.astype(np.float32), zero.astype(np.uint8)


def _slices(values: F32) -> list[slice]:
    """Return runs of at least one row and otherwise at most `_SLICE_BYTES`."""
    rows = max(1, _SLICE_BYTES // max(4 * values.shape[1], 1))
    return [slice(start, min(start + rows, len(values))) for start in range(0, len(values), rows)]


def _check_matrix(name: str, array: NDArray[np.generic], dtype: type[np.generic]) -> None:
    if array.ndim != 2 or array.dtype != dtype:
        wanted = np.dtype(dtype)
        raise ValueError(f"{name} must be {wanted} of two dimensions, got {array.dtype} of shape {array.shape}")


def _check(name: str, array: NDArray[np.generic], dtype: type[np.generic], shape: tuple[int, ...]) -> None:
    if array.shape != shape or array.dtype != dtype:
        wanted = np.dtype(dtype)
        raise ValueError(f"{name} must be {wanted} of shape {shape}, got {array.dtype} of shape {array.shape}")


def _finite(values: F32) -> tuple[F32, NDArray[np.bool_]]:
    """Return `values` `[n, k]` with zeros in rows that hold NaN or infinity, and a mask of these rows."""
    is_bad: NDArray[np.bool_] = np.logical_not(np.isfinite(values).all(axis=1))
    return (np.where(is_bad[:, None], np.float32(0), values) if is_bad.any() else values), is_bad


def _check_parts(
    zeros: NDArray[np.generic] | None, dtype: type[np.generic], offsets: NDArray[np.generic] | None, scales: F32
) -> None:
    if zeros is not None:
        _check("zeros", zeros, dtype, scales.shape)
    if offsets is not None:
        _check("offsets", offsets, np.float32, scales.shape)
        if zeros is not None:
            raise ValueError(f"zeros must be None where there are offsets, got zeros of shape {zeros.shape}")


def _check_group(group: int, size: int, allowed: Sequence[int] = GROUPS) -> None:
    if group not in allowed:
        raise ValueError(f"group must be one of {', '.join(map(str, allowed))}, got {group}")
    if size % group:
        raise ValueError(f"group must divide the {size} inputs, got {group}")


def _check_groups(group: int, shape: tuple[int, int], scales: NDArray[np.generic], allowed: Sequence[int]) -> None:
    _check_group(group, shape[1], allowed)
    _check("scales", scales, np.float32, (shape[0], shape[1] // group))
