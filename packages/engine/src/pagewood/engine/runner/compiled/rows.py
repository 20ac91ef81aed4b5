"""What happens to a token between two projections: norms, the split into rotated heads, the gate.

Legend: T tokens, E elements of a row, H query heads, G key heads, D head_dim, I intermediate_size.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from pagewood.engine.runner.compiled.kernel import inlined, kernel
from pagewood.engine.runner.compiled.numeric import exp

_F = np.float32
_U = np.uint64  # an index that is never negative: numba then leaves out the test for one


@inlined
def _norm_range(x: Any, weight: Any, epsilon: Any, out: Any, first: Any, last: Any) -> None:
    size = _U(x.shape[1])
    for row in range(_U(first), _U(last)):
        total = _F(0.0)
        for i in range(size):
            total += x[row, i] * x[row, i]
        scale = _F(1.0) / np.sqrt(total / _F(size) + _F(epsilon))
        for i in range(size):
            out[row, i] = x[row, i] * scale * weight[i]


@inlined
def _add_norm_range(x: Any, residual: Any, weight: Any, epsilon: Any, out: Any, first: Any, last: Any) -> None:
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
def _silu_mul_range(gate_up: Any, out: Any, first: Any, last: Any) -> None:
    size = _U(out.shape[1])
    for row in range(_U(first), _U(last)):
        for i in range(size):
            gate = gate_up[row, i]
            out[row, i] = gate / (_F(1.0) + exp(-gate)) * gate_up[row, size + i]


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
def _split_range(
    qkv: Any, cosines: Any, sines: Any, q_norm: Any, k_norm: Any, epsilon: Any,
    q: Any, k: Any, v: Any, first: Any, last: Any,
) -> None:  # fmt: skip
    dim = _U(2) * _U(cosines.shape[1])
    q_size, k_size = _U(q.shape[1]), _U(k.shape[1])
    for row in range(_U(first), _U(last)):
        for head in range(q_size // dim):
            _rotate_head(qkv, row, head * dim, cosines, sines, q_norm, epsilon, q, head * dim)
        for head in range(k_size // dim):
            _rotate_head(qkv, row, q_size + head * dim, cosines, sines, k_norm, epsilon, k, head * dim)
        for i in range(k_size):
            v[row, i] = qkv[row, q_size + k_size + i]


@kernel("void(f4[:,::1], f4[::1], f8, f4[:,::1])")
def norm(x: Any, weight: Any, epsilon: Any, out: Any) -> None:
    """Write the RMS norm of `x` `[T, E]` to `out`."""
    _norm_range(x, weight, epsilon, out, 0, x.shape[0])


@kernel("void(f4[:,::1], f4[::1], f8, f4[:,::1], i8)", parallel=True)
def norm_parallel(x: Any, weight: Any, epsilon: Any, out: Any, num_parts: Any) -> None:
    """As `norm`, in parts of consecutive rows."""
    num_rows = x.shape[0]
    for part in numba.prange(num_parts):
        _norm_range(x, weight, epsilon, out, num_rows * part // num_parts, num_rows * (part + 1) // num_parts)


@kernel("void(f4[:,::1], f4[:,::1], f4[::1], f8, f4[:,::1])")
def add_norm(x: Any, residual: Any, weight: Any, epsilon: Any, out: Any) -> None:
    """Add `x` `[T, E]` to `residual` and write the RMS norm of the sum to `out`."""
    _add_norm_range(x, residual, weight, epsilon, out, 0, x.shape[0])


@kernel("void(f4[:,::1], f4[:,::1], f4[::1], f8, f4[:,::1], i8)", parallel=True)
def add_norm_parallel(x: Any, residual: Any, weight: Any, epsilon: Any, out: Any, num_parts: Any) -> None:
    """As `add_norm`, in parts of consecutive rows."""
    num_rows = x.shape[0]
    for part in numba.prange(num_parts):
        first, last = num_rows * part // num_parts, num_rows * (part + 1) // num_parts
        _add_norm_range(x, residual, weight, epsilon, out, first, last)


@kernel("void(f4[:,::1], f4[:,::1])")
def silu_mul(gate_up: Any, out: Any) -> None:
    """Write silu of the first half of each row of `gate_up` `[T, 2I]`, times the second half, to `out` `[T, I]`."""
    _silu_mul_range(gate_up, out, 0, out.shape[0])


@kernel("void(f4[:,::1], f4[:,::1], i8)", parallel=True)
def silu_mul_parallel(gate_up: Any, out: Any, num_parts: Any) -> None:
    """As `silu_mul`, in parts of consecutive rows."""
    num_rows = out.shape[0]
    for part in numba.prange(num_parts):
        _silu_mul_range(gate_up, out, num_rows * part // num_parts, num_rows * (part + 1) // num_parts)


_SPLIT = "f4[:,::1], f4[:,::1], f4[:,::1], f4[::1], f4[::1], f8, f4[:,::1], f4[:,::1], f4[:,::1]"


@kernel(f"void({_SPLIT})")
def split_heads(
    qkv: Any, cosines: Any, sines: Any, q_norm: Any, k_norm: Any, epsilon: Any, q: Any, k: Any, v: Any
) -> None:
    """Split `qkv` `[T, (H + 2G) D]` into `q`, `k` and `v`, with q and k rotated, and before that normalised.

    Args:
        qkv: all query heads, then all key heads, then all value heads.
        cosines: `[T, D / 2]`.
        sines: `[T, D / 2]`.
        q_norm: `[D]`, or empty: no norm.
        k_norm: like `q_norm`.
        epsilon: of the norms.
        q: `[T, H D]`, written.
        k: `[T, G D]`, written.
        v: `[T, G D]`, written.
    """
    _split_range(qkv, cosines, sines, q_norm, k_norm, epsilon, q, k, v, 0, qkv.shape[0])


@kernel(f"void({_SPLIT}, i8)", parallel=True)
def split_heads_parallel(
    qkv: Any, cosines: Any, sines: Any, q_norm: Any, k_norm: Any, epsilon: Any,
    q: Any, k: Any, v: Any, num_parts: Any,
) -> None:  # fmt: skip
    """As `split_heads`, in parts of consecutive rows."""
    num_rows = qkv.shape[0]
    for part in numba.prange(num_parts):
        first, last = num_rows * part // num_parts, num_rows * (part + 1) // num_parts
        _split_range(qkv, cosines, sines, q_norm, k_norm, epsilon, q, k, v, first, last)
