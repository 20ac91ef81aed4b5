"""Decoders and heads computed with tensors, one sequence at a time, for comparison with `transformers`."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.parts.attention import AttentionConfig
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
    """Attention over the memory of one sequence. Invariant: a later call overwrites the positions it names."""

    def __init__(
        self, *, head_dim: int, begin: int = 0, value_dim: int | None = None, scale: float | None = None
    ) -> None:
        """Attend from position `begin` on.

        Args:
            head_dim: elements of a key, or of a latent.
            begin: first position that is seen.
            value_dim: elements of a latent that are its value; None: there are keys and values of heads.
            scale: multiplies products; None: the usual one.
        """
        self._head_dim = head_dim
        self._begin = begin
        self._value_dim = value_dim
        self._scale = head_dim**-0.5 if scale is None else scale
        self._memory: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by layer and position
        self._positions: list[int] = []

    @classmethod
    def of(cls, config: ModelConfig, *, begin: int = 0) -> SequenceAttention:
        """Return the attention of a model whose layers are alike."""
        mixer = config.paged[0]
        if isinstance(mixer, AttentionConfig):
            return cls(head_dim=mixer.head_dim, begin=begin)
        shape = mixer.shape
        return cls(head_dim=shape.latent_size, begin=begin, value_dim=shape.rank, scale=mixer.scale)

    def at(self, positions: list[int]) -> SequenceAttention:
        """Return this object for a step of tokens at `positions`."""
        self._positions = positions
        return self

    def run(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: int,
        sinks: Tensor | None = None,
        biases: Tensor | None = None,
    ) -> Tensor:
        """Store `k` and `v`, and return the attention of each token to the positions up to its own."""
        assert sinks is None
        assert biases is None
        assert k is not None
        v = k if v is None else v
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
        v = v[..., : self._value_dim]
        heads = q.view(-1, self._head_dim)
        group = len(heads) // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        weights = (torch.einsum("hd,khd->hk", heads, k) * self._scale).softmax(-1)
        return torch.einsum("hk,khd->hd", weights, v).flatten()
