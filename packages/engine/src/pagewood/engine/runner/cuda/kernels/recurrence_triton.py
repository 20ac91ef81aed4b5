"""Convolutions and recurrences over states that places of a pool hold.

A convolution has a program for each token, and then one for each grant, which keeps the last rows. A recurrence has one
for each grant, head and block of value columns: it holds its part of the state in registers, and goes through the
tokens of the grant in order. No sum goes over columns of different programs, and every token has the same
instructions. So its bits are the same decoded and in a prompt, however that is cut, alone or with others, in a graph or
not.

This takes as long as a prompt's tokens, one after the other. A form in chunks would multiply matrices instead, with
borders at absolute positions, so that bits do not depend on the step.

Legend: T tokens of a step, G grants, C channels of a convolution, W tokens that it reads, H heads of values `[V]`, K
elements of a key.
Source: Yang et al., Gated Delta Networks, 2024; Dao and Gu, Transformers are SSMs, 2024.
"""

# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false
# Triton comes only with torch's CUDA build.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewood.engine.models.ops import Convolution, RecurrentHeads
from pagewood.engine.runner.cuda.recurrence import LEAST_SQUARES, StepStates

_CHANNELS = 256  # of a program
_VALUES = 32  # columns of a program, whose state with 128 keys is 32 registers of each thread


