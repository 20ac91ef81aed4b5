"""A projection that computes each row in the same way for any number of rows: one kernel, one tile, one order.

Libraries of matrix products choose a kernel, and so the order in which the products of a row are added, by the number
of rows. Here the shape of a tile depends on the weights only, and each tile adds along the whole depth from start to
end. So the sums of a row depend neither on the number of rows nor on the row's place in its tile.

Source: "Defeating Nondeterminism in LLM Inference" (Thinking Machines Lab, 2025) describes the cause.

Legend: T tokens, H heads, I and O columns of the input and of the output.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# Triton comes only with torch's CUDA build.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 64  # rows of a tile, which one group of warps multiplies at a time
_DEPTH = 64  # products added per round
_MANY_COLUMNS = 16_384  # from here on, wide tiles are enough to occupy all multiprocessors


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `[T, O]` of `x` `[T, I]`, `weight` `[O, I]` and `bias` `[O]`, all of one dtype; sums are in float32."""
    return _products(x.contiguous()[:, None], weight[None], bias)[:, 0]


def heads_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return `[T, H, O]` of `x` `[T, H, I]` and `weight` `[H, O, I]`, which may be views; sums are in float32."""
    return _products(x, weight, None)


def _products(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    num_rows, num_heads, depth = x.shape
    num_columns = weight.shape[1]
    out = torch.empty((num_rows, num_heads, num_columns), dtype=x.dtype, device=x.device)
    columns = 128 if num_columns >= _MANY_COLUMNS else 64
    num_tiles = triton.cdiv(num_rows, _ROWS) * triton.cdiv(num_columns, columns)
    _linear[(num_tiles, num_heads)](
        x, weight, weight if bias is None else bias, out, num_rows, num_columns, INPUTS=depth, X_STRIDES=x.stride(),
        WEIGHT_STRIDES=weight.stride(), OUT_STRIDES=out.stride()[:2], HAS_BIAS=bias is not None, ROWS=_ROWS,
        COLUMNS=columns, DEPTH=_DEPTH, num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x, weight, bias, out, num_rows, num_columns,
    INPUTS: tl.constexpr, X_STRIDES: tl.constexpr, WEIGHT_STRIDES: tl.constexpr, OUT_STRIDES: tl.constexpr,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
) -> None:  # fmt: skip
    """Compute one tile; tiles of the same columns follow each other, so that the weights are still in the cache."""
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_row_tiles = tl.cdiv(num_rows, ROWS)
    rows = ((tile % num_row_tiles) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = ((tile // num_row_tiles) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    deep = tl.arange(0, DEPTH)
    has_row, has_column = rows < num_rows, columns < num_columns
    x_places = x + head * X_STRIDES[1] + rows[:, None] * X_STRIDES[0] + deep[None, :] * X_STRIDES[2]
    weight_places = weight + head * WEIGHT_STRIDES[0]
    weight_places += columns[None, :] * WEIGHT_STRIDES[1] + deep[:, None] * WEIGHT_STRIDES[2]
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, INPUTS, DEPTH):
        is_inside = start + deep < INPUTS
        left = tl.load(x_places, mask=has_row[:, None] & is_inside[None, :], other=0.0)
        right = tl.load(weight_places, mask=has_column[None, :] & is_inside[:, None], other=0.0)
        sums = tl.dot(left, right, sums, input_precision="ieee")
        x_places += DEPTH * X_STRIDES[2]
        weight_places += DEPTH * WEIGHT_STRIDES[2]
    if HAS_BIAS:
        sums += tl.load(bias + columns, mask=has_column, other=0.0).to(tl.float32)[None, :]
    result = sums.to(out.dtype.element_ty)
    out_places = out + head * OUT_STRIDES[1] + rows[:, None] * OUT_STRIDES[0] + columns[None, :]
    tl.store(out_places, result, mask=has_row[:, None] & has_column[None, :])
