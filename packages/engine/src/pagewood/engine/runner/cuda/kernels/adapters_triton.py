"""What adapters add to products: rows grouped by the matrices of their slots, times A (shrink), times B (expand).

A tile is some rows of one group, which lie side by side in the order of groups, times some columns. There are as many
programs as tiles there can be, and those without a tile end at once, so graphs hold them. Sums are in float32, along
the whole depth from start to end, in tiles of every size alike; so a row's bits do not depend on the rows beside it.

Legend: T rows, K inputs, N outputs, C modules of a projection, G groups, R columns of A of a module.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false
# Triton comes only with torch's CUDA build.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewood.engine.runner.cuda.kernels.experts_triton import arranged, find_tile
from pagewood.engine.runner.cuda.low_rank import GroupedRows, Site

_FEW_ROWS, _MANY_ROWS = 16, 32
"""Rows of a tile, where groups have few rows in the mean, and elsewhere. Both use the same instructions of tensor
cores; tiles of 64 rows would use others on an H100."""
_SHRUNK = 16  # columns of A that a program computes: few, so that a step of few rows has programs enough
_DEPTH = 64  # products of a shrinking that are added per round
_COLUMNS = 64  # columns that a program expands
_RANKS = 16  # products of an expansion that are added per round
_FEW_GROUPS = 1024  # up to this many, four warps find a tile


def arrange(groups: Tensor, num_groups: int) -> GroupedRows:
    """Return rows by their groups `[T] int32`."""
    order, starts = arranged(groups[:, None], num_groups)
    size = _FEW_ROWS if len(groups) <= _FEW_ROWS * num_groups else _MANY_ROWS
    num_tiles = min(len(groups), len(groups) // size + num_groups)
    tiles, bins = starts.new_empty(num_tiles, 3), triton.next_power_of_2(num_groups)
    _find[(num_tiles,)](starts, tiles, num_groups, BINS=bins, ROWS=size, num_warps=4 if bins <= _FEW_GROUPS else 16)
    return GroupedRows(groups=groups, order=order, tiles=tiles, tile_rows=size)


def shrink(x: Tensor, site: Site, rows: GroupedRows) -> Tensor:
    """Return `[T, C R] float32`, the inputs `x` `[T / n, K]` times A of their groups, in `rows.order`."""
    assert rows.tiles is not None
    _, columns, inputs = site.a.shape
    out = torch.empty(len(rows.order), columns, dtype=torch.float32, device=x.device)
    _shrink[(len(rows.tiles), columns // _SHRUNK)](
        x.contiguous(), site.a, out, rows.order, rows.tiles, len(rows.order) // len(x), columns, INPUTS=inputs,
        ROWS=rows.tile_rows, COLUMNS=_SHRUNK, DEPTH=_DEPTH, num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


def expand(shrunk: Tensor, out: Tensor, site: Site, rows: GroupedRows) -> None:
    """Change the rows of `out` `[T, N]` that have a group; `shrunk` is the result of `shrink`."""
    assert rows.tiles is not None
    _, num_outputs, rank = site.b.shape
    first = 0
    for number, outputs in enumerate(site.sizes):
        _expand[(len(rows.tiles), triton.cdiv(outputs, _COLUMNS))](
            shrunk, site.b, site.factors, site.bias, out, rows.order, rows.tiles, num_outputs, out.stride(0), first,
            first + outputs, number * rank, shrunk.stride(0), RANK=rank, ROWS=rows.tile_rows, COLUMNS=_COLUMNS,
            RANKS=_RANKS, num_warps=4, num_stages=3,
        )  # fmt: skip
        first += outputs


@triton.jit(do_not_specialize=["num_groups"])
def _find(starts, tiles, num_groups, BINS: tl.constexpr, ROWS: tl.constexpr) -> None:
    """Write the group, the first place and the end of one tile."""
    group, first, end = find_tile(starts, num_groups, BINS, ROWS)
    own = tiles + tl.program_id(0) * 3
    tl.store(own, group.to(tl.int32))
    tl.store(own + 1, first)
    tl.store(own + 2, end)


@triton.jit
def _tile(tiles) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the group, the first place and the end of this program's tile."""
    own = tiles + tl.program_id(0) * 3
    return tl.load(own).to(tl.int64), tl.load(own + 1), tl.load(own + 2)


@triton.jit(do_not_specialize=["num_columns"])
def _shrink(
    x, a, out, order, tiles, num_each, num_columns, INPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a tile of the rows of one group times A; `num_each` rows that follow each other have one input."""
    group, first, end = _tile(tiles)
    if first >= end:
        return
    places, columns = first + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    deep, has_row = tl.arange(0, DEPTH), places < end
    rows = (tl.load(order + places, mask=has_row, other=0) // num_each).to(tl.int64)
    x_places = x + rows[:, None] * INPUTS + deep[None, :]
    a_places = a + (group * num_columns + columns[None, :]) * INPUTS + deep[:, None]
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, INPUTS, DEPTH):
        is_inside = start + deep < INPUTS
        left = tl.load(x_places, mask=has_row[:, None] & is_inside[None, :], other=0.0)
        right = tl.load(a_places, mask=is_inside[:, None], other=0.0)
        sums = tl.dot(left, right, sums, input_precision="ieee")
        x_places += DEPTH
        a_places += DEPTH
    tl.store(out + places.to(tl.int64)[:, None] * num_columns + columns[None, :], sums, mask=has_row[:, None])


@triton.jit(do_not_specialize=["num_outputs", "first_column", "end_column", "first_rank"])
def _expand(
    shrunk, b, factors, bias, out, order, tiles, num_outputs, out_stride, first_column, end_column, first_rank,
    shrunk_stride, RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr,
) -> None:  # fmt: skip
    """Add a tile of what one group's B makes of its rows to one module's outputs, each times its factor."""
    group, first, end = _tile(tiles)
    if first >= end:
        return
    places = first + tl.arange(0, ROWS)
    columns = first_column + tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    deep, has_row, has_column = tl.arange(0, RANKS), places < end, columns < end_column
    left_places = shrunk + places.to(tl.int64)[:, None] * shrunk_stride + first_rank + deep[None, :]
    own = group * num_outputs + columns
    right_places = b + own[None, :] * RANK + deep[:, None]
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for _ in range(0, RANK, RANKS):
        left = tl.load(left_places, mask=has_row[:, None], other=0.0)
        right = tl.load(right_places, mask=has_column[None, :], other=0.0).to(tl.float32)
        sums = tl.dot(left, right, sums, input_precision="ieee")
        left_places += RANKS
        right_places += RANKS
    rows = tl.load(order + places, mask=has_row, other=0).to(tl.int64)
    out_places = out + rows[:, None] * out_stride + columns[None, :]
    is_inside = has_row[:, None] & has_column[None, :]
    before = tl.load(out_places, mask=is_inside, other=0.0).to(tl.float32)
    scale = tl.load(factors + own, mask=has_column, other=1.0)
    shift = tl.load(bias + own, mask=has_column, other=0.0)
    result = before * scale[None, :] + sums + shift[None, :]
    tl.store(out_places, result.to(out.dtype.element_ty), mask=is_inside)
