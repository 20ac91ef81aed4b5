"""Weights in four and eight bits, quantised and laid out in one pass as `weight_kind` says, for INT4 and INT8.

The rules are those of `weights.forms.quantise_int4` and `quantise_int8`; sums of squares are added in another order, so
where two scales of a group are equally good, the other one may be chosen.

Legend: N outputs, K inputs, D inputs filled up to a multiple of 32, G groups of 32 inputs.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from typing import Any

import numpy as np

from pagewood.engine.runner.cpu.compiled.machine.kernel import inlined, kernel, strict
from pagewood.engine.runner.cpu.compiled.machine.memory import integers, vector
from pagewood.engine.runner.cpu.compiled.machine.numeric import float_from_bits
from pagewood.engine.runner.cpu.compiled.products.tile import WIDTH
from pagewood.engine.runner.cpu.compiled.products.weight_kind import HALF, WeightKind
from pagewood.engine.weights.matrix_forms import INT4_SHARES

GROUP = 32
"""Inputs that share a scale in four bits."""
_F, _I, _U = np.float32, np.int32, np.uint64  # the last is for indices: numba does not test it for negative values
_MAGNITUDE, _INFINITY = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
_TINY = np.float32(np.finfo(np.float32).tiny)
_FACTORS = tuple(np.float32(1) / np.float32(share) for share in INT4_SHARES)
_BLOCK_BYTES = WeightKind.INT4.block_bytes(GROUP)
_ZEROS = np.uint32(0x88888888).astype(np.int32)  # eight codes that stand for 0


@inlined
def _fit(ratios: Any, factor: Any) -> Any:
    """Return (sum of squares of codes, sum of products of codes and ratios) for `ratios` times `factor`, rounded."""
    squares, products = _F(0), _F(0)
    for i in range(_U(GROUP)):
        code = min(max(np.rint(ratios[i] * factor), _F(-8)), _F(7))
        squares += code * code
        products += code * ratios[i]
    return squares, products


@strict
def _fit_group(x: Any, bits: Any, ratios: Any, codes: Any) -> Any:
    """Write the codes 0 to 15 of a group `[32]` and return their scale."""
    most = _I(0)
    for i in range(_U(GROUP)):
        most = max(most, bits[i] & _MAGNITUDE)  # ordered as the magnitudes are, with NaN above infinity
    largest = float_from_bits(most)
    if most >= _INFINITY or largest == _F(0):
        for i in range(_U(GROUP)):
            codes[i] = 8
        return _F(np.nan) if most >= _INFINITY else _TINY
    at = _U(0)
    while bits[at] & _MAGNITUDE != most:
        at += _U(1)
    full = x[at] / _F(-8)  # the largest magnitude gets the longer side, whichever its sign
    if abs(full) < _TINY:
        full = _TINY
    for i in range(_U(GROUP)):
        ratios[i] = x[i] / full
    best_gain, best_factor, best_scale = _F(-1), _F(1), _F(1)
    for factor in _FACTORS:
        squares, products = _fit(ratios, factor)
        share = products / max(squares, _F(1))
        if products * share > best_gain:
            best_gain, best_factor, best_scale = products * share, factor, share
    for i in range(_U(GROUP)):
        codes[i] = _I(min(max(np.rint(ratios[i] * best_factor), _F(-8)), _F(7))) + _I(8)
    return (best_scale if best_gain > 0 else _F(1)) * full


@kernel("void(i8, i8, i8, i8)", variant=1, is_long=True)
def quantise_int4_panels(values: Any, num_rows: Any, inputs: Any, panels: Any) -> None:
    """Write panels of INT4 in groups of 32.

    Args:
        values: address of `[N, K] float32`.
        num_rows: N; filled up with zeros to a multiple of 32.
        inputs: K; filled up in the same way.
        panels: address of the first panel, written.
    """
    num_groups = (inputs + GROUP - 1) // GROUP
    padded, ratios = np.zeros(GROUP, np.float32), np.empty(GROUP, np.float32)
    codes = np.empty(GROUP, np.int32)
    for row in range((num_rows + WIDTH - 1) // WIDTH * WIDTH):
        first_block, column = panels + row // HALF * num_groups * _BLOCK_BYTES, row % HALF
        for g in range(num_groups):
            block = first_block + g * _BLOCK_BYTES
            scales, words = vector(block, 0), integers(block + 4 * HALF, 0)
            if row >= num_rows:
                scales[column] = _F(0)
                for p in range(_U(GROUP // 8)):
                    words[p * _U(HALF) + _U(column)] = _ZEROS
                continue
            at = values + 4 * (row * inputs + g * GROUP)
            if (g + 1) * GROUP > inputs:
                own, left = vector(at, 0), inputs - g * GROUP
                for i in range(left):
                    padded[i] = own[i]
                at = padded.ctypes.data
            scales[column] = _fit_group(vector(at, 0), integers(at, 0), ratios, codes)
            for p in range(_U(GROUP // 8)):
                word = _I(0)
                for i in range(_U(4)):
                    both = codes[p * _U(8) + i] | codes[p * _U(8) + _U(4) + i] << _I(4)
                    word |= both << _I(8 * i)
                words[p * _U(HALF) + _U(column)] = word


@strict
def _quantise_row(x: Any, bits: Any, line: Any, inputs: Any, most: Any) -> Any:
    """Write the codes 1 to 255 of an output `[K]` to `line` `[D]` and return their scale; without inputs, 1.

    `most` has the bits of the largest magnitude elsewhere in the row, which the scale counts too.
    """
    for k in range(_U(inputs)):
        most = max(most, bits[k] & _MAGNITUDE)
    is_bad = most >= _INFINITY
    scale = max(float_from_bits(most) / _F(127), _TINY)
    count = _U(0 if is_bad else inputs)
    for k in range(count):
        line[k] = np.uint8(_I(np.rint(x[k] / scale)) + _I(128))
    for k in range(count, _U(line.size)):
        line[k] = np.uint8(128)
    return _F(1) if inputs == 0 else _F(np.nan) if is_bad else scale


@kernel("void(i8, i8, i8, i8, i8, i8)", variant=1, is_long=True)
def quantise_int8_panels(values: Any, num_rows: Any, inputs: Any, panels: Any, scales_at: Any, largest_at: Any) -> None:
    """Write panels of INT8.

    Args:
        values: address of `[N, K] float32`.
        num_rows: N; filled up to a multiple of 32, with the scale 1.
        inputs: K; filled up in the same way.
        panels: address of the first panel, written.
        scales_at: address of the first scale, written.
        largest_at: address of `[N] float32`, the largest magnitude of the row of which each output is a part; 0: it is
            whole.
    """
    depth = (inputs + GROUP - 1) // GROUP * GROUP
    scales = vector(scales_at, 0)
    line = np.empty(depth, np.uint8)
    words = integers(line.ctypes.data, 0)
    for row in range((num_rows + WIDTH - 1) // WIDTH * WIDTH):
        at = values + 4 * row * inputs
        most = _I(0)
        if largest_at != 0 and row < num_rows:
            most = integers(largest_at, 0)[row] & _MAGNITUDE
        scales[row] = _quantise_row(vector(at, 0), integers(at, 0), line, inputs if row < num_rows else 0, most)
        panel = integers(panels + row // WIDTH * WIDTH * depth, 0)
        for quad in range(_U(depth // 4)):
            panel[quad * _U(WIDTH) + _U(row % WIDTH)] = words[quad]
