"""The instructions of recurrent layers: convolutions over a few tokens, states of heads, and gates.

A part goes through the tokens of one grant, one after the other, for some of the columns of a state. No sum goes over
columns of different parts. So a token's bits depend on the state before it and on its own numbers, and neither on
chunks nor on parts or threads.

A grant reads the state that stands in one place and leaves it in another one, which may be the same. It may leave
copies behind some of its tokens, for prefixes that the cache keeps. A grant with drafts leaves no state: those that are
accepted are computed again (`program.drafted_runs`).

Legend: T tokens, G grants, C channels of a convolution, W tokens that it reads, H heads of values `[V]`, K elements of
a key.
Source: Yang et al., Gated Delta Networks, 2024; Dao and Gu, Transformers are SSMs, 2024.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from typing import Any

import numpy as np

from pagewood.engine.runner.cpu.compiled.instruction import InScope, Part, Unit, instruction
from pagewood.engine.runner.cpu.compiled.layout import Column
from pagewood.engine.runner.cpu.compiled.machine.kernel import exact, inlined
from pagewood.engine.runner.cpu.compiled.machine.memory import floats, integer_rows, integers, vector
from pagewood.engine.runner.cpu.compiled.machine.numeric import exp, logistic

_F = np.float32
_U = np.uint64  # type of indices: numba does not test an unsigned index for negative values
CHANNELS = 256
"""Channels of a part of a convolution."""
VALUES = 64
"""Elements of a head's values in a part: with 128 keys, their state fits into a first-level cache."""
_LEAST_SQUARES = _F(1e-6)
_LINEAR = _F(20.0)
"""A number from which on its softplus is the number itself."""


@exact
def _softplus(x: Any) -> Any:
    return x if x > _LINEAR else np.log1p(exp(x))


@inlined
def _copy(source_at: Any, out_at: Any, size: Any) -> None:
    """Copy a row of `size` numbers; zeros if there is no source."""
    out = vector(out_at, size)
    if source_at == 0:
        for i in range(_U(size)):
            out[i] = _F(0.0)
        return
    source = vector(source_at, size)
    for i in range(_U(size)):
        out[i] = source[i]


@exact
def _add_product(out: Any, weight: Any, x: Any) -> None:
    for i in range(_U(out.shape[0])):
        out[i] += weight[i] * x[i]


@inlined
def _row_at(token: Any, x_at: Any, x_size: Any, old_at: Any, width: Any, channels: Any) -> Any:
    """Return the address of a channel's row: of a token of the grant, or of one before it (-1 is the last); 0: none."""
    if token >= 0:
        return x_at + 4 * token * x_size
    return 0 if old_at == 0 else old_at + 4 * (width - 1 + token) * channels


