"""Kernels for a step of very few requests: products that read the weights at the memory's rate, and the activation.

A product with one row reads each weight once and does little else. Libraries of matrix products give it the tiles of
larger products, and reach 65 to 92% of what the memory of an H100 can deliver. Here each program multiplies one row of
the weights with all rows of the input, and all of them together reach 87 to 100%.

Legend: T tokens, I and O columns of the input and of the output.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# Triton comes only with torch's CUDA build.

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

MOST_ROWS = 2
"""With more rows, multiplying takes longer than reading, and tensor cores are faster (measured on an H100)."""
MOST_ACTIVATED = 64
"""Up to this many rows, FlashInfer's activation, with one program per row, leaves a part of the device idle."""
_DEPTH = 2048  # weights that a program reads at a time
_DEPTH_PER_WARP = 256
_BLOCK = 512  # columns of the activation that a program computes


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `[T, O]` of `x` `[T, I]`, `weight` `[O, I]` and `bias` `[O]`, all of one dtype; sums are in float32.

    More than `MOST_ROWS` rows are multiplied by torch.
    """
    num_rows, depth = x.shape
    if not 0 < num_rows <= MOST_ROWS:
        return functional.linear(x, weight, bias)
    num_columns = weight.shape[0]
    out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    read = min(_DEPTH, triton.next_power_of_2(depth))
    _linear[(num_columns,)](
        x.contiguous(), weight, weight if bias is None else bias, out, num_rows, num_columns,
        INPUTS=depth, HAS_BIAS=bias is not None, ROWS=triton.next_power_of_2(num_rows), DEPTH=read,
        num_warps=max(1, read // _DEPTH_PER_WARP), num_stages=3,
    )  # fmt: skip
    return out


def silu_mul(gate_up: Tensor, *, otherwise: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `[T, I]`: silu of the first half of `gate_up` `[T, 2I]` times the second half, computed in float32.

    More than `MOST_ACTIVATED` rows are computed by `otherwise`, because starting a kernel of Triton costs the host more
    than starting one of FlashInfer, which slows down prompts without a graph.
    """
    num_rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    if not 0 < num_rows <= MOST_ACTIVATED:
        return otherwise(gate_up)
    out = torch.empty((num_rows, columns), dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul[(num_rows * triton.cdiv(columns, _BLOCK),)](gate_up.contiguous(), out, COLUMNS=columns, BLOCK=_BLOCK)
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x, weight, bias, out, num_rows, num_columns,
    INPUTS: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
) -> None:  # fmt: skip
    """Compute one column of the result."""
    column = tl.program_id(0).to(tl.int64)
    rows, deep = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    has_row = rows < num_rows
    sums = tl.zeros((ROWS, DEPTH), dtype=tl.float32)
    for start in range(0, INPUTS, DEPTH):
        if INPUTS % DEPTH == 0:
            read = tl.load(weight + column * INPUTS + start + deep)
            left = tl.load(x + rows[:, None] * INPUTS + (start + deep)[None, :], mask=has_row[:, None], other=0.0)
        else:
            is_inside = start + deep < INPUTS
            read = tl.load(weight + column * INPUTS + start + deep, mask=is_inside, other=0.0)
            is_read = has_row[:, None] & is_inside[None, :]
            left = tl.load(x + rows[:, None] * INPUTS + (start + deep)[None, :], mask=is_read, other=0.0)
        sums += left.to(tl.float32) * read.to(tl.float32)[None, :]
    result = tl.sum(sums, 1)
    if HAS_BIAS:
        result += tl.load(bias + column).to(tl.float32)
    tl.store(out + rows * num_columns + column, result.to(out.dtype.element_ty), mask=has_row)


@triton.jit
def _silu_mul(gate_up, out, COLUMNS: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Compute one block of one row; programs of a row follow each other."""
    blocks = tl.cdiv(COLUMNS, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    has_column = columns < COLUMNS
    gate = tl.load(gate_up + row * 2 * COLUMNS + columns, mask=has_column, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * COLUMNS + COLUMNS + columns, mask=has_column, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * COLUMNS + columns, result.to(out.dtype.element_ty), mask=has_column)
