"""Matrix products with weights laid out in panels, for any number of rows.

A projection `[out, in]` is kept as panels of 32 outputs: `panels[p, k, j]` weighs input k for output 32 p + j.
A tile of a few rows times one panel is computed in vector registers, in one pass over the panel, which lies in memory
in the order in which it is read. So one row costs as much as reading the weights, many rows cost as much as the
arithmetic, and there is one copy of the weights. Every element is summed over k in ascending order in every tile, so a
row of the result depends only on its own input, to the last bit.

Up to LOW rows of a tile are read where they are. A taller one needs fewer reads of the panel, but has to be packed, so
that one address is enough for all of it; that pays for many rows and outputs.

Legend: T rows, K inputs, N outputs, P panels.
Source: Goto and van de Geijn, Anatomy of high-performance matrix multiplication, 2008.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from typing import Any

import numpy as np

from pagewood.engine.runner.cpu.compiled.instruction import Following, NumRows, Part, instruction
from pagewood.engine.runner.cpu.compiled.machine.kernel import inlined, strict
from pagewood.engine.runner.cpu.compiled.machine.memory import floats, vector
from pagewood.engine.runner.cpu.compiled.products.tile import LOW, TALL, WIDTH, multiply_packed

_MANY_OUTPUTS = 2048  # for which taller tiles save more than packing them costs
_STRIP = 128  # inputs that are packed together, so that their targets stay in the first-level cache
BLOCK = 8
"""Tiles that one thread multiplies with a panel."""
_U = np.uint64  # type of indices: numba does not test an unsigned index for negative values


@inlined
def num_tiles(num_rows: Any) -> Any:
    """Return the number of tiles that rows of bytes or pairs are cut into, as equal as possible."""
    return (num_rows + TALL - 1) // TALL


@inlined
def num_float_tiles(num_rows: Any, size: Any) -> Any:
    """Like `num_tiles`, for rows of float32 and N = `size` outputs: low tiles, unless packing pays."""
    height = TALL if num_rows > 2 * LOW and size >= _MANY_OUTPUTS else LOW
    return (num_rows + height - 1) // height


@inlined
def num_packed(num_rows: Any, size: Any, depth: Any, num_outputs: Any) -> Any:
    """Return how many tiles `pack` is called for: none if all are low and K, the size of a row, is D, the depth."""
    count = num_float_tiles(num_rows, num_outputs)
    return count if depth > size or (num_rows + count - 1) // count > LOW else 0


@instruction(num_packed)
@inlined
def pack(x_at: Any, packed_at: Any, size: Any, depth: Any, num_outputs: Any, num_rows: NumRows, tile: Part) -> None:
    """Copy the rows of one tile of `x` `[T, K]`, K = `size`, to `packed` `[T * D]`, with zeros behind K.

    A tile of more than LOW rows becomes `[D, rows of the tile]`, a lower one `[rows of the tile, D]`; if D = K, it is
    read where it is.
    """
    x, packed = floats(x_at, num_rows, size), vector(packed_at, num_rows * depth)
    count = num_float_tiles(num_rows, num_outputs)
    first, last = num_rows * tile // count, num_rows * (tile + 1) // count
    if last - first <= LOW:
        if depth > size:
            for r in range(_U(first), _U(last)):
                for k in range(_U(size)):
                    packed[r * _U(depth) + k] = x[r, k]
                for k in range(_U(size), _U(depth)):
                    packed[r * _U(depth) + k] = np.float32(0.0)
        return
    height, base = _U(last - first), _U(first * depth)
    for start in range(0, size, _STRIP):
        end = _U(min(start + _STRIP, size))
        for r in range(height):
            for k in range(_U(start), end):
                packed[base + k * height + r] = x[_U(first) + r, k]
    for i in range(base + _U(size) * height, base + _U(depth) * height):
        packed[i] = np.float32(0.0)


@inlined
def num_products(count: Any, size: Any, num_panels: Any) -> Any:
    """Return the number of parts of a product that threads can share: each is some panels times a block of the tiles.

    Args:
        count: tiles.
        size: N.
        num_panels: of a part.
    """
    width = num_panels * WIDTH
    return (count + BLOCK - 1) // BLOCK * ((size + width - 1) // width)


@inlined
def _num_multiplied(num_rows: Any, size: Any) -> Any:
    return num_products(num_float_tiles(num_rows, size), size, 1)


@instruction(_num_multiplied)
@strict
def multiply(
    x_at: Any, packed_at: Any, panels_at: Any, bias_at: Any, out_at: Any, depth: Any, size: Any, num_rows: NumRows,
    product: Part, following: Following,
) -> None:  # fmt: skip
    """Write one part of `out` `[T, N]`: the rows of a block of tiles, times one panel, plus the bias.

    Args:
        x_at: `[T * K]`.
        packed_at: `[T * K]`, the result of `pack`.
        panels_at: `[P * K * 32]`.
        bias_at: `[P * 32]`.
        out_at: `[T, N]`, written; 32 (P - 1) < N <= 32 P.
        depth: K.
        size: N.
        num_rows: T.
        product: which part, panel by panel.
        following: the part that the same thread computes next; its panel is prefetched meanwhile.
    """
    padded = (size + WIDTH - 1) // WIDTH * WIDTH
    x, packed, out = vector(x_at, num_rows * depth), vector(packed_at, num_rows * depth), floats(out_at, num_rows, size)
    panels, bias = vector(panels_at, padded * depth), vector(bias_at, padded)
    count = num_float_tiles(num_rows, size)
    num_blocks = (count + BLOCK - 1) // BLOCK
    panel, block = product // num_blocks, product % num_blocks
    column, panel_at = panel * WIDTH, panel * depth * WIDTH
    cut = column + WIDTH > size
    target = np.empty(TALL * WIDTH, np.float32) if cut else out.reshape(-1)
    first_tile, last_tile = block * BLOCK, min(block * BLOCK + BLOCK, count)
    ahead_step = (WIDTH + last_tile - first_tile - 1) // (last_tile - first_tile)
    ahead = following // num_blocks * depth * WIDTH
    for tile in range(first_tile, last_tile):
        first, last = num_rows * tile // count, num_rows * (tile + 1) // count
        height, own = last - first, packed if last - first > LOW else x
        at, stride = (0, WIDTH) if cut else (first * size + column, size)
        multiply_packed(
            height, own, first * depth, panels, panel_at, depth, bias, column, target, at, stride, ahead, ahead_step
        )
        ahead += depth * ahead_step
        if cut:
            for row in range(first, last):
                for j in range(size - column):
                    out[row, column + j] = target[(row - first) * WIDTH + j]
