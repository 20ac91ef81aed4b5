"""Products of many small matrices, each with the rows of its own expert.

The matrices of all experts lie one below the other, as one matrix in panels of 32 outputs. So every form of weights,
and every way to lay them out, is that of a projection; a panel may hold outputs of two experts. A part is a run of rows
of one expert, times one or two panels that have outputs of it. Tiles are those of the other products, so a row has the
same bits whatever rows lie beside it.

Legend: S slots, a row for each pair of a token and one of its experts; R runs, see `experts.route`; K inputs, D inputs
filled up as `weight_kind` says, N outputs of an expert.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from pagewood.engine.runner.cpu.compiled.experts.route import NUM_RUN_COLUMNS
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
from pagewood.engine.runner.cpu.compiled.machine.memory import floats, integer_rows, vector
from pagewood.engine.runner.cpu.compiled.products import tile
from pagewood.engine.runner.cpu.compiled.products.code_tile import multiply_codes
from pagewood.engine.runner.cpu.compiled.products.dot import DotLevel
from pagewood.engine.runner.cpu.compiled.products.half_tile import multiply_halves
from pagewood.engine.runner.cpu.compiled.products.matmul import num_tiles
from pagewood.engine.runner.cpu.compiled.products.packed_weights import LEVELS, ProductLevel
from pagewood.engine.runner.cpu.compiled.products.pair_dot import PairLevel
from pagewood.engine.runner.cpu.compiled.products.quantise import quantise_tile
from pagewood.engine.runner.cpu.compiled.products.round_pairs import round_tile
from pagewood.engine.runner.cpu.compiled.products.tile import LOW, TALL, TWO_PANELS, WIDTH
from pagewood.engine.runner.cpu.compiled.products.weight_kind import HALF, WeightKind
from pagewood.engine.runner.cpu.compiled.products.wide_tile import multiply_widened


@inlined
def _most_panels(size: Any) -> Any:
    """Return how many panels the N = `size` outputs of an expert can touch."""
    return size // WIDTH if size % WIDTH == 0 else (size + WIDTH - 2) // WIDTH + 1


@inlined
def _low_tiles(num_rows: Any) -> Any:
    """Return the number of tiles of rows that are read where they are."""
    return (num_rows + LOW - 1) // LOW


@instruction(single_rows)
@strict
def quantise_runs(
    runs_at: Any, x_at: Any, out_at: Any, sums_at: Any, scales_at: Any, size: Any, depth: Any, group: Any, factor: Any,
    run: Part,
) -> None:  # fmt: skip
    """Write the codes, sums and scales of the rows of one run, tile by tile, as `quantise` does."""
    first, count = _slots(runs_at, run)
    num = num_tiles(count)
    for one in range(num):
        start, end = first + count * one // num, first + count * (one + 1) // num
        quantise_tile(x_at, out_at, sums_at, scales_at, size, depth, group, factor, start, end)


@instruction(single_rows)
@strict
def round_runs(runs_at: Any, x_at: Any, out_at: Any, size: Any, depth: Any, run: Part) -> None:
    """Write the rows of one run in bfloat16, tile by tile, as `round_pairs` does."""
    first, count = _slots(runs_at, run)
    num = num_tiles(count)
    for one in range(num):
        round_tile(x_at, out_at, size, depth, first + count * one // num, first + count * (one + 1) // num)


@inlined
def _slots(runs_at: Any, run: Any) -> Any:
    """Return the first slot of a run and their number."""
    runs = integer_rows(runs_at, 0, NUM_RUN_COLUMNS)
    return np.int64(runs[run, 1]), np.int64(runs[run, 2])


@inlined
def _first_panel(runs_at: Any, num_runs: Any, part: Any, num_parts: Any, width: Any, size: Any) -> Any:
    """Return the first panel of a part; behind the last part, of the last one."""
    part = min(part, num_runs * num_parts - 1)
    expert = np.int64(integer_rows(runs_at, 0, NUM_RUN_COLUMNS)[part // num_parts, 0])
    return expert * size // WIDTH + part % num_parts * width


@inlined
def _keep(margin: Any, out_at: Any, first: Any, last: Any, size: Any, start: Any, column: Any) -> None:
    """Copy rows of a panel that begins at output `column` of an expert that has outputs from `start` on."""
    out = floats(out_at, 0, size)
    low, high = max(column, start), min(column + WIDTH, start + size)
    for row in range(first, last):
        for j in range(low, high):
            out[row, j - start] = margin[(row - first) * WIDTH + j - column]


@inlined
def _num_float_parts(num_rows: Any, size: Any) -> Any:
    return num_rows * _most_panels(size)


@instruction(_num_float_parts)
@strict
def multiply_runs(
    runs_at: Any, x_at: Any, panels_at: Any, bias_at: Any, bias_step: Any, out_at: Any, depth: Any, size: Any,
    num_rows: NumRows, part: Part, following: Following,
) -> None:  # fmt: skip
    """Write one part of `out` `[S, N]`: the rows of a run, times one panel of float32.

    Args:
        runs_at: `[R, NUM_RUN_COLUMNS] int32`.
        x_at: `[S, K]`.
        panels_at: of the matrices of all experts.
        bias_at: of all outputs, or `[32]` zeros.
        bias_step: 1, or 0 if there are only zeros.
        out_at: written.
        depth: K.
        size: N.
        num_rows: R.
        part: which, run by run.
        following: the part that the same thread computes next; its panel is prefetched meanwhile.
    """
    num_parts = _most_panels(size)
    panel = _first_panel(runs_at, num_rows, part, num_parts, 1, size)
    start = np.int64(integer_rows(runs_at, 0, NUM_RUN_COLUMNS)[part // num_parts, 0]) * size
    column = panel * WIDTH
    if column >= start + size:
        return
    first, count = _slots(runs_at, part // num_parts)
    cut = column < start or column + WIDTH > start + size
    x, panels, bias = vector(x_at, 0), vector(panels_at, 0), vector(bias_at, 0)
    target = np.empty(LOW * WIDTH, np.float32) if cut else vector(out_at, 0)
    num = _low_tiles(count)
    ahead_step = (WIDTH + num - 1) // num
    ahead = _first_panel(runs_at, num_rows, following, num_parts, 1, size) * depth * WIDTH
    for one in range(num):
        begin, end = first + count * one // num, first + count * (one + 1) // num
        at, stride = (0, WIDTH) if cut else (begin * size + column - start, size)
        tile.multiply_packed(
            end - begin, x, begin * depth, panels, panel * depth * WIDTH, depth, bias, column * bias_step, target, at,
            stride, ahead, ahead_step,
        )  # fmt: skip
        ahead += depth * ahead_step
        if cut:
            _keep(target, out_at, begin, end, size, start, column)


FLOAT_RUNS = Unit("float_runs", multiply_runs)
"""For experts whose weights are float32."""


@cache
def multiply_packed_runs(kind: WeightKind, level: ProductLevel) -> Instruction:
    """Return the instruction that multiplies runs by packed weights.

    A part is a run, times one panel, or two if weights have 16 bits.
    """
    tile_of_codes: Any = multiply_codes(kind, level) if isinstance(level, DotLevel) else None
    tile_of_wide: Any = multiply_widened(kind) if kind.has_codes else None
    tile_of_halves: Any = None if kind.has_codes else multiply_halves(kind, level)
    has_bytes, has_floats = isinstance(level, DotLevel), not isinstance(level, DotLevel | PairLevel)
    has_codes, has_groups, bits, head_bytes, step = (
        kind.has_codes, kind.has_groups, kind.bits, kind.head_bytes, kind.step
    )  # fmt: skip
    activation_bytes = 1 if has_bytes else 4 if has_floats else 2
    width = 1 if has_codes else 2

    @inlined
    def parts_of_run(size: Any) -> Any:
        return (_most_panels(size) + width - 1) // width

    @inlined
    def num_parts(num_rows: Any, size: Any) -> Any:
        return num_rows * parts_of_run(size)

    @instruction(num_parts)
    @strict
    def multiply_packed_runs(
        runs_at: Any, x_at: Any, sums_at: Any, row_scales_at: Any, panels_at: Any, scales_at: Any, bias_at: Any,
        bias_step: Any, out_at: Any, depth: Any, size: Any, group: Any, num_rows: NumRows, part: Part,
        following: Following,
    ) -> None:  # fmt: skip
        """Like `multiply_runs`; `x` `[S, D]` is in the form of the level, with its sums and scales."""
        of_run = parts_of_run(size)
        start = np.int64(integer_rows(runs_at, 0, NUM_RUN_COLUMNS)[part // of_run, 0]) * size
        first, count = _slots(runs_at, part // of_run)
        if has_groups:
            panel_bytes = 2 * (depth // group) * (head_bytes + group * HALF * bits // 8)
            num_steps = 2 * depth // step
        elif has_codes:
            panel_bytes, num_steps = depth * WIDTH, depth // 4
        else:
            panel_bytes, num_steps = 2 * depth * WIDTH, depth // 2
        num = _low_tiles(count) if has_floats else num_tiles(count)
        ahead_step = (panel_bytes + num_steps * num - 1) // (num_steps * num)
        first_panel = _first_panel(runs_at, num_rows, part, of_run, width, size)
        ahead = panels_at + _first_panel(runs_at, num_rows, following, of_run, width, size) * panel_bytes
        column = first_panel * WIDTH
        if not has_codes and count == 1 and column >= start and column + 2 * WIDTH <= start + size:
            tile_of_halves(
                TWO_PANELS, x_at + activation_bytes * first * depth, panels_at + first_panel * panel_bytes,
                bias_at + 4 * column * bias_step, out_at + 4 * (first * size + column - start), size, depth, ahead,
                2 * ahead_step,
            )  # fmt: skip
            return
        for panel in range(first_panel, min(first_panel + width, (start + size + WIDTH - 1) // WIDTH)):
            column, weights = panel * WIDTH, panels_at + panel * panel_bytes
            bias = bias_at + 4 * column * bias_step
            cut = column < start or column + WIDTH > start + size
            margin = np.empty(TALL * WIDTH if cut else 0, np.float32)
            for one in range(num):
                begin, end = first + count * one // num, first + count * (one + 1) // num
                target = margin.ctypes.data if cut else out_at + 4 * (begin * size + column - start)
                stride = WIDTH if cut else size
                if has_bytes:
                    tile_of_codes(
                        end - begin, x_at + begin * depth, sums_at + 4 * begin * (depth // group),
                        row_scales_at + 4 * begin, weights, scales_at + 4 * column, bias, target, stride, depth, group,
                        ahead, ahead_step,
                    )  # fmt: skip
                elif has_codes:
                    tile_of_wide(
                        end - begin, x_at + 4 * begin * depth, weights, scales_at + 4 * column, bias, target, stride,
                        depth, group, ahead, ahead_step,
                    )  # fmt: skip
                else:
                    tile_of_halves(
                        end - begin, x_at + activation_bytes * begin * depth, weights, bias, target, stride, depth,
                        ahead, ahead_step,
                    )  # fmt: skip
                ahead += num_steps * ahead_step
                if cut:
                    _keep(margin, out_at, begin, end, size, start, column)

    return multiply_packed_runs


@cache
def packed_runs_unit(kind: WeightKind, level: ProductLevel) -> Unit:
    """Return the instructions of experts whose weights are of one kind: the product, and what prepares its input."""
    multiply = multiply_packed_runs(kind, level)
    prepare = (quantise_runs,) if isinstance(level, DotLevel) else (round_runs,) if isinstance(level, PairLevel) else ()
    return Unit("packed_runs", multiply, *prepare, variant=kind * LEVELS + level)
