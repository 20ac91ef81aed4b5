"""A state space layer of heads with one decay each: Mamba 2.

Legend: T tokens of a step, W wanted tokens, E hidden_size, H heads of values `[V]`, G groups with keys and queries
`[K]`.
Source: Dao and Gu, Transformers are SSMs, 2024.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic

import numpy as np

from pagewood.engine.models.limits import check_size
from pagewood.engine.models.ops import A, Linear, Norm, RecurrentHeads, SharedGroup, Step
from pagewood.engine.models.parts.linear import read_exact_linear, read_linear
from pagewood.engine.models.parts.norm import NormConfig, read_norm
from pagewood.engine.models.parts.recurrent import RecurrentConfig, check_width, rows_of, tail
from pagewood.engine.models.parts.source import Source
from pagewood.engine.models.shard import Shard
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

    def for_shard(self, shard: Shard) -> StateSpaceConfig:
        """Return what a rank has: heads, with their groups.

        Raises:
            ValueError: heads cannot be divided among the ranks.
        """
        heads, groups = self.heads_of(shard)
        return replace(self, num_heads=len(heads), num_groups=len(groups))

    def heads_of(self, shard: Shard) -> tuple[range, range]:
        """Return the heads and the groups of a rank; see `for_shard`."""
        groups = shard.shared_part("mamba_n_groups", self.num_groups)
        return shard.part("mamba_n_heads", self.num_heads), groups

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

    __slots__ = ("_config", "_convolution", "_gates", "_group_size", "_heads", "_input", "_norm", "_ops", "_output",
                 "_shared")  # fmt: skip

    def __init__(self, config: StateSpaceConfig, source: Source[A]) -> None:
        """Take the parameters of a rank."""
        weights, ops, prefix, shard = source.weights, source.ops, source.prefix, source.shard
        heads, values, channels = config.num_heads, config.value_size, config.channels
        own, (own_heads, groups) = config.for_shard(shard), config.heads_of(shard)
        self._config = own
        self._ops = ops
        self._group_size = values // config.num_groups
        """Elements of a group, of all ranks that have a part of it."""
        self._shared: SharedGroup | None = None
        if config.num_groups < shard.count:
            self._shared = SharedGroup(number=groups.start, count=config.num_groups)
        of_heads, of_groups = (heads, own_heads, config.head_dim), (config.num_groups, groups, config.state_dim)
        order = rows_of(of_heads, of_heads, of_groups, of_groups, (heads, own_heads, 1))
        own_channels = rows_of(of_heads, of_groups, of_groups)
        numbers = np.asarray(own_heads)
        rows, inner, gates = [("in_proj", values + channels + heads)], order[: -len(numbers)], order[-len(numbers) :]
        self._input: Linear[A] = read_linear(source, rows, has_bias=config.has_bias, order=inner)
        bias = weights.exact(f"{prefix}in_proj.bias", rows[0][1], order=gates) if config.has_bias else None
        self._gates: Linear[A] = read_exact_linear(source, rows, bias=bias, order=gates)
        conv_bias = None
        if config.has_conv_bias:
            conv_bias = weights.exact(f"{prefix}conv1d.bias", channels, order=own_channels)
        conv_weight = weights.exact(f"{prefix}conv1d.weight", channels, 1, config.width, order=own_channels)
        self._convolution = ops.convolution(_multiplied(conv_weight, own), conv_bias)
        self._heads = RecurrentHeads(
            num_heads=own.num_heads,
            num_key_heads=own.num_groups,
            key_dim=config.state_dim,
            value_dim=config.head_dim,
            corrects=False,
            values_first=True,
            rate=-weights.exact(f"{prefix}A_log", heads, order=numbers).exp(),
            bias=weights.exact(f"{prefix}dt_bias", heads, order=numbers),
            skip=weights.exact(f"{prefix}D", heads, order=numbers),
        )
        self._norm: Norm | None = None
        if config.norm is not None:
            norm_order = None if shard.is_whole else rows_of(of_heads)
            self._norm = read_norm(config.norm, source, "norm", values, order=norm_order).folded()
        self._output: Linear[A] = read_linear(
            source,
            [("out_proj", source.hidden_size)],
            values,
            has_bias=config.has_output_bias,
            part=shard.inputs("mamba_n_heads", heads, config.head_dim),
        )

    def __call__(self, x: A, step: Step[A], layer: int, wanted: A | None = None) -> A:
        """Return `[T, E]`, or `[W, E]` for the tokens that are `wanted`, a part of the sum over ranks.

        `layer` is the number of its memory.
        """
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
        return self._ops.norm_groups(x, self._norm, self._group_size, self._shared)


def _multiplied(weight: Tensor, config: StateSpaceConfig) -> Tensor:
    """Return the weights of the convolution, whose inputs are all multiplied by what multiplies gates, for that of
    each kind of them.
    """
    gate, *own, _ = config.multipliers
    if all(one == gate for one in own) or not weight.numel():  # empty where only headers are read
        return weight
    sizes = [config.value_size, *[config.num_groups * config.state_dim] * 2]
    return weight * weight.new_tensor(np.repeat(own, sizes) / gate)[:, None, None]
