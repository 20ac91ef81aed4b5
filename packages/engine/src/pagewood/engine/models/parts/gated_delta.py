"""A gated delta rule: a state of keys and values, which each token lets decay and corrects.

Legend: T tokens of a step, W wanted tokens, E hidden_size, H heads of values `[V]`, G heads of queries and keys `[K]`.
Source: Yang et al., Gated Delta Networks, 2024.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, Literal

import numpy as np

from pagewood.engine.models.limits import check_size
from pagewood.engine.models.ops import A, Linear, Norm, RecurrentHeads, Step
from pagewood.engine.models.parts.linear import read_exact_linear, read_linear
from pagewood.engine.models.parts.norm import NormConfig, read_norm
from pagewood.engine.models.parts.recurrent import RecurrentConfig, check_width, read_filters, rows_of, tail
from pagewood.engine.models.parts.source import Source
from pagewood.engine.models.shard import Shard
from pagewood.engine.models.stored.head_order import RowOrder
from pagewood.kvpool import PageArray

Projections = Literal["fused", "joined", "apart"]
"""What checkpoints have: two projections, whose rows belong to one head of keys after the other; four, one of them to
queries, keys and values; or one to each, with a convolution for each of the first three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaConfig(RecurrentConfig):
    """The numbers of a gated delta rule.

    Raises:
        ValueError: a number is out of its range, or two numbers contradict each other.
    """

    num_heads: int
    """H."""
    num_key_heads: int
    """G."""
    key_dim: int
    """K."""
    value_dim: int
    """V."""
    width: int
    """Tokens that its convolution reads, the own one included."""
    norm: NormConfig
    """Norm of the result of each head."""
    projections: Projections = "joined"
    most_strength: int = 1
    """How strongly a token may correct the state: 1, or 2, which changes the sign of what it replaces."""

    def __post_init__(self) -> None:
        for name, size in (
            ("linear_num_value_heads", self.num_heads),
            ("linear_num_key_heads", self.num_key_heads),
            ("linear_key_head_dim", self.key_dim),
            ("linear_value_head_dim", self.value_dim),
        ):
            check_size("num_heads" if "num" in name else "head_dim", size)
        check_width(self.width)
        if self.num_heads % self.num_key_heads:
            raise ValueError(
                f"linear_num_value_heads must be a multiple of linear_num_key_heads {self.num_key_heads}, "
                f"got {self.num_heads}"
            )

    def for_shard(self, shard: Shard) -> GatedDeltaConfig:
        """Return what a rank has: heads of values, with their heads of keys.

        Raises:
            ValueError: heads cannot be divided among the ranks.
        """
        heads, key_heads = self.heads_of(shard)
        return replace(self, num_heads=len(heads), num_key_heads=len(key_heads))

    def heads_of(self, shard: Shard) -> tuple[range, range]:
        """Return the heads of values and the heads of keys of a rank; see `for_shard`."""
        key_heads = shard.shared_part("linear_num_key_heads", self.num_key_heads)
        return shard.part("linear_num_value_heads", self.num_heads), key_heads

    @property
    def key_size(self) -> int:
        """Elements of all keys of a token."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Elements of all values of a token."""
        return self.num_heads * self.value_dim

    @property
    def state(self) -> tuple[PageArray, ...]:
        """The state of a request."""
        channels = 2 * self.key_size + self.value_size
        matrices = PageArray(name="matrices", dtype="float32", shape=(self.num_heads, self.key_dim, self.value_dim))
        return tail(channels, self.width), matrices


