"""The layers of a decoder in torch, one after the other, so that a matrix can be exchanged and its inputs be seen.

Legend: B texts, T tokens of a text, E hidden_size, N outputs, K inputs.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from pagewood.engine.models.checkpoint import Checkpoint
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.decoder import HeadSplit, Layer, Ops, read_layer
from pagewood.engine.models.rope import Rope

_TOKENS_AT_ONCE = 2048


class Projection:
    """Several matrices of the same inputs, one below the other. Invariant: `weight` has the rows of all `parts`."""

    __slots__ = ("_bias", "hessian", "parts", "weight")

    def __init__(self, parts: Sequence[tuple[str, int]], weight: Tensor, bias: Tensor | None) -> None:
        self.parts = parts
        """Name and number of rows of each matrix."""
        self.weight = weight
        """[N, K] float32"""  # written by: the caller, who rounds it
        self.hessian: Tensor | None = None  # written by: watch, unwatch
        """[K, K] float32, the sum of x x' over all inputs since `watch`."""
        self._bias = bias

    def watch(self) -> None:
        """Begin to add up inputs."""
        self.hessian = torch.zeros(self.weight.shape[1], self.weight.shape[1])

    def unwatch(self) -> None:
        """Drop the sum."""
        self.hessian = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return `[B, T, N]` of `[B, T, K]`."""
        if self.hessian is not None:
            flat = x.reshape(-1, x.shape[-1])
            self.hessian.addmm_(flat.T, flat)
        return functional.linear(x, self.weight, self._bias)


class _Recorded:
    """`models.decoder.Weights` that remembers of which matrices the last one consists."""

    __slots__ = ("_checkpoint", "parts")

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.parts: Sequence[tuple[str, int]] = ()  # written by: stack

    def stack(self, parts: Sequence[tuple[str, int]], *columns: int) -> Tensor:
        if columns:
            self.parts = parts
        return self._checkpoint.stack(parts, *columns)


class _Projections:
    """The part of `Ops` that takes over the matrices of a layer."""

    __slots__ = ("_weights",)

    def __init__(self, weights: _Recorded) -> None:
        self._weights = weights

    def linear(self, weight: Tensor, bias: Tensor | None) -> Projection:
        return Projection(self._weights.parts, weight, bias)


def read_layers(config: ModelConfig, checkpoint: Checkpoint) -> Iterator[Layer[Tensor]]:
    """Yield the layers of a checkpoint that converts to float32; each is read when it is asked for."""
    weights = _Recorded(checkpoint)
    ops = cast("Ops[Tensor]", _Projections(weights))
    for index in range(config.num_layers):
        yield read_layer(config, weights, ops, f"model.layers.{index}")


def projections(layer: Layer[Tensor]) -> list[Projection]:
    """Return the projections of a layer of `read_layers`."""
    return [cast("Projection", one) for one in (layer.qkv, layer.output, layer.gate_up, layer.down)]


@torch.no_grad()
def run_layer(layer: Layer[Tensor], states: Tensor, config: ModelConfig, rope: Rope, *, window: int | None) -> Tensor:
    """Return the residual stream `[B, T, E]` behind a layer, from the one before it.

    Args:
        layer: one of `read_layers`.
        states: `[B, T, E] float32`, of texts that begin at position 0.
        config: of the model.
        rope: of the model.
        window: positions that a token sees, itself included; None: itself and all before it.
    """
    length = states.shape[1]
    cosines, sines = rope(torch.arange(length))
    ages = torch.arange(length)[:, None] - torch.arange(length)
    seen = (ages >= 0) & (ages < (window or length))
    at_once = max(1, _TOKENS_AT_ONCE // length)
    parts: list[Tensor] = []
    for residual in states.split(at_once):
        x = layer.qkv(_norm(residual, layer.input_norm, config))
        q, k, v = _heads(x, layer.split, config, cosines, sines)
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        residual = residual + layer.output(attended.transpose(1, 2).flatten(2))
        gate, up = layer.gate_up(_norm(residual, layer.mlp_norm, config)).chunk(2, dim=-1)
        parts.append(residual + layer.down(functional.silu(gate) * up))
    return torch.cat(parts)


def _norm(x: Tensor, weight: Tensor, config: ModelConfig) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, config.norm_epsilon)


def _heads(
    qkv: Tensor, split: HeadSplit, config: ModelConfig, cosines: Tensor, sines: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v, each `[B, heads, T, head_dim]`; q and k normed and rotated."""
    sizes = (split.q_size, split.kv_size, split.kv_size)
    q, k, v = (one.unflatten(2, (-1, config.head_dim)).transpose(1, 2) for one in qkv.split(sizes, dim=2))
    if split.q_norm is not None and split.k_norm is not None:
        q, k = _norm(q, split.q_norm, config), _norm(k, split.k_norm, config)

    def rotated(x: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        return torch.cat([low * cosines - high * sines, high * cosines + low * sines], dim=-1)

    return rotated(q), rotated(k), v