@inlined
def _num_channel_blocks(scope: Any, channels: Any) -> Any:
    return scope[Column.NUM_GRANTS] * ((channels + CHANNELS - 1) // CHANNELS)


@instruction(_num_channel_blocks)
@inlined
def convolve(
    scope: InScope, x_at: Any, weight_at: Any, bias_at: Any, tails_at: Any, out_at: Any, x_size: Any, column: Any,
    channels: Any, width: Any, activates: Any, part: Part,
) -> None:  # fmt: skip
    """Convolve columns of `x` `[T, x_size]` from `column` on, and write `out` `[T, C]`.

    Args:
        scope: of the tokens.
        x_at: input.
        weight_at: `[W, C]`, the last row for a token itself.
        bias_at: `[C]`; 0: zeros.
        tails_at: `[places, W - 1, C]`, the states.
        out_at: output.
        x_size: columns of `x`.
        column: first column.
        channels: C.
        width: W.
        activates: 1 if the result is multiplied by its logistic function.
        part: a grant, and a block of channels.
    """
    num_blocks = (channels + CHANNELS - 1) // CHANNELS
    grant, first = part // num_blocks, part % num_blocks * CHANNELS
    size = min(CHANNELS, channels - first)
    offsets = integers(scope[Column.OFFSETS], 0)
    start, count = np.int64(offsets[grant]), np.int64(offsets[grant + 1]) - np.int64(offsets[grant])
    places, saves = integer_rows(scope[Column.STATES], 0, 2), integers(scope[Column.SAVES] + 4 * start, 0)
    state_bytes = 4 * (width - 1) * channels
    old_at = 0 if places[grant, 0] < 0 else tails_at + np.int64(places[grant, 0]) * state_bytes + 4 * first
    own_at = x_at + 4 * (start * x_size + column + first)
    for i in range(count):
        out = vector(out_at + 4 * ((start + i) * channels + first), size)
        _copy(0 if bias_at == 0 else bias_at + 4 * first, out.ctypes.data, size)
        for w in range(width):
            row_at = _row_at(i - (width - 1) + w, own_at, x_size, old_at, width, channels)
            if row_at != 0:
                _add_product(out, vector(weight_at + 4 * (w * channels + first), size), vector(row_at, size))
        if activates != 0:
            for c in range(_U(size)):
                out[c] *= logistic(out[c])
        if saves[i] >= 0:
            _keep_tail(
                i, tails_at + np.int64(saves[i]) * state_bytes + 4 * first, own_at, x_size, old_at, width, channels,
                size,
            )  # fmt: skip
    if places[grant, 1] >= 0:
        new_at = tails_at + np.int64(places[grant, 1]) * state_bytes + 4 * first
        _keep_tail(count - 1, new_at, own_at, x_size, old_at, width, channels, size)


@inlined
def _keep_tail(
    last: Any, new_at: Any, own_at: Any, x_size: Any, old_at: Any, width: Any, channels: Any, size: Any
) -> None:
    """Write the state behind the token `last` of a grant; rows move forward only, so it may be the old one's place."""
    for w in range(width - 1):
        row_at = _row_at(last - (width - 2) + w, own_at, x_size, old_at, width, channels)
        _copy(row_at, new_at + 4 * w * channels, size)


@exact
def _sum_of_squares(x: Any) -> Any:
    """Return the sum in eight chains, so that they do not wait for each other."""
    a, b, c, d = _F(0.0), _F(0.0), _F(0.0), _F(0.0)
    n = x.shape[0]
    for i in range(0, n - 3, 4):
        a += x[i] * x[i]
        b += x[i + 1] * x[i + 1]
        c += x[i + 2] * x[i + 2]
        d += x[i + 3] * x[i + 3]
    for i in range(n - n % 4, n):
        a += x[i] * x[i]
    return (a + b) + (c + d)


@exact
def _decay(state: Any, decay: Any, key: Any, query: Any, out: Any, value: Any, corrects: Any) -> None:
    """Let a row of a state decay; add its answer to a query, and subtract that to a key from the value."""
    if corrects != 0:
        for j in range(_U(out.shape[0])):
            s = state[j] * decay
            state[j] = s
            out[j] += s * query
            value[j] -= s * key
    else:
        for j in range(_U(out.shape[0])):
            s = state[j] * decay
            state[j] = s
            out[j] += s * query


@exact
def _scale(x: Any, factor: Any) -> None:
    for j in range(_U(x.shape[0])):
        x[j] *= factor


@inlined
def _copy_block(source_at: Any, out_at: Any, num_rows: Any, row_size: Any, size: Any) -> None:
    """Copy `size` columns of a matrix; zeros if there is no source."""
    for n in range(num_rows):
        _copy(0 if source_at == 0 else source_at + 4 * n * row_size, out_at + 4 * n * row_size, size)


@inlined
def _begin_state(
    scope: Any, grant: Any, matrices_at: Any, passing_at: Any, state_bytes: Any, own: Any, key_dim: Any, value_dim: Any,
    size: Any,
) -> Any:  # fmt: skip
    """Return where a grant leaves its part of a state, `own` bytes behind its begin; the old state is there then."""
    places = integer_rows(scope[Column.STATES], 0, 2)
    state_at = matrices_at + np.int64(places[grant, 1]) * state_bytes + own
    if places[grant, 1] < 0:
        state_at = passing_at + np.int64(integers(scope[Column.ROWS], 0)[grant]) * state_bytes + own
    if places[grant, 0] != places[grant, 1]:
        old_at = 0 if places[grant, 0] < 0 else matrices_at + np.int64(places[grant, 0]) * state_bytes + own
        _copy_block(old_at, state_at, key_dim, value_dim, size)
    return state_at


@inlined
def _num_state_blocks(scope: Any, num_heads: Any, value_dim: Any) -> Any:
    return scope[Column.NUM_GRANTS] * num_heads * ((value_dim + VALUES - 1) // VALUES)


@instruction(_num_state_blocks)
@inlined
def recur(
    scope: InScope, x_at: Any, gates_at: Any, rates_at: Any, biases_at: Any, skips_at: Any, matrices_at: Any,
    passing_at: Any, out_at: Any, x_size: Any, num_heads: Any, num_key_heads: Any, key_dim: Any, value_dim: Any,
    q_column: Any, k_column: Any, v_column: Any, corrects: Any, part: Part,
) -> None:  # fmt: skip
    """Change the states of heads token by token, and write what they answer; see `models.ops.RecurrentHeads`.

    Args:
        scope: of the tokens.
        x_at: `[T, x_size]`, queries, keys and values; values are overwritten.
        gates_at: `[T, H]`, or `[T, 2 H]` if heads correct.
        rates_at: `[H]`.
        biases_at: `[H]`.
        skips_at: `[H]`; 0: zeros.
        matrices_at: `[places, H, K, V]`, the states.
        passing_at: `[rows, H, K, V]`, written by grants that leave no state; 0: all leave one.
        out_at: `[T, H V]`.
        x_size: columns of `x`.
        num_heads: H.
        num_key_heads: heads of queries and keys.
        key_dim: K.
        value_dim: V.
        q_column: first column of queries.
        k_column: of keys.
        v_column: of values.
        corrects: largest strength of a correction; 0: heads do not correct.
        part: a grant, a head, and a block of its values.
    """
    num_blocks = (value_dim + VALUES - 1) // VALUES
    grant, head, first = part // (num_blocks * num_heads), part // num_blocks % num_heads, part % num_blocks * VALUES
    size, key_head = min(VALUES, value_dim - first), head // (num_heads // num_key_heads)
    offsets = integers(scope[Column.OFFSETS], 0)
    start, count = np.int64(offsets[grant]), np.int64(offsets[grant + 1]) - np.int64(offsets[grant])
    saves, state_bytes = integers(scope[Column.SAVES] + 4 * start, 0), 4 * num_heads * key_dim * value_dim
    own = 4 * (head * key_dim * value_dim + first)
    state_at = _begin_state(scope, grant, matrices_at, passing_at, state_bytes, own, key_dim, value_dim, size)
    num_gates = 2 * num_heads if corrects != 0 else num_heads
    gates = floats(gates_at, 0, num_gates)
    rate, bias = vector(rates_at, num_heads)[head], vector(biases_at, num_heads)[head]
    skip = _F(0.0) if skips_at == 0 else vector(skips_at, num_heads)[head]
    for i in range(count):
        token = start + i
        row_at = x_at + 4 * token * x_size
        q = vector(row_at + 4 * (q_column + key_head * key_dim), key_dim)
        k = vector(row_at + 4 * (k_column + key_head * key_dim), key_dim)
        value = vector(row_at + 4 * (v_column + head * value_dim + first), size)
        out = vector(out_at + 4 * (token * num_heads * value_dim + head * value_dim + first), size)
        step = _softplus(gates[token, num_gates - num_heads + head] + bias)
        decay, strength = exp(rate * step), step
        q_scale, k_scale = _F(1.0), _F(1.0)
        if corrects != 0:
            strength = logistic(gates[token, head]) * _F(corrects)
            k_scale = _F(1.0) / np.sqrt(_sum_of_squares(k) + _LEAST_SQUARES)
            q_scale = _F(1.0) / np.sqrt((_sum_of_squares(q) + _LEAST_SQUARES) * _F(key_dim))
        for j in range(_U(size)):
            out[j] = skip * value[j]
        match = _F(0.0)
        for n in range(key_dim):
            query, key = q[n] * q_scale, k[n] * k_scale
            match += query * key
            _decay(vector(state_at + 4 * n * value_dim, size), decay, key, query, out, value, corrects)
        _scale(value, strength)
        for n in range(key_dim):
            key = k[n] * k_scale
            state = vector(state_at + 4 * n * value_dim, size)
            for j in range(_U(size)):
                state[j] += key * value[j]
        for j in range(_U(size)):
            out[j] += match * value[j]
        if saves[i] >= 0:
            _copy_block(state_at, matrices_at + np.int64(saves[i]) * state_bytes + own, key_dim, value_dim, size)


@exact
def _decays(gates: Any, biases: Any, rate: Any, out: Any) -> None:
    """Write what multiplies each row of a state."""
    for n in range(_U(out.shape[0])):
        out[n] = exp(rate * _softplus(gates[n] + biases[n]))


@instruction(_num_state_blocks)
@inlined
def recur_by_channel(
    scope: InScope, x_at: Any, gates_at: Any, rates_at: Any, biases_at: Any, matrices_at: Any, passing_at: Any,
    out_at: Any, num_heads: Any, key_dim: Any, value_dim: Any, part: Part,
) -> None:  # fmt: skip
    """Like `recur`, for heads that correct, have queries and keys of their own, and a decay for each row of a state.

    Args:
        scope: of the tokens.
        x_at: `[T, H (2 K + V)]`, queries, keys and values of all heads; values are overwritten.
        gates_at: `[T, H + H K]`, of strengths and of decays.
        rates_at: `[H]`.
        biases_at: `[H, K]`.
        matrices_at: `[places, H, K, V]`, the states.
        passing_at: see `recur`.
        out_at: `[T, H V]`.
        num_heads: H.
        key_dim: K.
        value_dim: V.
        part: a grant, a head, and a block of its values.
    """
    num_blocks = (value_dim + VALUES - 1) // VALUES
    grant, head, first = part // (num_blocks * num_heads), part // num_blocks % num_heads, part % num_blocks * VALUES
    size = min(VALUES, value_dim - first)
    offsets = integers(scope[Column.OFFSETS], 0)
    start, count = np.int64(offsets[grant]), np.int64(offsets[grant + 1]) - np.int64(offsets[grant])
    saves, state_bytes = integers(scope[Column.SAVES] + 4 * start, 0), 4 * num_heads * key_dim * value_dim
    own = 4 * (head * key_dim * value_dim + first)
    state_at = _begin_state(scope, grant, matrices_at, passing_at, state_bytes, own, key_dim, value_dim, size)
    rate, biases = vector(rates_at, num_heads)[head], vector(biases_at + 4 * head * key_dim, key_dim)
    decays = np.empty(key_dim, _F)
    for i in range(count):
        token = start + i
        row_at = x_at + 4 * (token * num_heads * (2 * key_dim + value_dim) + head * key_dim)
        q, k = vector(row_at, key_dim), vector(row_at + 4 * num_heads * key_dim, key_dim)
        values_at = row_at + 4 * (2 * num_heads * key_dim + head * (value_dim - key_dim) + first)
        value = vector(values_at, size)
        out = vector(out_at + 4 * (token * num_heads * value_dim + head * value_dim + first), size)
        gates = vector(gates_at + 4 * token * num_heads * (1 + key_dim), num_heads * (1 + key_dim))
        begin = num_heads + head * key_dim
        _decays(gates[begin : begin + key_dim], biases, rate, decays)
        k_scale = _F(1.0) / np.sqrt(_sum_of_squares(k) + _LEAST_SQUARES)
        q_scale = _F(1.0) / np.sqrt((_sum_of_squares(q) + _LEAST_SQUARES) * _F(key_dim))
        for j in range(_U(size)):
            out[j] = _F(0.0)
        match = _F(0.0)
        for n in range(key_dim):
            query, key = q[n] * q_scale, k[n] * k_scale
            match += query * key
            _decay(vector(state_at + 4 * n * value_dim, size), decays[n], key, query, out, value, 1)
        _scale(value, logistic(gates[head]))
        for n in range(key_dim):
            key = k[n] * k_scale
            state = vector(state_at + 4 * n * value_dim, size)
            for j in range(_U(size)):
                state[j] += key * value[j]
        for j in range(_U(size)):
            out[j] += match * value[j]
        if saves[i] >= 0:
            _copy_block(state_at, matrices_at + np.int64(saves[i]) * state_bytes + own, key_dim, value_dim, size)


RECURRENCE = Unit("recurrence", convolve, recur)
"""For models with recurrent layers."""
CHANNEL_RECURRENCE = Unit("channel_recurrence", recur_by_channel)
"""For those whose states decay by channel."""
