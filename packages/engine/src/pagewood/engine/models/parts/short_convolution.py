"""A gated convolution over a few tokens: the mixer of LFM2.

Legend: T tokens of a step, W wanted tokens, E hidden_size.
Source: Liquid AI, LFM2 Technical Report, 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from pagewood.engine.models.limits import check_size
from pagewood.engine.models.ops import A, Linear, Ops, Step, Weights
from pagewood.engine.models.parts.linear import read_linear
from pagewood.engine.models.parts.recurrent import RecurrentConfig, check_width, tail
from pagewood.kvpool import PageArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolutionConfig(RecurrentConfig):
    """The numbers of a short convolution.

    Raises:
        ValueError: a number is out of its range.
    """

    size: int
    """E."""
    width: int
    """Tokens that it reads, the own one included."""
    has_bias: bool = False
    """Whether the convolution and both projections have biases."""

    def __post_init__(self) -> None:
        check_size("hidden_size", self.size)
        check_width(self.width)

    @property
    def state(self) -> tuple[PageArray, ...]:
        """The state of a request."""
        return (tail(self.size, self.width),)


class ShortConvolution(Generic[A]):
    """A short convolution with its parameters."""

    __slots__ = ("_config", "_convolution", "_input", "_ops", "_output")

    def __init__(self, config: ShortConvolutionConfig, weights: Weights, ops: Ops[A], prefix: str) -> None:
        """Take the parameters from `weights`; `prefix` of their names has the dot at its end."""
        size = config.size
        self._config = config
        self._ops = ops
        self._input: Linear[A] = read_linear(
            weights, ops, prefix, [("in_proj", 3 * size)], size, has_bias=config.has_bias
        )
        bias = weights.exact(f"{prefix}conv.bias", size) if config.has_bias else None
        self._convolution = ops.convolution(
            weights.exact(f"{prefix}conv.weight", size, 1, config.width), bias, activates=False
        )
        self._output: Linear[A] = read_linear(
            weights, ops, prefix, [("out_proj", size)], size, has_bias=config.has_bias
        )

    def __call__(self, x: A, step: Step[A], layer: int, wanted: A | None = None) -> A:
        """Return `[T, E]`, or `[W, E]` for the tokens that are `wanted`; `layer` is the number of its memory."""
        ops, size, recurrence = self._ops, self._config.size, step.recurrence
        assert recurrence is not None
        parts = self._input(x)  # what gates the input, what gates the result, and the input
        values = ops.multiply_columns(ops.columns(parts, 2 * size, size), parts, 0)
        mixed = recurrence.convolve(values, 0, self._convolution, layer)
        mixed = ops.multiply_columns(mixed, parts, size)
        return self._output(mixed if wanted is None else ops.take(mixed, wanted))
