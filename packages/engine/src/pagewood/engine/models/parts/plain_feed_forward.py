"""A feed-forward without a gate: down(activation(up(x))).

Source: Vaswani et al., Attention Is All You Need, 2017.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Generic, Literal

import numpy as np

from pagewood.engine.models.limits import check_size
from pagewood.engine.models.ops import XIELU, A, Linear, PlainActivation
from pagewood.engine.models.parts.linear import read_linear
from pagewood.engine.models.parts.source import Source
from pagewood.engine.models.shard import Shard

PlainKind = Literal["gelu", "gelu_tanh", "gelu_quick", "relu_squared", "xielu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainFeedForwardConfig:
    """The numbers of a feed-forward without a gate.

    Raises:
        ValueError: the size is out of its range.
    """

    size: int
    """Outputs of the first projection, which is also the number of inputs of the last one."""
    activation: PlainKind = "gelu"
    has_bias: bool = False

    def __post_init__(self) -> None:
        check_size("intermediate_size", self.size)

    def for_shard(self, shard: Shard) -> PlainFeedForwardConfig:
        """Return the feed-forward of a rank.

        Raises:
            ValueError: the size cannot be divided among the ranks.
        """
        return replace(self, size=len(shard.part("intermediate_size", self.size)))


class PlainFeedForward(Generic[A]):
    """A feed-forward without a gate, with its parameters."""

    __slots__ = ("_activation", "_down", "_ops", "_up")

    def __init__(self, config: PlainFeedForwardConfig, source: Source[A]) -> None:
        """Take the parameters of a rank."""
        part = source.shard.inputs("intermediate_size", config.size)
        order, down = None if part is None else np.asarray(part), [("down_proj", source.hidden_size)]
        self._up: Linear[A] = read_linear(source, [("up_proj", config.size)], has_bias=config.has_bias, order=order)
        self._activation: PlainActivation = _read_xielu(source) if config.activation == "xielu" else config.activation
        self._down: Linear[A] = read_linear(source, down, config.size, has_bias=config.has_bias, part=part)
        self._ops = source.ops

    def __call__(self, x: A) -> A:
        """Return `[T, E]` of `[T, E]`, a part of the sum over ranks."""
        return self._down(self._ops.activate(self._up(x), self._activation))


def _read_xielu(source: Source[Any]) -> XIELU:
    """Take the parameters of an activation; a checkpoint has the two that are positive in a form without bounds."""
    names = [f"{source.prefix}act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")]
    *alphas, beta, epsilon = [source.weights.stack([(name, 1)]) for name in names]
    positive, rest = (alpha.float().exp().log1p() for alpha in alphas)
    return XIELU(
        positive=positive.to(beta.dtype), negative=(beta.float() + rest).to(beta.dtype), beta=beta, epsilon=epsilon
    )
