"""Matrix products with weights laid out in panels, for any number of rows.

A projection `[out, in]` is kept as panels of 32 outputs: `panels[p, k, j]` weighs input k for output 32 p + j.
A tile of a few rows times one panel is computed in vector registers, in one pass over the panel, which lies in memory
as it is read. So one row costs what reading the weights costs, many rows cost what the arithmetic costs, and there is
one copy of the weights. Every element is summed over k in ascending order, whatever the tile: a row of the result
depends on nothing but its own input, to the last bit.

Legend: T rows, K inputs, N outputs, P panels.
Source: Goto and van de Geijn, Anatomy of high-performance matrix multiplication, 2008.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from pagewood.engine.runner.compiled.kernel import inlined, kernel
from pagewood.engine.runner.compiled.tile import MIDDLE, TALL, WIDTH, middle, pair, single, tall

_BLOCK = 8 * TALL  # rows that one thread takes at a time


@inlined
def _height(left: Any) -> Any:
    """Return how many of `left` rows the next tile takes."""
    if left >= TALL:
        return TALL
    if left >= MIDDLE:
        return MIDDLE
    return 2 if left >= 2 else 1


@inlined
def _pack(x: Any, packed: Any, first: Any, last: Any) -> None:
    """Copy rows [first, last) to `packed`, tile by tile, each tile `[K, rows of the tile]`; `first` starts a tile."""
    depth = x.shape[1]
    row = first
    while row < last:
        height = _height(x.shape[0] - row)
        base = np.uint64(row * depth)
        for k in range(np.uint64(depth)):
            for r in range(np.uint64(height)):
                packed[base + k * np.uint64(height) + r] = x[np.uint64(row) + r, k]
        row += height


@inlined
def _multiply(packed: Any, panels: Any, bias: Any, out: Any, depth: Any, panel: Any, first: Any, last: Any,
              margin: Any) -> None:  # fmt: skip
    """Write rows [first, last) of one panel's outputs; `margin` `[tall, 32]` takes those of a panel that `out` cuts."""
    size = out.shape[1]
    column = panel * WIDTH
    cut = column + WIDTH > size
    row = first
    while row < last:
        height = _height(out.shape[0] - row)
        target, at, stride = (margin, 0, WIDTH) if cut else (out.reshape(-1), row * size + column, size)
        x_at, panel_at = row * depth, panel * depth * WIDTH
        if height == TALL:
            tall(packed, x_at, TALL, 1, panels, panel_at, WIDTH, depth, bias, column, 0, target, at, stride)
        elif height == MIDDLE:
            middle(packed, x_at, MIDDLE, 1, panels, panel_at, WIDTH, depth, bias, column, 0, target, at, stride)
        elif height == 2:
            pair(packed, x_at, 2, 1, panels, panel_at, WIDTH, depth, bias, column, 0, target, at, stride)
        else:
            single(packed, x_at, 1, 1, panels, panel_at, WIDTH, depth, bias, column, 0, target, at, stride)
        if cut:
            for r in range(height):
                for j in range(size - column):
                    out[row + r, column + j] = margin[r * WIDTH + j]
        row += height


@inlined
def _multiply_items(packed: Any, panels: Any, bias: Any, out: Any, depth: Any, first: Any, last: Any) -> None:
    """Compute items [first, last): item i is block i % blocks of the rows, times panel i // blocks."""
    num_rows = out.shape[0]
    num_blocks = (num_rows + _BLOCK - 1) // _BLOCK
    margin = np.empty(TALL * WIDTH, np.float32)
    for item in range(first, last):
        panel, block = item // num_blocks, item % num_blocks
        _multiply(packed, panels, bias, out, depth, panel, block * _BLOCK, min((block + 1) * _BLOCK, num_rows), margin)


@inlined
def _num_items(out: Any) -> Any:
    return ((out.shape[0] + _BLOCK - 1) // _BLOCK) * ((out.shape[1] + WIDTH - 1) // WIDTH)


@kernel("void(f4[:,::1], f4[::1], f4[::1], f4[:,::1], f4[::1])")
def multiply(x: Any, panels: Any, bias: Any, out: Any, packed: Any) -> None:
    """Write `x` times the weights, plus the bias, to `out`.

    Args:
        x: `[T, K]`.
        panels: `[P * K * 32]`.
        bias: `[P * 32]`.
        out: `[T, N]`, written; 32 (P - 1) < N <= 32 P.
        packed: `[T * K]`, scratch.
    """
    _pack(x, packed, 0, x.shape[0])
    _multiply_items(packed, panels, bias, out, x.shape[1], 0, _num_items(out))


@kernel("void(f4[:,::1], f4[::1], f4[::1], f4[:,::1], f4[::1], i8)", parallel=True)
def multiply_parallel(x: Any, panels: Any, bias: Any, out: Any, packed: Any, num_parts: Any) -> None:
    """As `multiply`, by `num_parts` threads."""
    num_rows, depth, num_items = x.shape[0], x.shape[1], _num_items(out)
    if num_rows <= TALL:
        _pack(x, packed, 0, num_rows)
    else:
        num_tiles = (num_rows + TALL - 1) // TALL
        for part in numba.prange(num_parts):
            last = min(num_tiles * (part + 1) // num_parts * TALL, num_rows)
            _pack(x, packed, num_tiles * part // num_parts * TALL, last)
    for part in numba.prange(num_parts):
        first, last = num_items * part // num_parts, num_items * (part + 1) // num_parts
        _multiply_items(packed, panels, bias, out, depth, first, last)
