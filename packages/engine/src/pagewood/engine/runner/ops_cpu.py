"""The arithmetic of a decoder on a CPU, in float32: compiled loops, one pool of threads.

Legend: T tokens, E hidden_size, V vocab_size, P panels of a projection.
"""

# pyright: basic
# torch's conversions from and to numpy have no types.

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pagewood.engine.models.decoder import Embedding, HeadParts, HeadSplit, Linear
from pagewood.engine.runner.compiled import matmul, rows

Float32 = NDArray[np.float32]

_EMPTY: Float32 = np.empty(0, np.float32)
_PARALLEL_ROWS = 128  # rows below which sharing a loop over rows costs more than it saves
_PARALLEL_PRODUCTS = 1 << 18  # multiplications below which sharing a matrix product does


class PanelLinear:
    """A projection, its weights in the panels of `compiled.matmul`.

    Invariant: a row of the result depends on the same row of the input only, to the last bit, however many rows there
    are and however many threads share the work.
    """

    __slots__ = ("_bias", "_num_threads", "_panels", "_size")

    def __init__(self, weight: Tensor, bias: Tensor | None, *, num_threads: int) -> None:
        """Lay out `weight` `[out, in]` anew, and pad it and `bias` `[out]` with zeros to whole panels."""
        self._size = len(weight)
        padding = -self._size % matmul.WIDTH
        padded = functional.pad(weight, (0, 0, 0, padding)).view(-1, matmul.WIDTH, weight.shape[1])
        self._panels: Float32 = padded.transpose(1, 2).contiguous().numpy()  # [P, in, 32]
        self._bias: Float32 = np.zeros(self._size + padding, np.float32)
        if bias is not None:
            self._bias[: self._size] = bias.numpy()
        self._num_threads = num_threads

    def __call__(self, x: Tensor) -> Tensor:
        """Return `[T, out]` of `[T, in]`."""
        out, source = torch.empty(len(x), self._size), x.numpy()
        packed = source.reshape(-1) if len(x) == 1 else np.empty(x.numel(), np.float32)
        if self._num_threads == 1 or self._panels.size * len(x) < _PARALLEL_PRODUCTS:
            matmul.multiply(source, self._panels, self._bias, out.numpy(), packed)
        else:
            matmul.multiply_parallel(source, self._panels, self._bias, out.numpy(), packed, self._num_threads)
        return out

    def weights_of(self, outputs: Tensor) -> Tensor:
        """Return the weights `[T, in]` of some outputs `[T]`."""
        panels, places = np.divmod(outputs.numpy(), matmul.WIDTH)
        return torch.from_numpy(self._panels[panels, :, places])


class TableEmbedding:
    """An embedding table of its own, `[V, E]`."""

    __slots__ = ("_table",)

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return `[T, E]`. Raises IndexError for a token that is not in the vocabulary."""
        return self._table.index_select(0, tokens)


class TiedEmbedding:
    """The weights of a projection as an embedding table, so that there is one copy of both."""

    __slots__ = ("_projection", "_vocab_size")

    def __init__(self, projection: PanelLinear, vocab_size: int) -> None:
        self._projection = projection
        self._vocab_size = vocab_size

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return `[T, E]`. Raises IndexError for a token that is not in the vocabulary."""
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < self._vocab_size:
            raise IndexError(f"tokens must be in [0, {self._vocab_size}), got {tokens.tolist()}")
        return self._projection.weights_of(tokens)


class CPUOps:
    """`models.decoder.Ops` in float32. Invariant: only `residual` arguments are written."""

    __slots__ = ("_num_threads",)

    def __init__(self, *, num_threads: int) -> None:
        self._num_threads = num_threads

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Lay out `weight` `[out, in]` in panels; the caller drops its own reference, so that one copy is left."""
        return PanelLinear(weight, bias, num_threads=self._num_threads)

    def embedding(self, table: Tensor) -> Embedding:
        """Keep `table` `[V, E]`."""
        return TableEmbedding(table)

    def tied_embedding(self, table: Tensor) -> tuple[Embedding, Linear]:
        """Lay out `table` `[V, E]` in panels, which serve both."""
        projection = PanelLinear(table, None, num_threads=self._num_threads)
        return TiedEmbedding(projection, len(table)), projection

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
