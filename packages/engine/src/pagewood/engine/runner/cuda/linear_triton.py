"""A projection whose every row is computed alike, whatever other rows there are: one kernel, one tile, one order.

A library of matrix products picks a kernel by the number of rows, and with it the order in which a row's products are
added. Here a tile's shape depends on the weights only, and a tile runs along the whole depth by itself, from its start
to its end, so that a row's sums do not depend on how many rows there are, nor on which of a tile's rows it is.

Source: the cause is told in "Defeating Nondeterminism in LLM Inference" (Thinking Machines Lab, 2025).

Legend: T tokens, I and O columns of the input and of the output.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# Triton comes with torch where torch is built for CUDA, and only there.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 64  # of a tile: what one group of warps multiplies at a time
_DEPTH = 64  # products that are added in one round
_MANY_COLUMNS = 16_384  # from which on wide tiles are enough for all multiprocessors


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `[T, O]` of `x` `[T, I]`, `weight` `[O, I]` and `bias` `[O]`, all of one dtype; added up in float32."""
    num_rows, depth = x.shape
    num_columns = weight.shape[0]
    out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    columns = 128 if num_columns >= _MANY_COLUMNS else 64
    num_tiles = triton.cdiv(num_rows, _ROWS) * triton.cdiv(num_columns, columns)
    _linear[(num_tiles,)](
        x.contiguous(), weight, weight if bias is None else bias, out, num_rows, num_columns,
        INPUTS=depth, HAS_BIAS=bias is not None, ROWS=_ROWS, COLUMNS=columns, DEPTH=_DEPTH, num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x, weight, bias, out, num_rows, num_columns,
    INPUTS: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
) -> None:  # fmt: skip
    """Compute one tile; tiles of the same columns follow each other, so that they find the weights in the cache."""
    tile = tl.program_id(0)
    num_row_tiles = tl.cdiv(num_rows, ROWS)
    rows = ((tile % num_row_tiles) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = ((tile // num_row_tiles) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    deep = tl.arange(0, DEPTH)
    has_row, has_column = rows < num_rows, columns < num_columns
    x_places = x + rows[:, None] * INPUTS + deep[None, :]
    weight_places = weight + columns[None, :] * INPUTS + deep[:, None]
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, INPUTS, DEPTH):
        is_inside = start + deep < INPUTS
        left = tl.load(x_places, mask=has_row[:, None] & is_inside[None, :], other=0.0)
        right = tl.load(weight_places, mask=has_column[None, :] & is_inside[:, None], other=0.0)
        sums = tl.dot(left, right, sums, input_precision="ieee")
        x_places += DEPTH
        weight_places += DEPTH
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=has_column, other=0.0).to(tl.float32)[None, :]
    result = sums.to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * num_columns + columns[None, :], result, mask=has_row[:, None] & has_column[None, :])
