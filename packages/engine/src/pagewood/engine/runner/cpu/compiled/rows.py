"""The operations between two projections, row by row: copies, norms, gates, the split into rotated heads.

Each but the last is an instruction; a call computes rows [first, last).

Legend: T tokens, H query heads, G key heads, D head_dim.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from typing import Any

import numpy as np

from pagewood.engine.runner.cpu.compiled.instruction import First, Last, Real, blocks_of_rows, instruction
from pagewood.engine.runner.cpu.compiled.machine.kernel import exact, inlined
from pagewood.engine.runner.cpu.compiled.machine.memory import floats, integers, vector
from pagewood.engine.runner.cpu.compiled.machine.numeric import exp
from pagewood.engine.runner.cpu.compiled.products.tile import WIDTH

_F = np.float32
_TWICE_ROOT = _F(2 * (2 / np.pi) ** 0.5)
_CUBIC = _F(0.044715)
_U = np.uint64  # type of indices: numba does not test an unsigned index for negative values


@exact
def _product(x: Any, y: Any, z: Any) -> Any:
    """Return (x y) z in this order, so that a row's bits depend neither on where it lies nor on the code around it."""
    return x * y * z


@exact
def _inverse_root(total: Any, size: Any, epsilon: Any) -> Any:
    """Return one over the root of the mean of `size` squares with this sum."""
    return _F(1.0) / np.sqrt(total * (_F(1.0) / _F(size)) + _F(epsilon))


@inlined
def _copy_row(source_at: Any, place: Any, out_at: Any, row: Any, size: Any) -> None:
    source, out = vector(source_at + np.int64(place) * size * 4, size), vector(out_at + row * size * 4, size)
    for i in range(_U(size)):
        out[i] = source[i]


@instruction(blocks_of_rows)
@inlined
def take(x_at: Any, places_at: Any, out_at: Any, size: Any, first: First, last: Last) -> None:
    """Copy rows of `x` `[_, size]`, of four-byte elements, at `places` `[T] int32` to `out` `[T, size]`."""
    places = integers(places_at, 0)
    for row in range(first, last):
        _copy_row(x_at, places[row], out_at, row, size)


@instruction(blocks_of_rows)
@inlined
def gather(tokens_at: Any, table_at: Any, out_at: Any, size: Any, first: First, last: Last) -> None:
    """Copy the rows of `tokens` `[T] int32` in `table` `[V, size]` to `out` `[T, size]`."""
    tokens = integers(tokens_at, 0)
    for row in range(first, last):
        _copy_row(table_at, tokens[row], out_at, row, size)


@instruction(blocks_of_rows)
@inlined
def gather_panels(tokens_at: Any, panels_at: Any, out_at: Any, size: Any, first: First, last: Last) -> None:
    """Like `gather`, from a matrix in panels `[P, size, 32]`."""
    tokens = integers(tokens_at, 0)
    for row in range(first, last):
        panel, column = np.int64(tokens[row]) // WIDTH, _U(tokens[row] % WIDTH)
        start = vector(panels_at + panel * size * WIDTH * 4, size * WIDTH)
        to = vector(out_at + row * size * 4, size)
        for i in range(_U(size)):
            to[i] = start[i * _U(WIDTH) + column]


@instruction(blocks_of_rows)
@inlined
def put(x_at: Any, out_at: Any, size: Any, out_size: Any, column: Any, first: First, last: Last) -> None:
    """Copy `x` `[T, size]` to the columns of `out` `[T, out_size]` from `column` on."""
    x, out = floats(x_at, 0, size), floats(out_at, 0, out_size)
    size, column = _U(size), _U(column)
    for row in range(_U(first), _U(last)):
        for i in range(size):
            out[row, column + i] = x[row, i]


@instruction(blocks_of_rows)
@inlined
def columns(x_at: Any, out_at: Any, size: Any, out_size: Any, column: Any, first: First, last: Last) -> None:
    """Copy the columns of `x` `[T, size]` from `column` on to `out` `[T, out_size]`; the reverse of `put`."""
    x, out = floats(x_at, 0, size), floats(out_at, 0, out_size)
    column = _U(column)
    for row in range(_U(first), _U(last)):
        for i in range(_U(out_size)):
            out[row, i] = x[row, column + i]