def convolve(x: Tensor, column: int, convolution: Convolution, tails: Tensor, step: StepStates) -> Tensor:
    """Return the convolution of columns of `x`; see `recurrence.RecurrentKernels`."""
    (width, channels), bias = convolution.weight.shape, convolution.bias
    out = torch.empty(len(x), channels, dtype=x.dtype, device=x.device)
    num_blocks = triton.cdiv(channels, _CHANNELS)
    shape = {"X_SIZE": x.stride(0), "COLUMN": column, "SIZE": channels, "WIDTH": width, "BLOCK": _CHANNELS}
    _convolve[(len(x), num_blocks)](
        x, convolution.weight, convolution.weight if bias is None else bias, tails, step.places, step.saves,
        step.grants, step.offsets, out, HAS_BIAS=bias is not None, ACTIVATES=convolution.activates, **shape,
        num_warps=4,
    )  # fmt: skip
    _keep_tails[(len(step.places) // 2, num_blocks)](
        x, tails, step.places, step.offsets, ROWS=triton.next_power_of_2(width - 1), **shape, num_warps=4
    )
    return out


def recur(x: Tensor, gates: Tensor, heads: RecurrentHeads, matrices: Tensor, step: StepStates) -> Tensor:
    """Return the results of heads; see `recurrence.RecurrentKernels`."""
    out = torch.empty(len(x), heads.value_size, dtype=x.dtype, device=x.device)
    q_column, k_column, v_column = heads.columns
    _recur[(triton.cdiv(heads.value_dim, _VALUES), heads.num_heads, len(step.places) // 2)](
        x, gates, heads.rate, heads.bias, heads.rate if heads.skip is None else heads.skip, matrices, step.places,
        step.saves, step.offsets, out, X_SIZE=x.stride(0), NUM_GATES=gates.shape[1], NUM_DECAYS=len(heads.bias),
        NUM_HEADS=heads.num_heads, GROUP=heads.num_heads // heads.num_key_heads, KEY_DIM=heads.key_dim,
        VALUE_DIM=heads.value_dim, Q_COLUMN=q_column, K_COLUMN=k_column, V_COLUMN=v_column,
        LEAST_SQUARES=LEAST_SQUARES, CORRECTS=heads.corrects, MOST_STRENGTH=heads.most_strength,
        BY_CHANNEL=heads.decays_by_channel, HAS_SKIP=heads.skip is not None,
        KEYS=triton.next_power_of_2(heads.key_dim), VALUES=_VALUES, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _rows(
    x, tails, token, index, back, source, channels, is_inside,
    X_SIZE: tl.constexpr, COLUMN: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return channels of the token `back` tokens before `token`, which is number `index` of its grant: of the step, or
    of the state that the grant reads.
    """
    is_here = index >= back
    here_at = x + (token - back).to(tl.int64) * X_SIZE + COLUMN + channels
    here = tl.load(here_at, mask=is_inside & is_here, other=0.0).to(tl.float32)
    old_at = tails + (source * (WIDTH - 1) + (WIDTH - 1) + index - back) * SIZE + channels
    return tl.where(is_here, here, tl.load(old_at, mask=is_inside & (index < back) & (source >= 0), other=0.0))


@triton.jit
def _convolve(
    x, weight, bias, tails, places, saves, grants, offsets, out,
    X_SIZE: tl.constexpr, COLUMN: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATES: tl.constexpr,
) -> None:  # fmt: skip
    """Convolve channels of a token, and keep the state behind it, if it has a place."""
    token = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = channels < SIZE
    grant = tl.load(grants + token)
    index = token - tl.load(offsets + grant)
    source, save = tl.load(places + 2 * grant).to(tl.int64), tl.load(saves + token).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channels, mask=is_inside, other=0.0)
    for w in tl.static_range(WIDTH):
        row = _rows(x, tails, token, index, WIDTH - 1 - w, source, channels, is_inside, X_SIZE, COLUMN, SIZE, WIDTH)
        total += tl.load(weight + w * SIZE + channels, mask=is_inside, other=0.0) * row
        if w > 0:
            tl.store(tails + (save * (WIDTH - 1) + w - 1) * SIZE + channels, row, mask=is_inside & (save >= 0))
    if ACTIVATES:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out + token.to(tl.int64) * SIZE + channels, total.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _keep_tails(
    x, tails, places, offsets,
    X_SIZE: tl.constexpr, COLUMN: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Leave the last rows of a grant, which may replace those that it reads."""
    grant = tl.program_id(0)
    channels = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    rows = tl.arange(0, ROWS)[:, None]
    is_inside = (channels < SIZE) & (rows < WIDTH - 1)
    source, target = tl.load(places + 2 * grant).to(tl.int64), tl.load(places + 2 * grant + 1).to(tl.int64)
    last = tl.load(offsets + grant + 1) - 1
    index = last - tl.load(offsets + grant)
    kept = _rows(x, tails, last, index, WIDTH - 2 - rows, source, channels, is_inside, X_SIZE, COLUMN, SIZE, WIDTH)
    tl.debug_barrier()  # all is read before anything is written
    tl.store(tails + (target * (WIDTH - 1) + rows) * SIZE + channels, kept, mask=is_inside)


@triton.jit
def _softplus(x) -> tl.tensor:
    """Return log(1 + e^x) without a logarithm: the fast one of a GPU is too coarse near 1.

    log(1 + y) is twice the inverse hyperbolic tangent of z = y / (2 + y), at most 1/3 here, of which this is a series.
    """
    y = tl.exp(-tl.abs(x))
    z = y / (2.0 + y)
    s = z * z
    total = 1.0 + s * (1 / 3 + s * (1 / 5 + s * (1 / 7 + s * (1 / 9 + s * (1 / 11 + s * (1 / 13 + s * (1 / 15)))))))
    return tl.maximum(x, 0.0) + 2.0 * z * total


@triton.jit
def _recur(
    x, gates, rates, biases, skips, matrices, places, saves, offsets, out,
    X_SIZE: tl.constexpr, NUM_GATES: tl.constexpr, NUM_DECAYS: tl.constexpr, NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, Q_COLUMN: tl.constexpr,
    K_COLUMN: tl.constexpr, V_COLUMN: tl.constexpr, LEAST_SQUARES: tl.constexpr, CORRECTS: tl.constexpr,
    MOST_STRENGTH: tl.constexpr, BY_CHANNEL: tl.constexpr, HAS_SKIP: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr,
) -> None:  # fmt: skip
    """Change columns of a head's state by the tokens of a grant, one after the other, and write what they answer."""
    block, head, grant = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    keys, values = tl.arange(0, KEYS), block * VALUES + tl.arange(0, VALUES)
    has_key, has_value = keys < KEY_DIM, values < VALUE_DIM
    is_inside = has_key[:, None] & has_value[None, :]
    own = (head * KEY_DIM + keys[:, None]) * VALUE_DIM + values[None, :]
    source, target = tl.load(places + 2 * grant).to(tl.int64), tl.load(places + 2 * grant + 1).to(tl.int64)
    first, end = tl.load(offsets + grant), tl.load(offsets + grant + 1)
    state_size = NUM_HEADS * KEY_DIM * VALUE_DIM
    state = tl.load(matrices + source * state_size + own, mask=is_inside & (source >= 0), other=0.0)
    rate = tl.load(rates + head)
    decaying = head * KEY_DIM + keys if BY_CHANNEL else keys * 0 + head  # among numbers that say how fast rows decay
    bias = tl.load(biases + decaying, mask=has_key, other=0.0)
    row = x + first.to(tl.int64) * X_SIZE
    gate = gates + first.to(tl.int64) * NUM_GATES
    result_at = out + first.to(tl.int64) * (NUM_HEADS * VALUE_DIM) + head * VALUE_DIM + values
    save_at = saves + first
    for _ in range(first, end):
        of_keys = head // GROUP * KEY_DIM + keys
        q = tl.load(row + Q_COLUMN + of_keys, mask=has_key, other=0.0).to(tl.float32)
        k = tl.load(row + K_COLUMN + of_keys, mask=has_key, other=0.0).to(tl.float32)
        v = tl.load(row + V_COLUMN + head * VALUE_DIM + values, mask=has_value, other=0.0).to(tl.float32)
        step = _softplus(tl.load(gate + NUM_GATES - NUM_DECAYS + decaying, mask=has_key, other=0.0) + bias)
        state = state * tl.exp(rate * step)[:, None]
        if CORRECTS:
            q = q * tl.rsqrt((tl.sum(q * q, 0) + LEAST_SQUARES) * KEY_DIM)
            k = k * tl.rsqrt(tl.sum(k * k, 0) + LEAST_SQUARES)
            strength = MOST_STRENGTH / (1.0 + tl.exp(-tl.load(gate + head)))
            change = (v - tl.sum(state * k[:, None], 0)) * strength
        else:
            k = k * step
            change = v
        state = state + k[:, None] * change[None, :]
        result = tl.sum(state * q[:, None], 0)
        if HAS_SKIP:
            result += tl.load(skips + head) * v
        tl.store(result_at, result.to(out.dtype.element_ty), mask=has_value)
        save = tl.load(save_at).to(tl.int64)
        if save >= 0:
            tl.store(matrices + save * state_size + own, state, mask=is_inside)
        row += X_SIZE
        gate += NUM_GATES
        result_at += NUM_HEADS * VALUE_DIM
        save_at += 1
    tl.store(matrices + target * state_size + own, state, mask=is_inside)
