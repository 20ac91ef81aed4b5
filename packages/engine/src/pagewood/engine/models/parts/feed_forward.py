"""A gated feed-forward: down(activation(gate(x)) * up(x)).

Source: Shazeer, GLU Variants Improve Transformer, 2020.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, Literal

import numpy as np

from pagewood.engine.models.limits import check_size
from pagewood.engine.models.ops import A, Linear, Ops
from pagewood.engine.models.parts.linear import read_linear
from pagewood.engine.models.parts.source import Source
from pagewood.engine.models.shard import Shard
from pagewood.engine.models.stored.head_order import RowOrder

Activation = Literal["silu", "gelu", "gelu_tanh", "clamped"]
"""Activations of a gate; "clamped": both projections are limited, and the other one is added to 1."""
ExpertActivation = Activation | Literal["relu_squared"]
"""The same, or an activation of experts that have no gate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForwardConfig:
    """The numbers of a feed-forward.

    Raises:
        ValueError: the size is out of its range.
    """

    size: int
    """Outputs of the gate, which is also the number of inputs of the last projection."""
    activation: Activation = "silu"
    has_bias: bool = False
    is_fused: bool = False
    """Whether checkpoints store one matrix, `gate_up_proj`, with the rows of the gate before the others."""
    gate_multiplier: float = 1.0
    """Multiplies what the activation is applied to."""
    multiplier: float = 1.0
    """Multiplies the result."""

    def __post_init__(self) -> None:
        check_size("intermediate_size", self.size)

    def for_shard(self, shard: Shard) -> FeedForwardConfig:
        """Return the feed-forward of a rank.

        Raises:
            ValueError: the size cannot be divided among the ranks.
        """
        return replace(self, size=len(shard.part("intermediate_size", self.size)))


class FeedForward(Generic[A]):
    """A feed-forward with its parameters."""

    __slots__ = ("_activation", "_down", "_gate_multiplier", "_gate_up", "_multiplier", "_ops")

    def __init__(self, config: FeedForwardConfig, source: Source[A]) -> None:
        """Take the parameters of a rank."""
        part = source.shard.inputs("intermediate_size", config.size)
        gate_up = [("gate_proj", config.size), ("up_proj", config.size)]
        if config.is_fused:
            gate_up = [("gate_up_proj", 2 * config.size)]
        order = None if part is None else in_halves(part, config.size)
        down = [("down_proj", source.hidden_size)]
        self._gate_up: Linear[A] = read_linear(source, gate_up, has_bias=config.has_bias, order=order)
        self._down: Linear[A] = read_linear(source, down, config.size, has_bias=config.has_bias, part=part)
        self._activation: Activation = config.activation
        self._gate_multiplier = config.gate_multiplier
        self._multiplier = config.multiplier
        self._ops = source.ops

    def __call__(self, x: A) -> A:
        """Return `[T, E]` of `[T, E]`, a part of the sum over ranks."""
        ops, of_gate = self._ops, self._gate_multiplier
        if of_gate == 1:
            fed = self._down(gated(ops, self._activation, self._gate_up(x)))
        else:  # of both projections, so that the product is divided by it
            fed = gated(ops, self._activation, ops.scale(self._gate_up(x), of_gate))
            fed = self._down(ops.scale(fed, 1 / of_gate))
        return fed if self._multiplier == 1 else ops.scale(fed, self._multiplier)


def in_halves(part: range, size: int, *, count: int = 2) -> RowOrder:
    """Return the rows of a `part` of each of `count` projections of `size` outputs, one below the other.

    By default these are a gate and the other projection.
    """
    starts = size * np.arange(count)[:, None]
    return (starts + np.asarray(part)).reshape(-1)


def gated(ops: Ops[A], activation: ExpertActivation, gate_up: A) -> A:
    """Return `[T, I]` of the two projections `gate_up` `[T, 2I]`, or of one where experts have no gate."""
    match activation:
        case "relu_squared":
            return ops.activate(gate_up, activation)
        case "silu":
            return ops.silu_mul(gate_up)
        case "gelu":
            return ops.erf_gelu_mul(gate_up)
        case "gelu_tanh":
            return ops.gelu_mul(gate_up)
        case "clamped":
            return ops.clamped_mul(gate_up)