@instruction(blocks_of_rows)
@inlined
def clear_first(x_at: Any, sines_at: Any, size: Any, num_sines: Any, first: First, last: Last) -> None:
    """Set the rows of `x` `[T, size]` to zero that are at position 0: the sine of no other one is zero."""
    x, sines = floats(x_at, 0, size), floats(sines_at, 0, num_sines)
    for row in range(_U(first), _U(last)):
        if sines[row, 0] == _F(0.0):
            for i in range(_U(size)):
                x[row, i] = _F(0.0)


@instruction(blocks_of_rows)
@inlined
def norm(x_at: Any, weight_at: Any, out_at: Any, size: Any, epsilon: Real, first: First, last: Last) -> None:
    """Write the RMS norm of `x` `[T, size]`, times `weight` `[size]`, to `out`."""
    x, weight, out = floats(x_at, 0, size), vector(weight_at, size), floats(out_at, 0, size)
    size = _U(size)
    for row in range(_U(first), _U(last)):
        total = _F(0.0)
        for i in range(size):
            total += x[row, i] * x[row, i]
        scale = _inverse_root(total, size, epsilon)
        for i in range(size):
            out[row, i] = _product(x[row, i], weight[i], scale)


@instruction(blocks_of_rows)
@inlined
def add_norm(
    x_at: Any, residual_at: Any, weight_at: Any, out_at: Any, size: Any, epsilon: Real, first: First, last: Last
) -> None:
    """Write the sum of `x` and `residual` to `residual`, and its norm to `out`, as `norm` does."""
    x, residual, weight = floats(x_at, 0, size), floats(residual_at, 0, size), vector(weight_at, size)
    out, size = floats(out_at, 0, size), _U(size)
    for row in range(_U(first), _U(last)):
        total = _F(0.0)
        for i in range(size):
            value = residual[row, i] + x[row, i]
            residual[row, i] = value
            total += value * value
        scale = _inverse_root(total, size, epsilon)
        for i in range(size):
            out[row, i] = _product(residual[row, i], weight[i], scale)


@instruction(blocks_of_rows)
@inlined
def norm_add(x_at: Any, weight_at: Any, residual_at: Any, size: Any, epsilon: Real, first: First, last: Last) -> None:
    """Add the norm of `x` `[T, size]` to `residual`; the norm is that of `norm`."""
    x, weight, residual = floats(x_at, 0, size), vector(weight_at, size), floats(residual_at, 0, size)
    size = _U(size)
    for row in range(_U(first), _U(last)):
        total = _F(0.0)
        for i in range(size):
            total += x[row, i] * x[row, i]
        scale = _inverse_root(total, size, epsilon)
        for i in range(size):
            residual[row, i] += _product(x[row, i], weight[i], scale)


@exact
def _centred(x: Any, mean: Any, scale: Any, weight: Any, bias: Any) -> Any:
    """Return (x - mean) scale weight + bias in this order, see `_product`."""
    return (x - mean) * scale * weight + bias


@instruction(blocks_of_rows)
@inlined
def layer_norm(
    added_at: Any, x_at: Any, weight_at: Any, bias_at: Any, out_at: Any, size: Any, epsilon: Real,
    first: First, last: Last,
) -> None:  # fmt: skip
    """Write the norm of `x` `[T, size]` around its mean to `out`; if there is `added`, it is added to `x` first."""
    x, weight, bias = floats(x_at, 0, size), vector(weight_at, size), vector(bias_at, size)
    out, added, size = floats(out_at, 0, size), floats(added_at, 0, size), _U(size)
    for row in range(_U(first), _U(last)):
        if added_at != 0:
            for i in range(size):
                x[row, i] += added[row, i]
        total, squares = _F(0.0), _F(0.0)
        for i in range(size):
            total += x[row, i]
        mean = total / _F(size)
        for i in range(size):
            distance = x[row, i] - mean
            squares += distance * distance
        scale = _inverse_root(squares, size, epsilon)
        for i in range(size):
            out[row, i] = _centred(x[row, i], mean, scale, weight[i], bias[i])


@instruction(blocks_of_rows)
@inlined
def add(x_at: Any, residual_at: Any, size: Any, first: First, last: Last) -> None:
    """Add `x` `[T, size]` to `residual`."""
    x, residual = floats(x_at, 0, size), floats(residual_at, 0, size)
    for row in range(_U(first), _U(last)):
        for i in range(_U(size)):
            residual[row, i] += x[row, i]


