"""Activations in bfloat16, in the order in which `half_tile` reads them.

Legend: T tokens, K inputs, D inputs filled up to a multiple of 2, R rows of a tile.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from typing import Any

import numpy as np

from pagewood.engine.runner.cpu.compiled.instruction import NumRows, Part, instruction
from pagewood.engine.runner.cpu.compiled.machine.kernel import strict
from pagewood.engine.runner.cpu.compiled.machine.memory import integers, shorts
from pagewood.engine.runner.cpu.compiled.products.matmul import num_tiles

_U, _W = np.uint64, np.uint32  # the first is for indices: numba does not test it for negative values
_MAGNITUDE, _INFINITY = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
_HALF, _ONE, _SHIFT, _QUIET = np.uint32(0x7FFF), np.uint32(1), np.uint32(16), np.uint32(0x40)


@strict
def round_tile(x_at: Any, out_at: Any, size: Any, depth: Any, first: Any, last: Any) -> None:
    """Write rows [first, last), a tile; see `round_pairs` for the others."""
    height = last - first
    pairs = integers(out_at + 2 * first * depth, 0)
    line = np.empty(depth, np.uint16)
    own = integers(line.ctypes.data, 0)
    for r in range(height):
        bits = integers(x_at + 4 * (first + r) * size, 0)
        row = shorts(out_at + 2 * first * depth, 0) if height == 1 else line
        if size < depth:
            row[size] = 0
        for i in range(_U(size)):
            whole = _W(bits[i])
            rounded = _W(whole + _HALF + (whole >> _SHIFT & _ONE)) >> _SHIFT
            row[i] = rounded if whole & _MAGNITUDE <= _INFINITY else whole >> _SHIFT | _QUIET
        if height > 1:
            for pair in range(_U(depth // 2)):
                pairs[pair * _U(height) + _U(r)] = own[pair]


@instruction(num_tiles)
@strict
def round_pairs(x_at: Any, out_at: Any, size: Any, depth: Any, num_rows: NumRows, tile: Part) -> None:
    """Write the rows of one tile, rounded to nearest, ties to even; a NaN stays one.

    Args:
        x_at: `[T, K] float32`.
        out_at: the rounded numbers, written: for each tile `[D / 2, R, 2] bfloat16`.
        size: K.
        depth: D.
        num_rows: T.
        tile: which.
    """
    count = num_tiles(num_rows)
    first, last = num_rows * tile // count, num_rows * (tile + 1) // count
    round_tile(x_at, out_at, size, depth, first, last)
