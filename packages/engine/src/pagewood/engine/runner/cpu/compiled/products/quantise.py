"""Activations in eight bits: codes with a scale for each token, in the order in which `code_tile` reads them.

Legend: T tokens, K inputs, D inputs filled up to a multiple of 32, G inputs of a group, R rows of a tile.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from typing import Any

import numpy as np

from pagewood.engine.runner.cpu.compiled.instruction import NumRows, Part, instruction
from pagewood.engine.runner.cpu.compiled.machine.kernel import strict
from pagewood.engine.runner.cpu.compiled.machine.memory import codes, integers, vector
from pagewood.engine.runner.cpu.compiled.machine.numeric import float_from_bits
from pagewood.engine.runner.cpu.compiled.products.matmul import num_tiles

_F, _I, _U = np.float32, np.int32, np.uint64  # the last is for indices: numba does not test it for negative values
_MAGNITUDE, _INFINITY = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
_LEAST = np.float32(1e-30)  # a row of smaller numbers is taken for zeros: its scale would be lost


@strict
def _quantise_row(x: Any, bits: Any, line: Any, size: Any, depth: Any) -> Any:
    """Write the codes of `x` `[K]` to `line` `[D]` and return their scale: NaN if a number is not finite.

    Args:
        x: `[K]`.
        bits: the same memory as int32.
        line: `[D] int8`, written; zeros behind K.
        size: K.
        depth: D.
    """
    most = _I(0)
    for i in range(_U(size)):
        most = max(most, bits[i] & _MAGNITUDE)  # ordered as the magnitudes are, with NaN above infinity
    for i in range(_U(size), _U(depth)):
        line[i] = 0
    largest = float_from_bits(most)
    if most >= _INFINITY or largest < _LEAST:
        for i in range(_U(size)):
            line[i] = 0
        return _F(np.nan) if most >= _INFINITY else _F(0.0)
    factor = _F(127.0) / largest
    for i in range(_U(size)):
        line[i] = np.int8(np.rint(x[i] * factor))
    return largest / _F(127.0)


@strict
def quantise_tile(
    x_at: Any, out_at: Any, sums_at: Any, scales_at: Any, size: Any, depth: Any, group: Any, factor: Any, first: Any,
    last: Any,
) -> None:  # fmt: skip
    """Write the codes, sums and scales of rows [first, last), a tile; see `quantise` for the others."""
    height, num_groups = last - first, depth // group
    words, totals = integers(out_at + first * depth, 0), integers(sums_at + 4 * first * num_groups, 0)
    of_rows = vector(scales_at, 0)
    line = np.empty(depth, np.int8)
    own = integers(line.ctypes.data, 0)
    for r in range(height):
        at = x_at + 4 * (first + r) * size
        row = codes(out_at + first * depth, 0) if height == 1 else line
        of_rows[first + r] = _quantise_row(vector(at, 0), integers(at, 0), row, size, depth)
        for g in range(num_groups):
            total = _I(0)
            for i in range(_U(g * group), _U(g * group + group)):
                total += _I(row[i])
            totals[g * height + r] = total * factor
        if height > 1:
            for quad in range(_U(depth // 4)):
                words[quad * _U(height) + _U(r)] = own[quad]


@instruction(num_tiles)
@strict
def quantise(
    x_at: Any, out_at: Any, sums_at: Any, scales_at: Any, size: Any, depth: Any, group: Any, factor: Any,
    num_rows: NumRows, tile: Part,
) -> None:  # fmt: skip
    """Write the codes, sums and scales of the rows of one tile.

    Args:
        x_at: `[T, K] float32`.
        out_at: codes, written: for each tile `[D / 4, R, 4] int8`.
        sums_at: sums of codes, times `factor`, written: for each tile `[D / G, R] int32`.
        scales_at: `[T] float32`, written.
        size: K.
        depth: D.
        group: G.
        factor: see `code_tile.multiply_codes`.
        num_rows: T.
        tile: which.
    """
    count = num_tiles(num_rows)
    first, last = num_rows * tile // count, num_rows * (tile + 1) // count
    quantise_tile(x_at, out_at, sums_at, scales_at, size, depth, group, factor, first, last)