@instruction(blocks_of_rows)
@inlined
def norm_columns(
    x_at: Any, weight_at: Any, x_size: Any, column: Any, size: Any, epsilon: Real, first: First, last: Last
) -> None:
    """Replace `size` columns of `x` `[T, x_size]` from `column` on by their norm, with `weight` `[size]`."""
    x, weight = floats(x_at, 0, x_size), vector(weight_at, size)
    size, column = _U(size), _U(column)
    for row in range(_U(first), _U(last)):
        total = _F(0.0)
        for i in range(size):
            total += x[row, column + i] * x[row, column + i]
        scale = _inverse_root(total, size, epsilon)
        for i in range(size):
            x[row, column + i] = _product(x[row, column + i], weight[i], scale)


@instruction(blocks_of_rows)
@inlined
def sum_squares(
    x_at: Any, out_at: Any, x_size: Any, column: Any, size: Any, out_size: Any, place: Any, first: First, last: Last
) -> None:
    """Write the sum of the squares of columns of `x`, as in `norm_columns`, to column `place` of `[T, out_size]`."""
    x, out = floats(x_at, 0, x_size), floats(out_at, 0, out_size)
    size, column = _U(size), _U(column)
    for row in range(_U(first), _U(last)):
        total = _F(0.0)
        for i in range(size):
            total += x[row, column + i] * x[row, column + i]
        out[row, place] = total


@instruction(blocks_of_rows)
@inlined
def norm_columns_by(
    x_at: Any, weight_at: Any, sums_at: Any, x_size: Any, column: Any, size: Any, sums_size: Any, place: Any,
    num_squares: Any, epsilon: Real, first: First, last: Last,
) -> None:  # fmt: skip
    """Like `norm_columns`, with the sums of `num_squares` squares in column `place` of `sums` `[T, sums_size]`."""
    x, weight, sums = floats(x_at, 0, x_size), vector(weight_at, size), floats(sums_at, 0, sums_size)
    size, column = _U(size), _U(column)
    for row in range(_U(first), _U(last)):
        scale = _inverse_root(sums[row, place], num_squares, epsilon)
        for i in range(size):
            x[row, column + i] = _product(x[row, column + i], weight[i], scale)


