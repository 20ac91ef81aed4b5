"""Convolutions and recurrences over states that places of a pool hold.

A convolution has a program for each token, and then one for each grant, which keeps the last rows. A recurrence has one
for each grant, head and part of its values: it holds its part of the state in registers, and goes through the blocks of
the grant in order; see `recurrence` for their borders. A tile has a row for each token of a block, at its place in it,
and zeros for those that are not there. No sum goes over values of different programs, and a row has the same
instructions whatever other rows hold. So a token's bits are the same decoded and in a prompt, however that is cut,
alone or with others, in a graph or not.

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
from pagewood.engine.runner.cuda.recurrence import LARGEST_BLOCK, LEAST_DECAY, LEAST_SQUARES, StepStates

_CHANNELS = 256  # of a program
_VALUES = 32
"""Values of a head in a program. With fewer rows than 64, products on Hopper are those of older GPUs, whose state lies
in registers."""


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


def recur(
    x: Tensor, gates: Tensor, heads: RecurrentHeads, matrices: Tensor, opened: Tensor, step: StepStates
) -> Tensor:
    """Return the results of heads; see `recurrence.RecurrentKernels`."""
    out = torch.empty(len(x), heads.value_size, dtype=x.dtype, device=x.device)
    q_column, k_column, v_column = heads.columns
    num_grants, is_single, num_decays = len(step.places) // 2, step.longest == 1, len(heads.bias)
    shape = {
        "X_SIZE": x.stride(0), "NUM_GATES": gates.shape[1], "NUM_DECAYS": num_decays, "K_COLUMN": k_column,
        "TOKENS_PER_ROW": step.tokens_per_row, "BLOCK": opened.shape[1], "ROWS": LARGEST_BLOCK,
    }  # fmt: skip
    _recur[(triton.cdiv(heads.value_dim, _VALUES), heads.num_heads, num_grants)](
        x, gates, heads.rate, heads.bias, heads.rate if heads.skip is None else heads.skip, matrices, opened,
        step.places, step.saves, step.sources, step.offsets, out, NUM_HEADS=heads.num_heads,
        GROUP=heads.num_heads // heads.num_key_heads, KEY_DIM=heads.key_dim, VALUE_DIM=heads.value_dim,
        Q_COLUMN=q_column, V_COLUMN=v_column, LEAST_SQUARES=LEAST_SQUARES, LEAST_DECAY=LEAST_DECAY,
        CORRECTS=heads.corrects, MOST_STRENGTH=heads.most_strength, BY_CHANNEL=heads.decays_by_channel,
        HAS_SKIP=heads.skip is not None, IS_SINGLE=is_single, KEYS=max(16, triton.next_power_of_2(heads.key_dim)),
        VALUES=_VALUES, **shape, num_warps=8,
    )  # fmt: skip
    if not is_single:
        _keep_open[(num_grants, triton.cdiv(heads.key_size + num_decays, _CHANNELS))](
            x, gates, opened, step.sources, step.offsets, KEY_SIZE=heads.key_size, ROW_SIZE=opened.shape[2],
            CHANNELS=_CHANNELS, **shape, num_warps=4,
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
    here_at = x + (token - back).to(tl.int64) * X_SIZE + COLUMN + channels
    here = tl.load(here_at, mask=is_inside & (index >= back), other=0.0).to(tl.float32)
    if source >= 0:
        old_at = tails + (source * (WIDTH - 1) + (WIDTH - 1) + index - back) * SIZE + channels
        here += tl.load(old_at, mask=is_inside & (index < back), other=0.0)
    return here


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
    index = token - tl.load(offsets + grant) + 0 * channels
    source, save = tl.load(places + 2 * grant).to(tl.int64), tl.load(saves + token).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channels, mask=is_inside, other=0.0)
    for w in tl.static_range(WIDTH):
        row = _rows(x, tails, token, index, WIDTH - 1 - w, source, channels, is_inside, X_SIZE, COLUMN, SIZE, WIDTH)
        total += tl.load(weight + w * SIZE + channels, mask=is_inside, other=0.0) * row
        if (w > 0) & (save >= 0):
            tl.store(tails + (save * (WIDTH - 1) + w - 1) * SIZE + channels, row, mask=is_inside)
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
def _product(a, b) -> tl.tensor:
    """Return the product of two matrices from tensor cores, with nearly the precision of float32.

    These do the same for each row and column, so a number depends only on the row and the column that it is made of.
    """
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _recur(
    x, gates, rates, biases, skips, matrices, opened, places, saves, sources, offsets, out,
    X_SIZE: tl.constexpr, NUM_GATES: tl.constexpr, NUM_DECAYS: tl.constexpr, NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, Q_COLUMN: tl.constexpr,
    K_COLUMN: tl.constexpr, V_COLUMN: tl.constexpr, LEAST_SQUARES: tl.constexpr, LEAST_DECAY: tl.constexpr,
    CORRECTS: tl.constexpr, MOST_STRENGTH: tl.constexpr, BY_CHANNEL: tl.constexpr, HAS_SKIP: tl.constexpr,
    TOKENS_PER_ROW: tl.constexpr, BLOCK: tl.constexpr, IS_SINGLE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr,
) -> None:  # fmt: skip
    """Go through the blocks of a grant, for some values of a head: write what tokens answer, and change the state.

    Rows of matrices are the tokens of a block. The answer to one of them is that of the state before the block and of
    the changes by each token up to it, all decayed since.
    """
    part, head, grant = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    keys, values, index = tl.arange(0, KEYS), part * VALUES + tl.arange(0, VALUES), tl.arange(0, ROWS)
    has_key, has_value = keys < KEY_DIM, values < VALUE_DIM
    of_keys, of_values = (head // GROUP * KEY_DIM + keys)[None, :], (head * VALUE_DIM + values)[None, :]
    channels = keys if BY_CHANNEL else tl.arange(0, 1)  # what decays with numbers of its own
    num_channels = KEY_DIM if BY_CHANNEL else 1
    is_channel, decaying = (channels < num_channels)[None, :], (head * num_channels + channels)[None, :]
    own = (head * KEY_DIM + keys[None, :]) * VALUE_DIM + values[:, None]
    is_inside = has_value[:, None] & has_key[None, :]
    source, target = tl.load(places + 2 * grant).to(tl.int64), tl.load(places + 2 * grant + 1).to(tl.int64)
    first, end = tl.load(offsets + grant), tl.load(offsets + grant + 1)
    at = tl.load(sources + first)
    start = at % TOKENS_PER_ROW % BLOCK  # tokens of the first block that came before
    state_size = NUM_HEADS * KEY_DIM * VALUE_DIM
    state = tl.zeros((VALUES, KEYS), tl.float32)
    if source >= 0:
        state += tl.load(matrices + source * state_size + own, mask=is_inside, other=0.0)
    key_size = NUM_HEADS // GROUP * KEY_DIM
    row_size = key_size + NUM_DECAYS + NUM_HEADS * VALUE_DIM
    opened_at = opened + ((at // TOKENS_PER_ROW).to(tl.int64) * BLOCK + index)[:, None] * row_size
    k_at, decays_at, changes_at = (
        opened_at + of_keys,
        opened_at + key_size + decaying,
        opened_at + key_size + NUM_DECAYS,
    )
    changes_at += of_values
    changes = tl.load(changes_at, mask=(index < start)[:, None] & has_value[None, :], other=0.0)
    rate = tl.load(rates + head)
    bias = tl.load(biases + decaying, mask=is_channel, other=0.0)
    for begin in range(first - start, end, BLOCK):
        tokens = (begin + index)[:, None]
        is_old, is_new = tokens < first, (tokens >= first) & (tokens < end) & (index < BLOCK)[:, None]
        x_at, gates_at = x + tokens.to(tl.int64) * X_SIZE, gates + tokens.to(tl.int64) * NUM_GATES
        q = tl.load(x_at + Q_COLUMN + of_keys, mask=is_new & has_key[None, :], other=0.0).to(tl.float32)
        k = tl.load(x_at + K_COLUMN + of_keys, mask=is_new & has_key[None, :], other=0.0).to(tl.float32)
        v = tl.load(x_at + V_COLUMN + of_values, mask=is_new & has_value[None, :], other=0.0).to(tl.float32)
        number = tl.load(gates_at + NUM_GATES - NUM_DECAYS + decaying, mask=is_new & is_channel, other=0.0)
        if IS_SINGLE & (part == 0):  # otherwise other programs may still read what this would replace
            tl.store(decays_at, number, mask=is_new & is_channel)
            if head % GROUP == 0:
                tl.store(k_at, k, mask=is_new & has_key[None, :])
        k += tl.load(k_at, mask=is_old & has_key[None, :], other=0.0)
        step = _softplus(number + tl.load(decays_at, mask=is_old & is_channel, other=0.0) + bias)
        since = tl.cumsum(tl.where(is_old | is_new, tl.maximum(rate * step, LEAST_DECAY), 0.0), 0)
        if CORRECTS:
            q = q * tl.rsqrt((tl.sum(q * q, 1) + LEAST_SQUARES) * KEY_DIM)[:, None]
            k = k * tl.rsqrt(tl.sum(k * k, 1) + LEAST_SQUARES)[:, None]
        else:
            k = k * step
        if BY_CHANNEL:
            matches, weights = tl.zeros((ROWS, ROWS), tl.float32), tl.zeros((ROWS, ROWS), tl.float32)
            for i in range(tl.maximum(first - begin, 0), tl.minimum(end - begin, BLOCK)):
                is_own = (index == i)[:, None]
                own_since = tl.sum(tl.where(is_own, since, 0.0), 0)[None, :]
                decayed = k * tl.exp(tl.minimum(own_since - since, 0.0))
                own_k, own_q = tl.sum(tl.where(is_own, k, 0.0), 0), tl.sum(tl.where(is_own, q, 0.0), 0)
                matches = tl.where(is_own, tl.sum(decayed * own_k[None, :], 1)[None, :], matches)
                weights = tl.where(is_own, tl.sum(decayed * own_q[None, :], 1)[None, :], weights)
        else:
            whole = tl.sum(since, 1)
            between = tl.exp(tl.minimum(whole[:, None] - whole[None, :], 0.0))
            weights = _product(q, tl.trans(k)) * between
            if CORRECTS:
                matches = _product(k, tl.trans(k)) * between
        if CORRECTS:
            strength = MOST_STRENGTH / (1.0 + tl.exp(-tl.load(gates_at + head, mask=is_new, other=0.0)))
            answers = _product(k * tl.exp(since), tl.trans(state))
            changes = tl.where(is_old, changes, (v - answers) * strength)
            matches = tl.where(index[None, :] < index[:, None], matches, 0.0) * strength
            for i in range(tl.maximum(first - begin, 1), tl.minimum(end - begin, BLOCK)):
                is_own = (index == i)[:, None]
                known = tl.sum(tl.where(is_own, matches, 0.0), 0)
                changes -= tl.where(is_own, tl.sum(changes * known[:, None], 0)[None, :], 0.0)
        else:
            changes = tl.where(is_old, changes, v)
        result = _product(q * tl.exp(since), tl.trans(state))
        result += _product(tl.where(index[None, :] <= index[:, None], weights, 0.0), changes)
        if HAS_SKIP:
            result += tl.load(skips + head) * v
        result_at = out + tokens.to(tl.int64) * (NUM_HEADS * VALUE_DIM) + of_values
        tl.store(result_at, result.to(out.dtype.element_ty), mask=is_new & has_value[None, :])
        if begin + BLOCK <= end:
            last = tl.sum(tl.where((index == BLOCK - 1)[:, None], since, 0.0), 0)[None, :]
            state = state * tl.exp(last) + _product(tl.trans(changes), k * tl.exp(last - since))
            save = tl.load(saves + begin + BLOCK - 1).to(tl.int64)
            if save >= 0:
                tl.store(matrices + save * state_size + own, state, mask=is_inside)
    num_open = (end - first + start) % BLOCK
    is_kept = (index < num_open) & (end - num_open + index >= first)
    tl.store(changes_at, changes, mask=is_kept[:, None] & has_value[None, :])
    if (source != target) | (end - first + start >= BLOCK):
        tl.store(matrices + target * state_size + own, state, mask=is_inside)


@triton.jit
def _keep_open(
    x, gates, opened, sources, offsets, X_SIZE: tl.constexpr, NUM_GATES: tl.constexpr, NUM_DECAYS: tl.constexpr,
    K_COLUMN: tl.constexpr, KEY_SIZE: tl.constexpr, ROW_SIZE: tl.constexpr, TOKENS_PER_ROW: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """Keep what later tokens of its last block read of those of a grant: keys, and numbers of decays."""
    grant = tl.program_id(0)
    channels = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    first, end, index = tl.load(offsets + grant), tl.load(offsets + grant + 1), tl.arange(0, ROWS)[:, None]
    at = tl.load(sources + first)
    num_open = (at % TOKENS_PER_ROW + end - first) % BLOCK
    tokens = (end - num_open + index).to(tl.int64)
    is_kept, is_key = (index < num_open) & (tokens >= first), channels < KEY_SIZE
    k = tl.load(x + tokens * X_SIZE + K_COLUMN + channels, mask=is_kept & is_key, other=0.0).to(tl.float32)
    is_decay = (channels >= KEY_SIZE) & (channels < KEY_SIZE + NUM_DECAYS)
    of_gates = NUM_GATES - NUM_DECAYS + channels - KEY_SIZE
    decays = tl.load(gates + tokens * NUM_GATES + of_gates, mask=is_kept & is_decay, other=0.0)
    row = (at // TOKENS_PER_ROW).to(tl.int64) * BLOCK + index
    tl.store(opened + row * ROW_SIZE + channels, tl.where(is_key, k, decays), mask=is_kept & (is_key | is_decay))
