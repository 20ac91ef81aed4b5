"""The arithmetic of a decoder on a CPU: oneDNN's packed matrix products, and compiled loops between them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pagewood.engine.models.decoder import HeadParts, HeadSplit, Linear
from pagewood.engine.runner.compiled import rows

_EMPTY: NDArray[np.float32] = np.empty(0, np.float32)
_PARALLEL_ROWS = 128  # rows below which waking the other threads costs more than they save


class PlainLinear:
    """A projection by weights that stay as they are, `[out, in]`."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return `[T, out]` of `[T, in]`."""
        return functional.linear(x, self._weight, self._bias)


class PackedLinear:
    """A projection by weights in oneDNN's blocked form, three to six times as fast as the plain form for few rows.

    Invariant: a row of the result depends on the same row of the input only, to the last bit, however many rows there
    are (tested, not promised by oneDNN).
    """

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return `[T, out]` of `[T, in]`."""
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")


class CPUOps:
    """`models.decoder.Ops` in float32. Invariant: only `residual` arguments are written."""

    __slots__ = ("_num_threads",)

    def __init__(self, *, num_threads: int) -> None:
        self._num_threads = num_threads

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Pack `weight` `[out, in]`; the caller drops its own reference, so that one copy is left."""
        if torch.backends.mkldnn.is_available():
            return PackedLinear(weight, bias)
        return PlainLinear(weight, bias)

    def tied_linear(self, table: Tensor) -> Linear:
        """Project onto the rows of `table` without a second copy of it."""
        return PlainLinear(table, None)

    def embed(self, table: Tensor, tokens: Tensor) -> Tensor:
        """Return the rows `[T, E]` of `table` `[V, E]`."""
        return table.index_select(0, tokens)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Return the norm of `x` `[T, E]`."""
        out = torch.empty_like(x)
        if len(x) < _PARALLEL_ROWS:
            rows.norm(x.numpy(), weight.numpy(), epsilon, out.numpy())
        else:
            rows.norm_parallel(x.numpy(), weight.numpy(), epsilon, out.numpy(), self._num_threads)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Add `x` to `residual` and return the norm of the sum."""
        out = torch.empty_like(x)
        arrays = (x.numpy(), residual.numpy(), weight.numpy(), epsilon, out.numpy())
        if len(x) < _PARALLEL_ROWS:
            rows.add_norm(*arrays)
        else:
            rows.add_norm_parallel(*arrays, self._num_threads)
        return out

    def split_heads(self, qkv: Tensor, rotation: tuple[Tensor, Tensor], split: HeadSplit) -> HeadParts:
        """Return rotated q and k, and v."""
        q = torch.empty(len(qkv), split.q_size)
        k, v = torch.empty(len(qkv), split.kv_size), torch.empty(len(qkv), split.kv_size)
        arrays = (
            *(qkv.numpy(), rotation[0].numpy(), rotation[1].numpy()),
            *(_EMPTY if norm is None else norm.numpy() for norm in (split.q_norm, split.k_norm)),
            *(split.epsilon, q.numpy(), k.numpy(), v.numpy()),
        )
        if len(qkv) < _PARALLEL_ROWS:
            rows.split_heads(*arrays)
        else:
            rows.split_heads_parallel(*arrays, self._num_threads)
        return q, k, v

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu of the first half times the second half."""
        out = torch.empty(len(gate_up), gate_up.shape[1] // 2)
        if len(gate_up) < _PARALLEL_ROWS:
            rows.silu_mul(gate_up.numpy(), out.numpy())
        else:
            rows.silu_mul_parallel(gate_up.numpy(), out.numpy(), self._num_threads)
        return out
