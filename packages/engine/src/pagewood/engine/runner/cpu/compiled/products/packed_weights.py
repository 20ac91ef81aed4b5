"""Products with packed weights, and rows of them: the parts of the instructions that other forms than float32 have.

Legend: T rows, K inputs, D inputs filled up as `weight_kind` says, N outputs.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from enum import IntEnum
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from pagewood.engine.runner.cpu.compiled.instruction import (
    Following,
    Instruction,
    NumRows,
    Part,
    Unit,
    instruction,
    single_rows,
)
from pagewood.engine.runner.cpu.compiled.machine.kernel import inlined, strict
from pagewood.engine.runner.cpu.compiled.machine.memory import byte_values, floats, integers, shorts, vector
from pagewood.engine.runner.cpu.compiled.machine.numeric import float_from_bits
from pagewood.engine.runner.cpu.compiled.products.code_tile import multiply_codes
from pagewood.engine.runner.cpu.compiled.products.dot import DotLevel
from pagewood.engine.runner.cpu.compiled.products.float4 import MAGNITUDES
from pagewood.engine.runner.cpu.compiled.products.half_tile import multiply_halves
from pagewood.engine.runner.cpu.compiled.products.matmul import BLOCK, num_float_tiles, num_products, num_tiles
from pagewood.engine.runner.cpu.compiled.products.pair_dot import PairLevel
from pagewood.engine.runner.cpu.compiled.products.quantise import quantise
from pagewood.engine.runner.cpu.compiled.products.round_pairs import round_pairs
from pagewood.engine.runner.cpu.compiled.products.tile import LOW, TALL, TWO_PANELS, WIDTH
from pagewood.engine.runner.cpu.compiled.products.weight_kind import HALF, WeightKind
from pagewood.engine.runner.cpu.compiled.products.wide_tile import multiply_widened


class WideLevel(IntEnum):
    """Instructions for products with activations in float32: there is one way for each layout."""

    FLOAT32 = 8
    """Weights are widened in registers. Its number differs from those of the other levels that a layout can have."""


ProductLevel: TypeAlias = DotLevel | PairLevel | WideLevel
"""Instructions for products with packed weights; they determine whether activations are bytes, pairs or float32."""

LEVELS = 16
"""More than any number of a level."""
_F, _I = np.float32, np.int32


def _widen(typing_context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


_float_from_half: Any = intrinsic(_widen)


@inlined
def panels_of_part(kind: Any, num_rows: Any) -> Any:
    """Return how many panels a part of a product has: two for a single row and weights of 16 bits."""
    return 2 if num_rows == 1 and kind < WeightKind.INT8 else 1


@cache
def multiply_packed(kind: WeightKind, level: ProductLevel) -> Instruction:
    """Return the instruction that multiplies by packed weights.

    A part is the rows of a block of tiles, times a panel or two.
    """
    tile_of_codes: Any = multiply_codes(kind, level) if isinstance(level, DotLevel) else None
    tile_of_wide: Any = multiply_widened(kind) if kind.has_codes else None
    tile_of_halves: Any = None if kind.has_codes else multiply_halves(kind, level)
    has_bytes = isinstance(level, DotLevel)
    has_codes, has_groups, bits, head_bytes, step = (
        kind.has_codes, kind.has_groups, kind.bits, kind.head_bytes, kind.step
    )  # fmt: skip
    activation_bytes = 2 if kind == WeightKind.BFLOAT16_PAIRS else 4
    number, has_floats = int(kind), level == WideLevel.FLOAT32

    @inlined
    def num_parts(num_rows: Any, size: Any) -> Any:
        count = num_float_tiles(num_rows, size) if has_floats else num_tiles(num_rows)
        return num_products(count, size, panels_of_part(number, num_rows))

    @instruction(num_parts)
    @strict
    def multiply_packed(
        x_at: Any, packed_at: Any, sums_at: Any, row_scales_at: Any, panels_at: Any, scales_at: Any, bias_at: Any,
        out_at: Any, depth: Any, size: Any, group: Any, num_rows: NumRows, part: Part, following: Following,
    ) -> None:  # fmt: skip
        """Multiply `x` `[T, D]`, or `packed`, which an earlier instruction has made of it, with its sums and scales."""
        count = num_float_tiles(num_rows, size) if has_floats else num_tiles(num_rows)
        num_blocks = (count + BLOCK - 1) // BLOCK
        width = panels_of_part(number, num_rows)
        first_panel, block = part // num_blocks * width, part % num_blocks
        if has_groups:
            panel_bytes = 2 * (depth // group) * (head_bytes + group * HALF * bits // 8)
            num_steps = 2 * depth // step
        elif has_codes:
            panel_bytes, num_steps = depth * WIDTH, depth // 4
        else:
            panel_bytes, num_steps = 2 * depth * WIDTH, depth // 2
        first_tile, last_tile = block * BLOCK, min(block * BLOCK + BLOCK, count)
        num = last_tile - first_tile
        ahead_step = (panel_bytes + num_steps * num - 1) // (num_steps * num)
        ahead = panels_at + following // num_blocks * width * panel_bytes
        if not has_codes and width == 2 and first_panel * WIDTH + 2 * WIDTH <= size:
            column = 4 * first_panel * WIDTH
            tile_of_halves(
                TWO_PANELS, x_at, panels_at + first_panel * panel_bytes, bias_at + column, out_at + column, size,
                depth, ahead, 2 * ahead_step,
            )  # fmt: skip
            return
        for panel in range(first_panel, min(first_panel + width, (size + WIDTH - 1) // WIDTH)):
            column, weights = panel * WIDTH, panels_at + panel * panel_bytes
            cut = column + WIDTH > size
            margin = np.empty(TALL * WIDTH if cut else 0, np.float32)
            for tile in range(first_tile, last_tile):
                first, last = num_rows * tile // count, num_rows * (tile + 1) // count
                height, own = last - first, packed_at if has_bytes or last - first > LOW else x_at
                target = margin.ctypes.data if cut else out_at + 4 * (first * size + column)
                stride = WIDTH if cut else size
                if has_bytes:
                    tile_of_codes(
                        height, own + first * depth, sums_at + 4 * first * (depth // group), row_scales_at + 4 * first,
                        weights, scales_at + 4 * column, bias_at + 4 * column, target, stride, depth, group, ahead,
                        ahead_step,
                    )  # fmt: skip
                elif has_codes:
                    tile_of_wide(
                        height, own + 4 * first * depth, weights, scales_at + 4 * column, bias_at + 4 * column, target,
                        stride, depth, group, ahead, ahead_step,
                    )  # fmt: skip
                else:
                    tile_of_halves(
                        height, own + activation_bytes * first * depth, weights, bias_at + 4 * column, target, stride,
                        depth, ahead, ahead_step,
                    )  # fmt: skip
                ahead += num_steps * ahead_step
                if cut:
                    whole = floats(out_at, num_rows, size)
                    for row in range(first, last):
                        for j in range(size - column):
                            whole[row, column + j] = margin[(row - first) * WIDTH + j]

    return multiply_packed


def _reader(kind: WeightKind) -> Any:
    """Return the function that widens one row of a matrix to float32.

    Its arguments are (address of the panels, address of the scales or 0, row, out `[K]`, K, D, group).
    """
    bits, head_bytes, has_zeros, zero = kind.bits, kind.head_bytes, kind.has_zeros, kind.zero
    has_offsets, has_scales_apart, is_e4m3 = kind.has_offsets, kind.has_scales_apart, kind == WeightKind.NVFP4

    @strict
    def bfloat16(panels: Any, scales: Any, row: Any, out: Any, size: Any, depth: Any, group: Any) -> None:
        values = shorts(panels + row // WIDTH * depth * WIDTH * 2, 0)
        column = row % WIDTH
        for k in range(size):
            out[k] = float_from_bits(_I(values[(k // 2 * WIDTH + column) * 2 + k % 2]) << _I(16))

    @strict
    def float16(panels: Any, scales: Any, row: Any, out: Any, size: Any, depth: Any, group: Any) -> None:
        values = shorts(panels + row // WIDTH * depth * WIDTH * 2, 0)
        column = row % WIDTH
        for k in range(size):
            out[k] = _float_from_half(values[k * WIDTH + column])

    @strict
    def int8(panels: Any, scales: Any, row: Any, out: Any, size: Any, depth: Any, group: Any) -> None:
        values = byte_values(panels + row // WIDTH * depth * WIDTH, 0)
        column, scale = row % WIDTH, vector(scales, 0)[row]
        for k in range(size):
            out[k] = _F(_I(values[(k // 4 * WIDTH + column) * 4 + k % 4]) - _I(zero)) * scale

    @strict
    def grouped(panels: Any, scales: Any, row: Any, out: Any, size: Any, depth: Any, group: Any) -> None:
        block_bytes = head_bytes + group * HALF * bits // 8
        half, column = panels + row // HALF * (depth // group) * block_bytes, row % HALF
        for first in range(0, size, group):
            block = half + first // group * block_bytes
            scale, values = vector(block, 0)[column], byte_values(block, 0)
            lowest = _I(values[4 * HALF + column]) if has_zeros else _I(zero)
            offset = vector(block, 0)[HALF + column] if has_offsets else _F(0)
            for i in range(min(group, size - first)):
                quad = i // 4
                if bits == 4:
                    both = _I(values[head_bytes + (quad // 2 * HALF + column) * 4 + i % 4])
                    code = (both >> _I(4)) if quad % 2 == 1 else both & _I(15)
                else:
                    code = _I(values[head_bytes + (quad * HALF + column) * 4 + i % 4])
                value = _F(code - lowest) * scale
                out[first + i] = value + offset if has_offsets else value

    @strict
    def float4(panels: Any, scales: Any, row: Any, out: Any, size: Any, depth: Any, group: Any) -> None:
        block_bytes = head_bytes + group * HALF // 2
        half, column = panels + row // HALF * (depth // group) * block_bytes, row % HALF
        factor = vector(scales, 0)[row] if has_scales_apart else _F(1)
        for first in range(0, size, group):
            values = byte_values(half + first // group * block_bytes, 0)
            bits = _I(values[column])
            scale = (
                float_from_bits(bits << _I(20)) * _F(2.0**119) * factor if is_e4m3 else float_from_bits(bits << _I(23))
            )
            for i in range(min(group, size - first)):
                both = _I(values[head_bytes + (i // 8 * HALF + column) * 4 + i % 4])
                code = (both >> _I(4)) if i // 4 % 2 == 1 else both & _I(15)
                double = _F(_I(MAGNITUDES >> (code & _I(7)) * _I(4)) & _I(15))
                out[first + i] = (-double if code > 7 else double) * scale

    readers: dict[WeightKind, Any] = {
        WeightKind.BFLOAT16: bfloat16, WeightKind.BFLOAT16_PAIRS: bfloat16, WeightKind.FLOAT16: float16,
        WeightKind.INT8: int8, WeightKind.MXFP4: float4, WeightKind.NVFP4: float4,
    }  # fmt: skip
    return readers.get(kind, grouped)


@cache
def look_up(kind: WeightKind) -> Instruction:
    """Return the instruction that reads rows of packed weights as float32."""
    read = _reader(kind)

    @instruction(single_rows)
    @inlined
    def look_up(
        tokens_at: Any, panels_at: Any, scales_at: Any, out_at: Any, size: Any, depth: Any, group: Any, row: Part
    ) -> None:
        """Write the row of a token of `tokens` `[T]` to a row of `out` `[T, K]`; K is `size`, D `depth`."""
        token, out = np.int64(integers(tokens_at, 0)[row]), vector(out_at + 4 * row * size, size)
        read(panels_at, scales_at, token, out, size, depth, group)

    return look_up


@cache
def packed_unit(kind: WeightKind, level: ProductLevel) -> Unit:
    """Return the instructions of one kind of weights: the product, what prepares its input, and the look-up."""
    multiply = multiply_packed(kind, level)
    prepare = {DotLevel: (quantise,), PairLevel: (round_pairs,), WideLevel: ()}[type(level)]
    return Unit("packed", multiply, look_up(kind), *prepare, variant=kind * LEVELS + level)
