"""The operations between two projections, row by row: norms, the split into rotated heads, the gate.

Legend: T tokens, E elements of a row, H query heads, G key heads, D head_dim, I intermediate_size.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from typing import Any

import numpy as np

from pagewood.engine.runner.cpu.compiled.machine.kernel import inlined
from pagewood.engine.runner.cpu.compiled.machine.memory import vector
from pagewood.engine.runner.cpu.compiled.machine.numeric import exp
from pagewood.engine.runner.cpu.compiled.products.tile import WIDTH

_F = np.float32
_TWICE_ROOT = _F(2 * (2 / np.pi) ** 0.5)
_CUBIC = _F(0.044715)
_U = np.uint64  # type of indices: numba does not test an unsigned index for negative values


@inlined
def take(source: Any, places: Any, out: Any, size: Any, first: Any, last: Any) -> None:
    """Copy rows of `size` elements of the matrix at address `source` to rows [first, last) of the one at `out`."""
    for row in range(first, last):
        start = vector(source + np.int64(places[row]) * size * 4, size)
        to = vector(out + row * size * 4, size)
        for i in range(_U(size)):
            to[i] = start[i]


@inlined
def take_panels(panels: Any, places: Any, out: Any, size: Any, first: Any, last: Any) -> None:
    """Like `take`, from a matrix in panels `[P, size, 32]` at address `panels`."""
    for row in range(first, last):
        panel, column = np.int64(places[row]) // WIDTH, _U(places[row] % WIDTH)
        start = vector(panels + panel * size * WIDTH * 4, size * WIDTH)
        to = vector(out + row * size * 4, size)
        for i in range(_U(size)):
            to[i] = start[i * _U(WIDTH) + column]


@inlined
def put(x: Any, out: Any, column: Any, first: Any, last: Any) -> None:
    """Copy rows [first, last) of `x` to the columns of `out` from `column` on."""
    size, column = _U(x.shape[1]), _U(column)
    for row in range(_U(first), _U(last)):
        for i in range(size):
            out[row, column + i] = x[row, i]


@inlined
def clear_first(x: Any, sines: Any, first: Any, last: Any) -> None:
    """Set those of the rows [first, last) of `x` to zero that are at position 0: the sine of no other one is zero."""
    size = _U(x.shape[1])
    for row in range(_U(first), _U(last)):
        if sines[row, 0] == _F(0.0):
            for i in range(size):
                x[row, i] = _F(0.0)


@inlined
def norm(x: Any, weight: Any, epsilon: Any, out: Any, first: Any, last: Any) -> None:
    """Write the RMS norm of rows [first, last) of `x` `[T, E]`, times `weight` `[E]`, to `out`."""
    size = _U(x.shape[1])
    for row in range(_U(first), _U(last)):
        total = _F(0.0)
        for i in range(size):
            total += x[row, i] * x[row, i]
        scale = _F(1.0) / np.sqrt(total / _F(size) + _F(epsilon))
        for i in range(size):
            out[row, i] = x[row, i] * scale * weight[i]


@inlined
def add_norm(x: Any, residual: Any, weight: Any, epsilon: Any, out: Any, first: Any, last: Any) -> None:
    """Write the sum of `x` and `residual` to `residual`, and its norm to `out`, as `norm` does."""
    size = _U(x.shape[1])
    for row in range(_U(first), _U(last)):
        total = _F(0.0)
        for i in range(size):
            value = residual[row, i] + x[row, i]
            residual[row, i] = value
            total += value * value
        scale = _F(1.0) / np.sqrt(total / _F(size) + _F(epsilon))
        for i in range(size):
            out[row, i] = residual[row, i] * scale * weight[i]


@inlined
def norm_add(x: Any, weight: Any, epsilon: Any, residual: Any, first: Any, last: Any) -> None:
    """Add the norm of rows [first, last) of `x` to `residual`; the norm is that of `norm`."""
    size = _U(x.shape[1])
    for row in range(_U(first), _U(last)):
        total = _F(0.0)
        for i in range(size):
            total += x[row, i] * x[row, i]
        scale = _F(1.0) / np.sqrt(total / _F(size) + _F(epsilon))
        for i in range(size):
            residual[row, i] += x[row, i] * scale * weight[i]


@inlined
def norm_columns(x: Any, weight: Any, epsilon: Any, column: Any, first: Any, last: Any) -> None:
    """Replace as many columns of rows [first, last) of `x` as `weight` has, from `column` on, by their norm."""
    size, column = _U(weight.shape[0]), _U(column)
    for row in range(_U(first), _U(last)):
        total = _F(0.0)
        for i in range(size):
            total += x[row, column + i] * x[row, column + i]
        scale = _F(1.0) / np.sqrt(total / _F(size) + _F(epsilon))
        for i in range(size):
            x[row, column + i] = x[row, column + i] * scale * weight[i]


@inlined
def silu_mul(gate_up: Any, out: Any, first: Any, last: Any) -> None:
    """Write silu of the first half of rows [first, last) of `gate_up` `[T, 2I]`, times the second half, to `out`."""
    size = _U(out.shape[1])
    for row in range(_U(first), _U(last)):
        for i in range(size):
            gate = gate_up[row, i]
            out[row, i] = gate / (_F(1.0) + exp(-gate)) * gate_up[row, size + i]


@inlined
def gelu_mul(gate_up: Any, out: Any, first: Any, last: Any) -> None:
    """Like `silu_mul` with gelu, whose error function is approximated by a hyperbolic tangent.

    0.5 (1 + tanh(x)) is the logistic function of 2x.
    """
    size = _U(out.shape[1])
    for row in range(_U(first), _U(last)):
        for i in range(size):
            gate = gate_up[row, i]
            inner = _TWICE_ROOT * (gate + _CUBIC * gate * gate * gate)
            out[row, i] = gate / (_F(1.0) + exp(-inner)) * gate_up[row, size + i]


@inlined
def scale(x: Any, factor: Any, first: Any, last: Any) -> None:
    """Multiply rows [first, last) of `x` by `factor`."""
    for row in range(_U(first), _U(last)):
        for i in range(_U(x.shape[1])):
            x[row, i] *= _F(factor)


@inlined
def columns(x: Any, out: Any, column: Any, first: Any, last: Any) -> None:
    """Copy as many columns of rows [first, last) of `x` as `out` has, from `column` on; the reverse of `put`."""
    column = _U(column)
    for row in range(_U(first), _U(last)):
        for i in range(_U(out.shape[1])):
            out[row, i] = x[row, column + i]


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
            a *= scale * norm[i]
            b *= scale * norm[half + i]
        out[row, to + i] = a * cosines[row, i] - b * sines[row, i]
        out[row, to + half + i] = b * cosines[row, i] + a * sines[row, i]


@inlined
def split_heads(
    qkv: Any, cosines: Any, sines: Any, q_norm: Any, k_norm: Any, epsilon: Any,
    q: Any, k: Any, v: Any, first: Any, last: Any,
) -> None:  # fmt: skip
    """Split rows [first, last) into `q`, `k` and `v`; q and k are normalised, then rotated.

    Args:
        qkv: `[T, (H + 2G) D]`, all query heads, then all key heads, then all value heads.
        cosines: `[T, D / 2]`.
        sines: `[T, D / 2]`.
        q_norm: `[D]`, or empty for no norm.
        k_norm: like `q_norm`.
        epsilon: of the norms.
        q: `[T, H D]`, written.
        k: `[T, G D]`, written.
        v: `[T, G D]`, written.
        first: the first row.
        last: the row after the last.
    """
    dim = _U(2) * _U(cosines.shape[1])
    q_size, k_size = _U(q.shape[1]), _U(k.shape[1])
    for row in range(_U(first), _U(last)):
        for head in range(q_size // dim):
            _rotate_head(qkv, row, head * dim, cosines, sines, q_norm, epsilon, q, head * dim)
        for head in range(k_size // dim):
            _rotate_head(qkv, row, q_size + head * dim, cosines, sines, k_norm, epsilon, k, head * dim)
        for i in range(k_size):
            v[row, i] = qkv[row, q_size + k_size + i]