@instruction(blocks_of_rows)
@inlined
def norm_heads(
    x_at: Any, weight_at: Any, x_size: Any, column: Any, size: Any, dim: Any, epsilon: Real, first: First, last: Last
) -> None:
    """Like `norm_columns`, for every `dim` of the `size` columns on their own, with `weight` `[dim]`."""
    x, weight = floats(x_at, 0, x_size), vector(weight_at, dim)
    dim, column = _U(dim), _U(column)
    for row in range(_U(first), _U(last)):
        for head in range(_U(size) // dim):
            start = column + head * dim
            total = _F(0.0)
            for i in range(dim):
                total += x[row, start + i] * x[row, start + i]
            scale = _inverse_root(total, dim, epsilon)
            for i in range(dim):
                x[row, start + i] = _product(x[row, start + i], weight[i], scale)


@instruction(blocks_of_rows)
@inlined
def split(
    qkv_at: Any, q_at: Any, k_at: Any, v_at: Any, q_size: Any, k_size: Any, v_column: Any, size: Any, first: First,
    last: Last,
) -> None:  # fmt: skip
    """Copy the columns of `qkv` `[T, size]` to `q` `[T, q_size]`, `k` and `v` `[T, k_size]`; see `split_heads`."""
    qkv = floats(qkv_at, 0, size)
    q, k, v = floats(q_at, 0, q_size), floats(k_at, 0, k_size), floats(v_at, 0, k_size)
    q_size, k_size, v_column = _U(q_size), _U(k_size), _U(v_column)
    for row in range(_U(first), _U(last)):
        for i in range(q_size):
            q[row, i] = qkv[row, i]
        for i in range(k_size):
            k[row, i] = qkv[row, q_size + i]
            v[row, i] = qkv[row, v_column + i]


@instruction(blocks_of_rows)
@inlined
def multiply_columns(x_at: Any, y_at: Any, size: Any, y_size: Any, column: Any, first: First, last: Last) -> None:
    """Multiply `x` `[T, size]` by as many columns of `y` `[T, y_size]` from `column` on."""
    x, y = floats(x_at, 0, size), floats(y_at, 0, y_size)
    column = _U(column)
    for row in range(_U(first), _U(last)):
        for i in range(_U(size)):
            x[row, i] *= y[row, column + i]


@instruction(blocks_of_rows)
@inlined
def scale_rows(x_at: Any, factors_at: Any, size: Any, first: First, last: Last) -> None:
    """Multiply each row of `x` `[T, size]` by its number in `factors` `[T]`."""
    x, factors = floats(x_at, 0, size), floats(factors_at, 0, 1)
    for row in range(_U(first), _U(last)):
        for i in range(_U(size)):
            x[row, i] *= factors[row, 0]


@instruction(blocks_of_rows)
@inlined
def silu_mul(gate_up_at: Any, out_at: Any, size: Any, first: First, last: Last) -> None:
    """Write silu of the first half of `gate_up` `[T, 2 size]`, times the second half, to `out`."""
    gate_up, out = floats(gate_up_at, 0, 2 * size), floats(out_at, 0, size)
    size = _U(size)
    for row in range(_U(first), _U(last)):
        for i in range(size):
            gate = gate_up[row, i]
            out[row, i] = gate / (_F(1.0) + exp(-gate)) * gate_up[row, size + i]


@instruction(blocks_of_rows)
@inlined
def gelu_mul(gate_up_at: Any, out_at: Any, size: Any, first: First, last: Last) -> None:
    """Like `silu_mul` with gelu, whose error function is approximated by a hyperbolic tangent.

    0.5 (1 + tanh(x)) is the logistic function of 2x.
    """
    gate_up, out = floats(gate_up_at, 0, 2 * size), floats(out_at, 0, size)
    size = _U(size)
    for row in range(_U(first), _U(last)):
        for i in range(size):
            gate = gate_up[row, i]
            inner = _TWICE_ROOT * (gate + _CUBIC * gate * gate * gate)
            out[row, i] = gate / (_F(1.0) + exp(-inner)) * gate_up[row, size + i]


@instruction(blocks_of_rows)
@inlined
def scale(x_at: Any, size: Any, factor: Real, first: First, last: Last) -> None:
    """Multiply `x` `[T, size]` by `factor`."""
    x = floats(x_at, 0, size)
    for row in range(_U(first), _U(last)):
        for i in range(_U(size)):
            x[row, i] *= _F(factor)


@inlined
def _rotate_head(
    source: Any, row: Any, start: Any, cosines: Any, sines: Any, norm: Any, epsilon: Any, out: Any, to: Any
) -> None:
    half = _U(cosines.shape[1])
    scale = _F(1.0)
    normed = norm.shape[0] > 0
    if normed:
        total = _F(0.0)
        for i in range(half + half):
            total += source[row, start + i] * source[row, start + i]
        scale = _F(1.0) / np.sqrt(total / _F(half + half) + _F(epsilon))
    for i in range(half):
        a = source[row, start + i]
        b = source[row, start + half + i]
        if normed:
            a = _product(a, scale, norm[i])
            b = _product(b, scale, norm[half + i])
        out[row, to + i] = a * cosines[row, i] - b * sines[row, i]
        out[row, to + half + i] = b * cosines[row, i] + a * sines[row, i]


@inlined
def split_heads(
    qkv: Any, cosines: Any, sines: Any, q_norm: Any, k_norm: Any, epsilon: Any,
    q: Any, k: Any, v: Any, v_column: Any, first: Any, last: Any,
) -> None:  # fmt: skip
    """Split rows [first, last) into `q`, `k` and `v`; q and k are normalised, then rotated.

    Args:
        qkv: `[T, _]`, all query heads, then all key heads, then value heads unless values are keys.
        cosines: `[T, D / 2]`.
        sines: `[T, D / 2]`.
        q_norm: `[D]`, or empty for no norm.
        k_norm: like `q_norm`.
        epsilon: of the norms.
        q: `[T, H D]`, written.
        k: `[T, G D]`, written.
        v: `[T, G D]`, written.
        v_column: the first column of values.
        first: the first row.
        last: the row after the last.
    """
    dim = _U(2) * _U(cosines.shape[1])
    q_size, k_size, v_column = _U(q.shape[1]), _U(k.shape[1]), _U(v_column)
    for row in range(_U(first), _U(last)):
        for head in range(q_size // dim):
            _rotate_head(qkv, row, head * dim, cosines, sines, q_norm, epsilon, q, head * dim)
        for head in range(k_size // dim):
            _rotate_head(qkv, row, q_size + head * dim, cosines, sines, k_norm, epsilon, k, head * dim)
        for i in range(k_size):
            v[row, i] = qkv[row, v_column + i]