class GatedDelta(Generic[A]):
    """A gated delta rule with its parameters."""

    __slots__ = ("_config", "_convolution", "_gate", "_gates", "_heads", "_input", "_norm", "_ops", "_output")

    def __init__(self, config: GatedDeltaConfig, source: Source[A]) -> None:
        """Take the parameters of a rank."""
        weights, ops, prefix, shard = source.weights, source.ops, source.prefix, source.shard
        keys, values, heads = config.key_size, config.value_size, config.num_heads
        own, (own_heads, own_keys) = config.for_shard(shard), config.heads_of(shard)
        self._config = own
        self._ops = ops
        of_keys, of_values = (config.num_key_heads, own_keys, config.key_dim), (heads, own_heads, config.value_dim)
        channels, rows, own_values, of_heads = (
            None if shard.is_whole else rows_of(*parts)
            for parts in (
                (of_keys, of_keys, of_values), (of_keys, of_keys, of_values, of_values), (of_values,),
                ((heads, own_heads, 1),) * 2,
            )
        )  # fmt: skip
        output, norm, sizes = "out_proj", "norm", [("conv1d", 2 * keys + values)]
        order = gate_order = None
        if config.projections == "fused":
            parts, gates = [("in_proj_qkvz", 2 * keys + 2 * values)], [("in_proj_ba", 2 * heads)]
            shares = values // config.num_key_heads
            order = _by_kind(config.num_key_heads, [config.key_dim, config.key_dim, shares, shares])
            gate_order = _by_kind(config.num_key_heads, [heads // config.num_key_heads] * 2)
        elif config.projections == "joined":
            parts = [("in_proj_qkv", 2 * keys + values), ("in_proj_z", values)]
            gates = [("in_proj_b", heads), ("in_proj_a", heads)]
        else:
            parts = [("q_proj", keys), ("k_proj", keys), ("v_proj", values)]
            gates, output, norm = [("b_proj", heads), ("a_proj", heads)], "o_proj", "o_norm"
            sizes = [("q_conv1d", keys), ("k_conv1d", keys), ("v_conv1d", values)]
            rows = channels
        order, gate_order = _chosen(order, rows), _chosen(gate_order, of_heads)
        self._input: Linear[A] = read_linear(source, parts, order=order)
        self._gate: Linear[A] | None = None
        if config.projections == "apart":
            self._gate = read_linear(source, [("g_proj", values)], order=own_values)
        self._gates: Linear[A] = read_exact_linear(source, gates, order=gate_order)
        filters = read_filters(source, sizes, config.width, order=channels)
        self._convolution = ops.convolution(filters, None)
        numbers = None if shard.is_whole else np.asarray(own_heads)
        self._heads = RecurrentHeads(
            num_heads=own.num_heads,
            num_key_heads=own.num_key_heads,
            key_dim=config.key_dim,
            value_dim=config.value_dim,
            corrects=True,
            most_strength=config.most_strength,
            rate=-weights.exact(f"{prefix}A_log", heads, order=numbers).exp(),
            bias=weights.exact(f"{prefix}dt_bias", heads, order=numbers),
        )
        self._norm: Norm = read_norm(config.norm, source, norm, config.value_dim).folded()
        part = shard.inputs("linear_num_value_heads", heads, config.value_dim)
        self._output: Linear[A] = read_linear(source, [(output, source.hidden_size)], values, part=part)

    def __call__(self, x: A, step: Step[A], layer: int, wanted: A | None = None) -> A:
        """Return `[T, E]`, or `[W, E]` for the tokens that are `wanted`, a part of the sum over ranks.

        `layer` is the number of its memory.
        """
        ops, config, recurrence = self._ops, self._config, step.recurrence
        assert recurrence is not None
        parts = self._input(x)  # queries, keys, values, and maybe what gates the result
        mixed = recurrence.convolve(parts, 0, self._convolution, layer)
        mixed = recurrence.recur(mixed, self._gates(x), self._heads, layer)
        gate, column = parts, 2 * config.key_size + config.value_size
        if self._gate is not None:
            gate, column = self._gate(x), 0
        if wanted is not None:
            mixed, gate = ops.take(mixed, wanted), ops.take(gate, wanted)
        mixed = ops.norm_heads(mixed, self._norm, config.value_dim)
        return self._output(ops.multiply_columns(mixed, gate, column, "silu"))


def _chosen(order: RowOrder | None, rows: RowOrder | None) -> RowOrder | None:
    """Return the places of some `rows` of a tensor in this order; None: of all, in their order."""
    return rows if order is None else order if rows is None else order[rows]


def _by_kind(num_groups: int, sizes: list[int]) -> RowOrder:
    """Return the order of rows of groups that each have some rows of several kinds: kind by kind."""
    size = sum(sizes)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    groups = size * np.arange(num_groups)[:, None]
    kinds = [(groups + np.arange(start, start + count)).reshape(-1) for start, count in zip(starts, sizes, strict=True)]
    return np.concatenate(kinds)
