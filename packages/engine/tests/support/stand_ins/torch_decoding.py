"""Decoders and heads computed with tensors, one sequence at a time, for comparison with `transformers`."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagewood.engine.models.rope import PositionTable
from pagewood.engine.runner.cuda.ops import CUDAOps
from stand_ins import flashinfer_torch


def torch_ops() -> CUDAOps:
    """Return the operations of the CUDA runner, with FlashInfer's in plain torch."""
    return CUDAOps(flashinfer_torch)


def rotations_at(ropes: Sequence[PositionTable], positions: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Return the rotations of tokens at `positions` by each rope, in the form of `CUDAOps`."""
    points = torch.arange(max(positions) + 1)
    return [(torch.tensor(positions, dtype=torch.int32), torch.cat(rope(points), dim=-1)) for rope in ropes]


class SequenceAttention:
    """Attention over the keys and values of one sequence. Invariant: a later call overwrites the positions it names."""

    def __init__(self, *, head_dim: int, begin: int = 0) -> None:
        """Attend from position `begin` on."""
        self._head_dim = head_dim
        self._begin = begin
        self._memory: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by layer and position
        self._positions: list[int] = []

    def at(self, positions: list[int]) -> SequenceAttention:
        """Return this object for a step of tokens at `positions`."""
        self._positions = positions
        return self

    def run(self, q: Tensor, k: Tensor, v: Tensor | None, layer: int, sinks: Tensor | None = None) -> Tensor:
        """Store `k` and `v`, and return the attention of each token to the positions up to its own."""
        assert sinks is None
        assert v is not None
        for i, position in enumerate(self._positions):
            self._memory[layer, position] = k[i].clone(), v[i].clone()
        return torch.stack([self._attend(q[i], layer, position) for i, position in enumerate(self._positions)])

    def _attend(self, q: Tensor, layer: int, position: int) -> Tensor:
        kept = [
            self._memory[layer, p]
            for p in range(min(self._begin, position), position + 1)
            if (layer, p) in self._memory
        ]
        k, v = (torch.stack(parts).view(len(kept), -1, self._head_dim) for parts in zip(*kept, strict=True))
        heads = q.view(-1, self._head_dim)
        group = len(heads) // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        weights = (torch.einsum("hd,khd->hk", heads, k) * self._head_dim**-0.5).softmax(-1)
        return torch.einsum("hk,khd->hd", weights, v).flatten()
