"""Products of slots with the matrices of their experts: one kernel, one tile, one order, as in `linear_triton`.

A tile is some slots of one expert, which lie side by side, times some columns. How many tiles an expert has is known on
the device only. So there are as many programs as tiles there can be, and those without a tile end at once: nothing
waits for the device, and a graph may hold the product.

Legend: S slots, N experts, I and O columns of the input and of the output.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# Triton comes only with torch's CUDA build.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16  # slots of a tile: in a step of few requests an expert has one
_COLUMNS = 64
_DEPTH = 64  # products added per round


def grouped(x: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor) -> Tensor:
    """Return `[S, O]` of `x` `[S, I]`, `weight` `[N, O, I]` and `bias` `[N, O]`; sums are in float32.

    Args:
        x: a row of each slot.
        weight: of all experts, of one dtype with `x` and `bias`.
        bias: of all experts, or None.
        experts: `[S]`, the expert of each slot, ascending.
    """
    num_slots, depth = x.shape
    num_experts, num_columns, _ = weight.shape
    out = torch.empty((num_slots, num_columns), dtype=x.dtype, device=x.device)
    if not num_slots:
        return out
    every = torch.arange(num_experts, device=x.device, dtype=experts.dtype)
    ends = torch.searchsorted(experts, every, right=True)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    last_tiles = ((ends - starts + _ROWS - 1) // _ROWS).cumsum(0)
    most_tiles = min(num_slots, num_slots // _ROWS + num_experts)
    _grouped[(most_tiles, triton.cdiv(num_columns, _COLUMNS))](
        x.contiguous(), weight, weight if bias is None else bias, out, starts, ends, last_tiles, num_columns,
        num_experts, INPUTS=depth, HAS_BIAS=bias is not None, ROWS=_ROWS, COLUMNS=_COLUMNS, DEPTH=_DEPTH,
        num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


@triton.jit
def _grouped(
    x, weight, bias, out, starts, ends, last_tiles, num_columns, num_experts,
    INPUTS: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
) -> None:  # fmt: skip
    """Compute one tile; `last_tiles` `[N]` has the tile behind each expert's last one."""
    tile = tl.program_id(0)
    if tile >= tl.load(last_tiles + num_experts - 1):
        return
    low = tl.full((), 0, tl.int32)  # the first expert whose last tile lies behind this one
    high = num_experts - 1
    while low < high:
        middle = (low + high) // 2
        is_behind = tl.load(last_tiles + middle) > tile
        high = tl.where(is_behind, middle, high)
        low = tl.where(is_behind, low, middle + 1)
    expert = low.to(tl.int64)
    end = tl.load(ends + expert)
    start = tl.load(starts + expert)
    num_own = (end - start + ROWS - 1) // ROWS
    rows = start + (tile - tl.load(last_tiles + expert) + num_own) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    deep = tl.arange(0, DEPTH)
    has_row, has_column = rows < end, columns < num_columns
    x_places = x + rows[:, None] * INPUTS + deep[None, :]
    weight_places = weight + (expert * num_columns + columns[None, :]) * INPUTS + deep[:, None]
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, INPUTS, DEPTH):
        is_inside = first + deep < INPUTS
        left = tl.load(x_places, mask=has_row[:, None] & is_inside[None, :], other=0.0)
        right = tl.load(weight_places, mask=has_column[None, :] & is_inside[:, None], other=0.0)
        sums = tl.dot(left, right, sums, input_precision="ieee")
        x_places += DEPTH
        weight_places += DEPTH
    if HAS_BIAS:
        sums += tl.load(bias + expert * num_columns + columns, mask=has_column, other=0.0).to(tl.float32)[None, :]
    result = sums.to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * num_columns + columns[None, :], result, mask=has_row[:, None] & has_column[None, :])
