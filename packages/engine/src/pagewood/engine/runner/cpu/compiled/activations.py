"""Functions of single elements, in their place: the activations of feed-forwards without a gate, and the soft cap.

Each is an instruction; a call computes rows [first, last) of `x` `[T, size]`.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from typing import Any

import numpy as np

from pagewood.engine.runner.cpu.compiled.instruction import First, Last, Real, blocks_of_rows, instruction
from pagewood.engine.runner.cpu.compiled.machine.kernel import exact, inlined
from pagewood.engine.runner.cpu.compiled.machine.memory import floats
from pagewood.engine.runner.cpu.compiled.machine.numeric import exp, logistic

_F = np.float32
_U = np.uint64  # type of indices: numba does not test an unsigned index for negative values
_ROOT = _F(0.5**0.5)
_TWICE_ROOT = _F(2 * (2 / np.pi) ** 0.5)
_CUBIC = _F(0.044715)
_QUICK = _F(1.702)


@exact
def _below(x: Any) -> Any:
    """Return the share of a normal distribution below `x`, to 1e-7, and in its tails to a relative error like that.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
    """
    z = abs(x) * _ROOT
    t = _F(1.0) / (_F(1.0) + _F(0.3275911) * z)
    p = _F(1.061405429)
    p = p * t + _F(-1.453152027)
    p = p * t + _F(1.421413741)
    p = p * t + _F(-0.284496736)
    p = p * t + _F(0.254829592)
    tail = _F(0.5) * p * t * exp(-z * z)
    return tail if x < _F(0.0) else _F(1.0) - tail


@instruction(blocks_of_rows)
@inlined
def gelu(x_at: Any, size: Any, first: First, last: Last) -> None:
    """Replace elements by their gelu."""
    x = floats(x_at, 0, size)
    for row in range(_U(first), _U(last)):
        for i in range(_U(size)):
            x[row, i] = x[row, i] * _below(x[row, i])


@instruction(blocks_of_rows)
@inlined
def gelu_mul(gate_up_at: Any, out_at: Any, size: Any, first: First, last: Last) -> None:
    """Write gelu of the first half of `gate_up` `[T, 2 size]`, times the second half, to `out`."""
    gate_up, out = floats(gate_up_at, 0, 2 * size), floats(out_at, 0, size)
    size = _U(size)
    for row in range(_U(first), _U(last)):
        for i in range(size):
            gate = gate_up[row, i]
            out[row, i] = gate * _below(gate) * gate_up[row, size + i]


@instruction(blocks_of_rows)
@inlined
def gelu_tanh(x_at: Any, size: Any, first: First, last: Last) -> None:
    """Replace elements by their gelu with a hyperbolic tangent; see `rows.gelu_mul`."""
    x = floats(x_at, 0, size)
    for row in range(_U(first), _U(last)):
        for i in range(_U(size)):
            value = x[row, i]
            inner = _TWICE_ROOT * (value + _CUBIC * value * value * value)
            x[row, i] = value / (_F(1.0) + exp(-inner))


@instruction(blocks_of_rows)
@inlined
def gelu_quick(x_at: Any, size: Any, first: First, last: Last) -> None:
    """Multiply elements by the logistic function of 1.702 times their value."""
    x = floats(x_at, 0, size)
    for row in range(_U(first), _U(last)):
        for i in range(_U(size)):
            x[row, i] = x[row, i] / (_F(1.0) + exp(-_QUICK * x[row, i]))


@instruction(blocks_of_rows)
@inlined
def relu_squared(x_at: Any, size: Any, first: First, last: Last) -> None:
    """Square positive elements, and set the others to zero."""
    x = floats(x_at, 0, size)
    for row in range(_U(first), _U(last)):
        for i in range(_U(size)):
            value = x[row, i]
            x[row, i] = value * value if value > _F(0.0) else _F(0.0) * value


@instruction(blocks_of_rows)
@inlined
def xielu(
    x_at: Any, size: Any, positive: Real, negative: Real, beta: Real, epsilon: Real, first: First, last: Last
) -> None:
    """Replace elements by their `models.ops.XIELU`."""
    x = floats(x_at, 0, size)
    p, n, b, e = _F(positive), _F(negative), _F(beta), _F(epsilon)
    for row in range(_U(first), _U(last)):
        for i in range(_U(size)):
            value = x[row, i]
            bent = p * value * value if value > _F(0.0) else (exp(min(value, e)) - _F(1.0) - value) * n
            x[row, i] = bent + b * value


@instruction(blocks_of_rows)
@inlined
def soft_cap(x_at: Any, size: Any, cap: Real, first: First, last: Last) -> None:
    """Replace elements x by c tanh(x / c), where c is `cap`."""
    x = floats(x_at, 0, size)
    c, inverse = _F(cap), _F(2.0 / cap)
    for row in range(_U(first), _U(last)):
        for i in range(_U(size)):
            x[row, i] = c - _F(2.0) * c / (_F(1.0) + exp(x[row, i] * inverse))


@instruction(blocks_of_rows)
@inlined
def multiply_gate(
    x_at: Any, y_at: Any, size: Any, y_size: Any, column: Any, is_silu: Any, first: First, last: Last
) -> None:
    """Multiply `x` `[T, size]` by the logistic function of columns of `y` `[T, y_size]`, and if `is_silu` by them."""
    x, y = floats(x_at, 0, size), floats(y_at, 0, y_size)
    column = _U(column)
    for row in range(_U(first), _U(last)):
        if is_silu != 0:
            for i in range(_U(size)):
                x[row, i] *= y[row, column + i] * logistic(y[row, column + i])
        else:
            for i in range(_U(size)):
                x[row, i] *= logistic(y[row, column + i])
