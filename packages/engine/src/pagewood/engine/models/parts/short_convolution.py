"""A gated convolution over a few tokens: the mixer of LFM2.

Legend: T tokens of a step, W wanted tokens, E hidden_size.
Source: Liquid AI, LFM2 Technical Report, 2025.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic

import numpy as np

from pagewood.engine.models.limits import check_size
from pagewood.engine.models.ops import A, Linear, Step
from pagewood.engine.models.parts.linear import read_linear
from pagewood.engine.models.parts.recurrent import RecurrentConfig, check_width, rows_of, tail
from pagewood.engine.models.parts.source import Source
from pagewood.engine.models.shard import Shard
from pagewood.kvpool import PageArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolutionConfig(RecurrentConfig):
    """The numbers of a short convolution.

    Raises:
        ValueError: a number is out of its range.
    """

    size: int
    """Its channels: E, or this rank's part of them."""
    width: int
    """Tokens that it reads, the own one included."""
    has_bias: bool = False
    """Whether the convolution and both projections have biases."""

    def __post_init__(self) -> None:
        check_size("hidden_size", self.size)
        check_width(self.width)

    def for_shard(self, shard: Shard) -> ShortConvolutionConfig:
        """Return what a rank has: some channels.

        Raises:
            ValueError: they cannot be divided among the ranks.
        """
        return replace(self, size=len(shard.part("hidden_size", self.size)))

    @property
    def state(self) -> tuple[PageArray, ...]:
        """The state of a request."""
        return (tail(self.size, self.width),)


class ShortConvolution(Generic[A]):
    """A short convolution with its parameters."""

    __slots__ = ("_config", "_convolution", "_input", "_ops", "_output")

    def __init__(self, config: ShortConvolutionConfig, source: Source[A]) -> None:
        """Take the parameters of a rank."""
        weights, ops, prefix, shard = source.weights, source.ops, source.prefix, source.shard
        size, part = config.size, shard.inputs("hidden_size", config.size)
        self._config = config.for_shard(shard)
        self._ops = ops
        order, rows = None, None
        if part is not None:
            order, rows = np.asarray(part), rows_of(*((size, part, 1),) * 3)
        self._input: Linear[A] = read_linear(
            source, [("in_proj", 3 * size)], size, has_bias=config.has_bias, order=rows
        )
        bias = weights.exact(f"{prefix}conv.bias", size, order=order) if config.has_bias else None
        self._convolution = ops.convolution(
            weights.exact(f"{prefix}conv.weight", size, 1, config.width, order=order), bias, activates=False
        )
        self._output: Linear[A] = read_linear(source, [("out_proj", size)], size, has_bias=config.has_bias, part=part)

    def __call__(self, x: A, step: Step[A], layer: int, wanted: A | None = None) -> A:
        """Return `[T, E]`, or `[W, E]` for the tokens that are `wanted`, a part of the sum over ranks.

        `layer` is the number of its memory.
        """
        ops, size, recurrence = self._ops, self._config.size, step.recurrence
        assert recurrence is not None
        parts = self._input(x)  # what gates the input, what gates the result, and the input
        values = ops.multiply_columns(ops.columns(parts, 2 * size, size), parts, 0)
        mixed = recurrence.convolve(values, 0, self._convolution, layer)
        mixed = ops.multiply_columns(mixed, parts, size)
        return self._output(mixed if wanted is None else ops.take(mixed, wanted))
