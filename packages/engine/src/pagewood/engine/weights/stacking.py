"""Converts matrices with codes of different forms to one common form, so that they can be stacked.

Legend: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagewood.engine.weights.matrix_forms import F32, SHORT_GROUP, Float4, Int4, Int8, Int8Group, Weight


def in_one_form(parts: Sequence[Weight]) -> Sequence[Weight] | None:
    """Return matrices of the same inputs in the smallest common form with codes; None: a matrix has no codes.

    Codes stay the same. A zero that becomes an offset is rounded to float32.
    """
    wholes = [part.as_int8() if isinstance(part, Float4) else part for part in parts]
    codes = [part for part in wholes if isinstance(part, Int4 | Int8Group | Int8)]
    if len(codes) < len(parts):
        return None
    group = min((part.group for part in codes if not isinstance(part, Int8)), default=0)
    if not group:
        return codes
    fours = [part for part in codes if isinstance(part, Int4)]
    if len(fours) == len(codes):
        has_offsets = any(part.offsets is not None for part in fours)
        return [_as_int4(part, group, has_offsets=has_offsets) for part in fours]
    eights = [_as_int8(part, group) for part in codes]
    has_offsets = any(part.offsets is not None for part in eights)
    return [_with_offsets(part) for part in eights] if has_offsets else eights


def _as_int4(weight: Int4, group: int, *, has_offsets: bool) -> Int4:
    scales, zeros, offsets = weight.scales, weight.zeros, weight.offsets
    if has_offsets and offsets is None:
        offsets = (zeros.astype(np.float32) if zeros is not None else np.float32(8)) * -scales
        zeros = None
    times = weight.group // group
    return Int4(
        weight.codes,
        scales.repeat(times, axis=1),
        None if zeros is None else zeros.repeat(times, axis=1),
        group,
        None if offsets is None else offsets.repeat(times, axis=1),
    )


def _as_int8(weight: Int4 | Int8Group | Int8, group: int) -> Int8Group:
    """Return a matrix in groups of `group`; zeros become offsets if groups of this size have no zeros."""
    rows, columns = weight.shape
    if isinstance(weight, Int8):
        return Int8Group(weight.codes, np.repeat(weight.scales[:, None], columns // group, axis=1), None, group)
    times = weight.group // group
    scales = weight.scales.repeat(times, axis=1)
    offsets = None if weight.offsets is None else weight.offsets.repeat(times, axis=1)
    if isinstance(weight, Int4):
        codes = weight.unpacked().view(np.int8)
        if offsets is None:
            zeros = np.int8(8) if weight.zeros is None else weight.zeros.view(np.int8)[:, :, None]
            codes = (codes.reshape(rows, -1, weight.group) - zeros).reshape(rows, columns)
        return Int8Group(codes, scales, None, group, offsets)
    if weight.zeros is None:
        return Int8Group(weight.codes, scales, None, group, offsets)
    if group == SHORT_GROUP:
        return Int8Group(weight.codes, scales, None, group, _negated(weight).repeat(times, axis=1))
    return Int8Group(weight.codes, scales, weight.zeros.repeat(times, axis=1), group)


def _negated(weight: Int8Group) -> F32:
    """Return the offsets that zeros stand for, `[N, G]`."""
    assert weight.zeros is not None
    return weight.zeros.astype(np.float32) * -weight.scales


def _with_offsets(weight: Int8Group) -> Int8Group:
    if weight.offsets is not None:
        return weight
    offsets = np.zeros_like(weight.scales) if weight.zeros is None else _negated(weight)
    return Int8Group(weight.codes, weight.scales, None, weight.group, offsets)
