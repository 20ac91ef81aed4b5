"""A state space layer of heads with one decay each: Mamba 2.

Legend: T tokens of a step, W wanted tokens, E hidden_size, H heads of values `[V]`, G groups with keys and queries
`[K]`.
Source: Dao and Gu, Transformers are SSMs, 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

import numpy as np

from pagewood.engine.models.limits import check_size
from pagewood.engine.models.ops import A, Linear, Norm, Ops, RecurrentHeads, Step, Weights
from pagewood.engine.models.parts.linear import read_exact_linear, read_linear
from pagewood.engine.models.parts.norm import NormConfig, read_norm
from pagewood.engine.models.parts.recurrent import RecurrentConfig, check_width, tail
from pagewood.kvpool import PageArray

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpaceConfig(RecurrentConfig):
    """The numbers of a state space layer.

    Raises:
        ValueError: a number is out of its range, or two numbers contradict each other.
    """

    num_heads: int
    """H."""
    num_groups: int
    """G."""
    state_dim: int
    """K."""
    head_dim: int
    """V."""
    width: int
    """Tokens that its convolution reads, the own one included."""
    norm: NormConfig | None
    """Norm of the results of the heads of a group; None: there is none."""
    norms_first: bool = False
    """Whether results are normed before they are gated, rather than behind."""
    has_conv_bias: bool = True
    has_bias: bool = False
    """Whether the projection to values, keys and queries has a bias."""
    has_output_bias: bool = False
    multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """What multiplies outputs of that projection: those that gate results, values, keys, queries, and those that say
    how fast states decay."""

    def __post_init__(self) -> None:
        check_size("num_heads", self.num_heads)
        check_size("num_heads", self.num_groups)
        check_size("head_dim", self.head_dim)
        check_size("head_dim", self.state_dim)
        check_width(self.width)
        if self.num_heads % self.num_groups:
            raise ValueError(
                f"mamba_n_heads must be a multiple of mamba_n_groups {self.num_groups}, got {self.num_heads}"
            )

    @property
    def value_size(self) -> int:
        """Elements of all values of a token."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Elements of values, keys and queries of a token."""
        return self.value_size + 2 * self.num_groups * self.state_dim

    @property
    def state(self) -> tuple[PageArray, ...]:
        """The state of a request."""
        matrices = PageArray(name="matrices", dtype="float32", shape=(self.num_heads, self.state_dim, self.head_dim))
        return tail(self.channels, self.width), matrices


class StateSpace(Generic[A]):
    """A state space layer with its parameters."""

    __slots__ = ("_config", "_convolution", "_gates", "_heads", "_input", "_norm", "_ops", "_output")

    def __init__(
        self, config: StateSpaceConfig, weights: Weights, ops: Ops[A], prefix: str, *, hidden_size: int
    ) -> None:
        """Take the parameters from `weights`; `prefix` of their names has the dot at its end."""
        heads, values, channels = config.num_heads, config.value_size, config.channels
        self._config = config
        self._ops = ops
        rows, order = [("in_proj", values + channels + heads)], np.arange(values + channels + heads)
        self._input: Linear[A] = read_linear(
            weights, ops, prefix, rows, hidden_size, has_bias=config.has_bias, order=order[:-heads]
        )
        bias = weights.exact(f"{prefix}in_proj.bias", len(order))[-heads:] if config.has_bias else None
        self._gates: Linear[A] = read_exact_linear(
            weights, ops, prefix, rows, hidden_size, bias=bias, order=order[-heads:]
        )
        conv_bias = weights.exact(f"{prefix}conv1d.bias", channels) if config.has_conv_bias else None
        conv_weight = weights.exact(f"{prefix}conv1d.weight", channels, 1, config.width)
        self._convolution = ops.convolution(_multiplied(conv_weight, config), conv_bias)
        self._heads = RecurrentHeads(
            num_heads=heads,
            num_key_heads=config.num_groups,
            key_dim=config.state_dim,
            value_dim=config.head_dim,
            corrects=False,
            values_first=True,
            rate=-weights.exact(f"{prefix}A_log", heads).exp(),
            bias=weights.exact(f"{prefix}dt_bias", heads),
            skip=weights.exact(f"{prefix}D", heads),
        )
        self._norm: Norm | None = None
        if config.norm is not None:
            self._norm = read_norm(config.norm, weights, f"{prefix}norm", values).folded()
        self._output: Linear[A] = read_linear(
            weights, ops, prefix, [("out_proj", hidden_size)], values, has_bias=config.has_output_bias
        )

    def __call__(self, x: A, step: Step[A], layer: int, wanted: A | None = None) -> A:
        """Return `[T, E]`, or `[W, E]` for the tokens that are `wanted`; `layer` is the number of its memory."""
        ops, config, recurrence = self._ops, self._config, step.recurrence
        assert recurrence is not None
        parts, gates = self._input(x), self._gates(x)  # what gates the result; values, keys, queries
        gate, *_, decay = config.multipliers
        parts = parts if gate == 1 else ops.scale(parts, gate)
        mixed = recurrence.convolve(parts, config.value_size, self._convolution, layer)
        mixed = recurrence.recur(mixed, gates if decay == 1 else ops.scale(gates, decay), self._heads, layer)
        if wanted is not None:
            mixed, parts = ops.take(mixed, wanted), ops.take(parts, wanted)
        if config.norms_first:
            return self._output(ops.multiply_columns(self._normed(mixed), parts, 0, "silu"))
        return self._output(self._normed(ops.multiply_columns(mixed, parts, 0, "silu")))

    def _normed(self, x: A) -> A:
        if self._norm is None:
            return x
        return self._ops.norm_groups(x, self._norm, self._config.value_size // self._config.num_groups)


def _multiplied(weight: Tensor, config: StateSpaceConfig) -> Tensor:
    """Return the weights of the convolution, whose inputs are all multiplied by what multiplies gates, for that of
    each kind of them.
    """
    gate, *own, _ = config.multipliers
    if all(one == gate for one in own) or not weight.numel():  # empty where only headers are read
        return weight
    sizes = [config.value_size, *[config.num_groups * config.state_dim] * 2]
    return weight * weight.new_tensor(np.repeat(own, sizes) / gate)[:, None, None]
