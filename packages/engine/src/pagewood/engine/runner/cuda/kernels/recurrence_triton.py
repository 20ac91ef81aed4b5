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


def convolve(
    x: Tensor, column: int, convolution: Convolution, tails: Tensor, latest: Tensor, step: StepStates
) -> Tensor:
    """Return the convolution of columns of `x`; see `recurrence.RecurrentKernels`."""
    (width, channels), bias, ring = convolution.weight.shape, convolution.bias, latest.shape[1]
    out = torch.empty(len(x), channels, dtype=x.dtype, device=x.device)
    num_blocks = triton.cdiv(channels, _CHANNELS)
    shape = {
        "TOKENS_PER_ROW": step.tokens_per_row, "RING": ring, "X_SIZE": x.stride(0), "COLUMN": column, "SIZE": channels,
        "WIDTH": width, "BLOCK": _CHANNELS,
    }  # fmt: skip
    _convolve[(len(x), num_blocks)](
        x, convolution.weight, convolution.weight if bias is None else bias, tails, latest, step.places, step.saves,
        step.grants, step.offsets, step.sources, out, HAS_BIAS=bias is not None, ACTIVATES=convolution.activates,
        **shape, num_warps=4,
    )  # fmt: skip
    _keep_latest[(len(step.places) // 2, num_blocks)](
        x, tails, latest, step.places, step.offsets, step.sources,
        ROWS=triton.next_power_of_2(ring), **shape, num_warps=4,
    )  # fmt: skip
    return out


def recur(
    x: Tensor, gates: Tensor, heads: RecurrentHeads, matrices: Tensor, opened: Tensor, size: int, step: StepStates
) -> Tensor:
    """Return the results of heads; see `recurrence.RecurrentKernels`."""
    out = torch.empty(len(x), heads.value_size, dtype=x.dtype, device=x.device)
    q_column, k_column, v_column = heads.columns
    num_grants, is_single, num_decays = len(step.places) // 2, step.longest == 1, len(heads.bias)
    borders, certain = (step.offsets if one is None else one for one in (step.borders, step.certain))
    shape = {
        "X_SIZE": x.stride(0), "NUM_GATES": gates.shape[1], "NUM_DECAYS": num_decays, "K_COLUMN": k_column,
        "TOKENS_PER_ROW": step.tokens_per_row, "BLOCK": size, "RING": opened.shape[1],
        "HAS_CERTAIN": step.certain is not None,
    }  # fmt: skip
    _recur[(triton.cdiv(heads.value_dim, _VALUES), heads.num_heads, num_grants)](
        x, gates, heads.rate, heads.bias, heads.rate if heads.skip is None else heads.skip, matrices, opened,
        step.places, step.saves, step.sources, step.offsets, borders, certain, out, NUM_HEADS=heads.num_heads,
        GROUP=heads.num_heads // heads.num_key_heads, KEY_DIM=heads.key_dim, VALUE_DIM=heads.value_dim,
        Q_COLUMN=q_column, V_COLUMN=v_column, LEAST_SQUARES=LEAST_SQUARES, LEAST_DECAY=LEAST_DECAY,
        HAS_BORDERS=step.borders is not None, CORRECTS=heads.corrects, MOST_STRENGTH=heads.most_strength,
        BY_CHANNEL=heads.decays_by_channel, HAS_SKIP=heads.skip is not None, IS_SINGLE=is_single,
        KEYS=max(16, triton.next_power_of_2(heads.key_dim)), VALUES=_VALUES, ROWS=LARGEST_BLOCK, **shape, num_warps=8,
    )  # fmt: skip
    if not is_single:
        _keep_open[(num_grants, triton.cdiv(heads.key_size + num_decays, _CHANNELS))](
            x, gates, opened, step.sources, step.offsets, certain, KEY_SIZE=heads.key_size,
            ROW_SIZE=opened.shape[2], CHANNELS=_CHANNELS, ROWS=triton.next_power_of_2(max(opened.shape[1], 16)),
            **shape, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _begin(sources, offsets, grant, TOKENS_PER_ROW: tl.constexpr) -> tuple[tl.tensor, ...]:
    """Return the row of a grant, its first position, its first token, and the one behind its last."""
    first = tl.load(offsets + grant)
    at = tl.load(sources + first)
    return (at // TOKENS_PER_ROW).to(tl.int64), at % TOKENS_PER_ROW, first, tl.load(offsets + grant + 1)


@triton.jit
def _rows(
    x, tails, latest, first, index, source, target, row, position, channels, is_inside,
    X_SIZE: tl.constexpr, COLUMN: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return channels of token `index` of a grant; before its first, of what the grant goes on from."""
    here_at = x + (first + index).to(tl.int64) * X_SIZE + COLUMN + channels
    here = tl.load(here_at, mask=is_inside & (index >= 0), other=0.0).to(tl.float32)
    is_old = is_inside & (index < 0)
    if source == target:
        place = row * RING + (position + index + RING) % RING
        here += tl.load(latest + place * SIZE + channels, mask=is_old, other=0.0)
    elif source >= 0:
        here += tl.load(tails + (source * (WIDTH - 1) + (WIDTH - 1) + index) * SIZE + channels, mask=is_old, other=0.0)
    return here


@triton.jit
def _convolve(
    x, weight, bias, tails, latest, places, saves, grants, offsets, sources, out,
    TOKENS_PER_ROW: tl.constexpr, RING: tl.constexpr, X_SIZE: tl.constexpr, COLUMN: tl.constexpr, SIZE: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATES: tl.constexpr,
) -> None:  # fmt: skip
    """Convolve channels of a token, and keep the state behind it, if it has a place."""
    token = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = channels < SIZE
    grant = tl.load(grants + token)
    row, position, first, _ = _begin(sources, offsets, grant, TOKENS_PER_ROW)
    index = token - first + 0 * channels
    source, target = tl.load(places + 2 * grant).to(tl.int64), tl.load(places + 2 * grant + 1).to(tl.int64)
    save = tl.load(saves + token).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channels, mask=is_inside, other=0.0)
    for w in tl.static_range(WIDTH):
        here = _rows(
            x, tails, latest, first, index - (WIDTH - 1 - w), source, target, row, position, channels, is_inside,
            X_SIZE, COLUMN, SIZE, WIDTH, RING,
        )  # fmt: skip
        total += tl.load(weight + w * SIZE + channels, mask=is_inside, other=0.0) * here
        if (w > 0) & (save >= 0):
            tl.store(tails + (save * (WIDTH - 1) + w - 1) * SIZE + channels, here, mask=is_inside)
    if ACTIVATES:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out + token.to(tl.int64) * SIZE + channels, total.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _keep_latest(
    x, tails, latest, places, offsets, sources,
    TOKENS_PER_ROW: tl.constexpr, RING: tl.constexpr, X_SIZE: tl.constexpr, COLUMN: tl.constexpr, SIZE: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Keep the last inputs of a grant in the ring of its row, with those before it, if it goes on from a place."""
    grant = tl.program_id(0)
    channels = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    row, position, first, end = _begin(sources, offsets, grant, TOKENS_PER_ROW)
    source, target = tl.load(places + 2 * grant).to(tl.int64), tl.load(places + 2 * grant + 1).to(tl.int64)
    back = tl.arange(0, ROWS)[:, None]
    index = end - first - 1 - back
    oldest = tl.where(source == target, 0, 1 - WIDTH)
    is_inside = (back < RING) & (index >= oldest) & (channels < SIZE)
    here = _rows(
        x, tails, latest, first, index, source, target, row, position, channels, is_inside,
        X_SIZE, COLUMN, SIZE, WIDTH, RING,
    )  # fmt: skip
    place = row * RING + (position + index + RING) % RING
    tl.store(latest + place * SIZE + channels, here, mask=is_inside)


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
    x, gates, rates, biases, skips, matrices, opened, places, saves, sources, offsets, borders, certain, out,
    X_SIZE: tl.constexpr, NUM_GATES: tl.constexpr, NUM_DECAYS: tl.constexpr, NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, Q_COLUMN: tl.constexpr,
    K_COLUMN: tl.constexpr, V_COLUMN: tl.constexpr, LEAST_SQUARES: tl.constexpr, LEAST_DECAY: tl.constexpr,
    CORRECTS: tl.constexpr, MOST_STRENGTH: tl.constexpr, BY_CHANNEL: tl.constexpr, HAS_SKIP: tl.constexpr,
    TOKENS_PER_ROW: tl.constexpr, BLOCK: tl.constexpr, RING: tl.constexpr, HAS_BORDERS: tl.constexpr,
    HAS_CERTAIN: tl.constexpr, IS_SINGLE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
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
    row, position, first, end = _begin(sources, offsets, grant, TOKENS_PER_ROW)
    border = position // BLOCK * BLOCK
    if HAS_BORDERS:
        border = tl.load(borders + grant)
    start = first - (position - border)  # the token of the step that would be at the border
    closed = _closed(certain, grant, position, first, end, BLOCK, HAS_CERTAIN)
    state_size = NUM_HEADS * KEY_DIM * VALUE_DIM
    state = tl.zeros((VALUES, KEYS), tl.float32)
    if source >= 0:
        state += tl.load(matrices + source * state_size + own, mask=is_inside, other=0.0)
    if (source != target) & (closed == start):
        tl.store(matrices + target * state_size + own, state, mask=is_inside)
    key_size = NUM_HEADS // GROUP * KEY_DIM
    row_size = key_size + NUM_DECAYS + NUM_HEADS * VALUE_DIM
    rate = tl.load(rates + head)
    bias = tl.load(biases + decaying, mask=is_channel, other=0.0)
    for begin in range(start, end, BLOCK):
        tokens = (begin + index)[:, None]
        opened_at = opened + (row * RING + (border + begin - start) % RING + index)[:, None] * row_size
        k_at, decays_at = opened_at + of_keys, opened_at + key_size + decaying
        changes_at = opened_at + key_size + NUM_DECAYS + of_values
        is_here = (tokens < end) & (index < BLOCK)[:, None]
        is_old, is_new = is_here & (tokens < first), is_here & (tokens >= first)
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
        known = tl.load(changes_at, mask=is_old & has_value[None, :], other=0.0)
        if CORRECTS:
            strength = MOST_STRENGTH / (1.0 + tl.exp(-tl.load(gates_at + head, mask=is_new, other=0.0)))
            answers = _product(k * tl.exp(since), tl.trans(state))
            changes = tl.where(is_old, known, (v - answers) * strength)
            matches = tl.where(index[None, :] < index[:, None], matches, 0.0) * strength
            for i in range(tl.maximum(first - begin, 1), tl.minimum(end - begin, BLOCK)):
                is_own = (index == i)[:, None]
                matched = tl.sum(tl.where(is_own, matches, 0.0), 0)
                changes -= tl.where(is_own, tl.sum(changes * matched[:, None], 0)[None, :], 0.0)
        else:
            changes = tl.where(is_old, known, v)
        result = _product(q * tl.exp(since), tl.trans(state))
        result += _product(tl.where(index[None, :] <= index[:, None], weights, 0.0), changes)
        if HAS_SKIP:
            result += tl.load(skips + head) * v
        result_at = out + tokens.to(tl.int64) * (NUM_HEADS * VALUE_DIM) + of_values
        tl.store(result_at, result.to(out.dtype.element_ty), mask=is_new & has_value[None, :])
        if begin + BLOCK <= end:
            last = tl.sum(tl.where((index == BLOCK - 1)[:, None], since, 0.0), 0)[None, :]
            state = state * tl.exp(last) + _product(tl.trans(changes), k * tl.exp(last - since))
            save = tl.load(saves + begin + BLOCK - 1, mask=begin + BLOCK > first, other=-1).to(tl.int64)
            if save >= 0:
                tl.store(matrices + save * state_size + own, state, mask=is_inside)
            if begin + BLOCK == closed:
                tl.store(matrices + target * state_size + own, state, mask=is_inside)
        tl.store(changes_at, changes, mask=is_new & (tokens >= closed) & has_value[None, :])


@triton.jit
def _closed(certain, grant, position, first, end, BLOCK: tl.constexpr, HAS_CERTAIN: tl.constexpr) -> tl.tensor:
    """Return the token of the step behind the last border up to which nothing is rejected."""
    num = end - first
    if HAS_CERTAIN:
        num = tl.load(certain + grant)
    return first + num - (position + num) % BLOCK


@triton.jit
def _keep_open(
    x, gates, opened, sources, offsets, certain, X_SIZE: tl.constexpr, NUM_GATES: tl.constexpr,
    NUM_DECAYS: tl.constexpr, K_COLUMN: tl.constexpr, KEY_SIZE: tl.constexpr, ROW_SIZE: tl.constexpr,
    TOKENS_PER_ROW: tl.constexpr, BLOCK: tl.constexpr, RING: tl.constexpr, HAS_CERTAIN: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """Keep what later steps read of a grant's tokens behind its last certain border: keys, and numbers of decays."""
    grant = tl.program_id(0)
    channels = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    row, position, first, end = _begin(sources, offsets, grant, TOKENS_PER_ROW)
    closed = _closed(certain, grant, position, first, end, BLOCK, HAS_CERTAIN)
    tokens = (tl.maximum(closed, first) + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    is_kept, is_key = tokens < end, channels < KEY_SIZE
    k = tl.load(x + tokens * X_SIZE + K_COLUMN + channels, mask=is_kept & is_key, other=0.0).to(tl.float32)
    is_decay = (channels >= KEY_SIZE) & (channels < KEY_SIZE + NUM_DECAYS)
    of_gates = NUM_GATES - NUM_DECAYS + channels - KEY_SIZE
    decays = tl.load(gates + tokens * NUM_GATES + of_gates, mask=is_kept & is_decay, other=0.0)
    at = opened + (row * RING + (position + tokens - first) % RING) * ROW_SIZE + channels
    tl.store(at, tl.where(is_key, k, decays), mask=is_kept & (is_key | is_decay))
