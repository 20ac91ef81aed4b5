"""The smallest form that holds the numbers of a checkpoint exactly, or the next one.

Legend: N outputs (rows), K inputs (columns), G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.weights.checkpoint_formats import Array, Kept
from pagewood.engine.weights.matrix_forms import (
    F32,
    GROUPS,
    SHORT_GROUP,
    BFloat16,
    Float16,
    Float32,
    Int4,
    Int8,
    Int8Group,
    Weight,
    layout,
    stacked,
    to_bfloat16,
)
from pagewood.engine.weights.small_floats import nibbles
from pagewood.engine.weights.stacking import in_one_form

_SLICE = 1 << 16  # numbers that are widened at a time
_LARGEST_HALF = 65504.0
_LEAST_HALF = 2.0**-14


def kept_int4(packed: NDArray[np.uint8], scales: F32, zeros: Array | None) -> Kept:
    """Keep codes of four bits: value = (code - zero) * scale.

    Args:
        packed: `[N, K / 2] uint8`, as in `Int4.codes`.
        scales: `[N, G] float32`.
        zeros: `[N, G]` whole numbers; None: all are 8.
    """
    group = _usable_group(2 * packed.shape[1], scales.shape[1])
    if group is None or (zeros is not None and not ((zeros >= 0) & (zeros <= 255)).all()):
        return kept_integers(nibbles(packed), scales, zeros, num_bits=4)
    scales, zeros = _regrouped(2 * packed.shape[1], group, scales, zeros)
    if zeros is not None and (zeros == 8).all():
        zeros = None
    return Kept(
        weight=Int4(np.ascontiguousarray(packed), scales, None if zeros is None else zeros.astype(np.uint8), group)
    )


def kept_integers(codes: NDArray[np.uint8], scales: F32, zeros: Array | None, *, num_bits: int) -> Kept:
    """Keep codes of `num_bits` bits: value = (code - zero) * scale.

    Args:
        codes: `[N, K] uint8`, 0 to 2 ** num_bits - 1.
        scales: `[N, G] float32`, one for each group of consecutive inputs.
        zeros: `[N, G]` whole numbers; None: all are 2 ** (num_bits - 1).
        num_bits: 1 to 8.
    """
    middle = 1 << (num_bits - 1)
    columns = codes.shape[1]
    group = _usable_group(columns, scales.shape[1])
    if zeros is None and num_bits < 4:
        zeros = np.full(scales.shape, middle, np.int32)
    if num_bits <= 4 and group is not None and (zeros is None or (zeros >= 0).all()):
        packed: NDArray[np.uint8] = codes[:, ::2] | codes[:, 1::2] << np.uint8(4)
        return kept_int4(packed, scales, zeros)
    # Codes and zeros are moved by the same number, so that they are signed.
    signed = (codes.astype(np.int16) - middle).astype(np.int8)
    offsets = np.zeros(scales.shape, np.int32) if zeros is None else zeros.astype(np.int32) - middle
    if not offsets.any() and (scales == scales[:, :1]).all():
        return Kept(weight=Int8(signed, np.ascontiguousarray(scales[:, 0])))
    if group is not None and offsets.min() >= -128 and offsets.max() <= 127:
        regrouped, moved = _regrouped(columns, group, scales, offsets if offsets.any() else None)
        return Kept(weight=Int8Group(signed, regrouped, None if moved is None else moved.astype(np.int8), group))

    if columns // scales.shape[1] % SHORT_GROUP == 0:  # and no larger group fits
        centred = signed.reshape(*scales.shape, -1).astype(np.int16) - offsets[:, :, None].astype(np.int16)
        if centred.min() >= -128 and centred.max() <= 127:
            whole = centred.astype(np.int8).reshape(codes.shape)
            return Kept(weight=Int8Group(whole, _regrouped(columns, SHORT_GROUP, scales, None)[0], None, SHORT_GROUP))

    def decode(rows: slice) -> F32:
        values = signed[rows].reshape(-1, scales.shape[1], columns // scales.shape[1]).astype(np.float32)
        values -= offsets[rows, :, None].astype(np.float32)
        values *= scales[rows, :, None]
        return values.reshape(-1, columns)

    why = f"groups are of {columns // scales.shape[1]} inputs" if group is None else "a zero is beyond 8 bits"
    return kept_values(codes.shape[0], columns, decode, why=why)


def kept_with_offsets(codes: NDArray[np.uint8], scales: F32, offsets: F32, *, num_bits: int) -> Kept:
    """Keep codes of `num_bits` bits whose groups have offsets: value = code * scale + offset.

    Args:
        codes: `[N, K] uint8`, 0 to 2 ** num_bits - 1.
        scales: `[N, G] float32`, one for each group of 32, 64 or 128 consecutive inputs.
        offsets: `[N, G] float32`.
        num_bits: 1 to 7.
    """
    group = codes.shape[1] // scales.shape[1]
    if num_bits > 4:
        return Kept(weight=Int8Group(codes.view(np.int8), scales, None, group, offsets))
    packed: NDArray[np.uint8] = codes[:, ::2] | codes[:, 1::2] << np.uint8(4)
    return Kept(weight=Int4(packed, scales, None, group, offsets))


def kept_values(rows: int, columns: int, decode: Callable[[slice], F32], *, why: str) -> Kept:
    """Keep numbers that no form with scales holds: as float16, or bfloat16 or float32 if float16 is too narrow.

    float16 is taken if it certainly rounds no value by more than 2^-11 of the largest magnitude of its row; otherwise
    bfloat16 if all values are finite.

    Args:
        rows: N.
        columns: K.
        decode: returns `[n, K] float32` for a run of n rows, the same at each call.
        why: no form with scales holds them.
    """

    def decoded(run: slice) -> F32:
        with np.errstate(invalid="ignore", over="ignore"):  # scales may have any value; the results are checked
            return decode(run)

    runs = _runs(rows, columns)
    halves = np.empty((rows, columns), np.float16)
    for run in runs:
        values = decoded(run)
        largest = np.maximum(values.max(axis=1, initial=0), -values.min(axis=1, initial=0))
        # Numbers below 2^-14 are rounded to multiples of 2^-24: by at most 2^-11 of the largest number if it is above
        # 2^-14.
        if not ((largest <= _LARGEST_HALF) & ((largest >= _LEAST_HALF) | (largest == 0))).all():  # NaN too
            break
        halves[run] = values
    else:
        return Kept(weight=Float16(halves), why=f"{why}; rounded by at most 2^-11")
    del halves
    bits = np.empty((rows, columns), np.uint16)
    for run in runs:
        values = decoded(run)
        if not np.isfinite(values).all():
            break
        bits[run] = to_bfloat16(values).bits
    else:
        return Kept(weight=BFloat16(bits), why=f"{why}; beyond float16; rounded by at most 2^-9")
    del bits
    whole = np.empty((rows, columns), np.float32)
    for run in runs:
        whole[run] = decoded(run)
    return Kept(weight=Float32(whole), why=f"{why}; not all values are finite")


def joined(parts: Sequence[Weight]) -> Weight:
    """Return matrices of the same inputs, one below the other, in the form that they share.

    Without a shared form, they are returned in a form with codes that holds all, or else as `kept_values`. A single
    matrix is not copied.
    """
    if len(parts) == 1:
        return parts[0]
    if len({layout(part) for part in parts}) == 1:
        return stacked(parts)
    alike = in_one_form(parts)
    if alike is not None:
        return stacked(alike)
    values = np.concatenate([part.dequantised() for part in parts])
    return kept_values(
        values.shape[0], values.shape[1], lambda run: values[run], why="its parts have different forms"
    ).weight


def _usable_group(columns: int, num_groups: int) -> int | None:
    """Return the largest group of inputs that forms support and that divides the groups of a checkpoint."""
    own = columns // num_groups
    return max((group for group in GROUPS if own % group == 0), default=None)


def _regrouped(columns: int, group: int, scales: F32, zeros: Array | None) -> tuple[F32, Array | None]:
    """Return scales and zeros `[N, K / group]`, repeated if a group of the checkpoint becomes several groups."""
    times = columns // (scales.shape[1] * group)
    repeated = np.ascontiguousarray(np.repeat(scales, times, axis=1), np.float32)
    return repeated, None if zeros is None else np.ascontiguousarray(np.repeat(zeros, times, axis=1))


def _runs(rows: int, columns: int) -> list[slice]:
    count = max(1, _SLICE // max(columns, 1))
    return [slice(start, min(start + count, rows)) for start in range(0, rows, count)]
