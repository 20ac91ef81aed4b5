"""A gated delta rule whose states decay in each channel of keys by itself: Kimi Delta Attention.

Legend: T tokens of a step, W wanted tokens, E hidden_size, H heads, K elements of a head.
Source: Kimi Team, Kimi Linear, 2025.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic

import numpy as np

from pagewood.engine.models.limits import check_size
from pagewood.engine.models.ops import A, Linear, Norm, RecurrentHeads, Step
from pagewood.engine.models.parts.linear import read_exact_linear, read_linear
from pagewood.engine.models.parts.norm import NormConfig, read_norm
from pagewood.engine.models.parts.recurrent import RecurrentConfig, check_width, read_filters, rows_of, tail
from pagewood.engine.models.parts.source import Source
from pagewood.engine.models.shard import Shard
from pagewood.kvpool import PageArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelDeltaConfig(RecurrentConfig):
    """The numbers of a gated delta rule with a decay for each channel.

    Raises:
        ValueError: a number is out of its range.
    """

    num_heads: int
    """H."""
    head_dim: int
    """K, of queries, keys and values; also the rank of the projections to decays and to what gates results."""
    width: int
    """Tokens that its convolutions read, the own one included."""
    norm: NormConfig
    """Norm of the result of each head."""

    def __post_init__(self) -> None:
        check_size("num_heads", self.num_heads)
        check_size("head_dim", self.head_dim)
        check_width(self.width)

    def for_shard(self, shard: Shard) -> ChannelDeltaConfig:
        """Return what a rank has: heads.

        Raises:
            ValueError: heads cannot be divided among the ranks.
        """
        return replace(self, num_heads=len(self.heads_of(shard)))

    def heads_of(self, shard: Shard) -> range:
        """Return the heads of a rank; see `for_shard`."""
        return shard.part("num_heads of linear_attn_config", self.num_heads)

    @property
    def size(self) -> int:
        """Elements of all queries, keys or values of a token."""
        return self.num_heads * self.head_dim

    @property
    def state(self) -> tuple[PageArray, ...]:
        """The state of a request."""
        matrices = PageArray(name="matrices", dtype="float32", shape=(self.num_heads, self.head_dim, self.head_dim))
        return tail(3 * self.size, self.width), matrices


class ChannelDelta(Generic[A]):
    """A gated delta rule with a decay for each channel, with its parameters."""

    __slots__ = (
        "_config", "_convolution", "_decay", "_gate", "_heads", "_input", "_norm", "_ops", "_output", "_strength",
    )  # fmt: skip

    def __init__(self, config: ChannelDeltaConfig, source: Source[A]) -> None:
        """Take the parameters of a rank."""
        weights, ops, prefix, shard = source.weights, source.ops, source.prefix, source.shard
        heads, size, dim = config.num_heads, config.size, config.head_dim
        self._config = config.for_shard(shard)
        self._ops = ops
        numbers = rows = all_rows = None
        if not shard.is_whole:
            own = config.heads_of(shard)
            of_heads = (heads, own, dim)
            numbers, rows, all_rows = np.asarray(own), rows_of(of_heads), rows_of(of_heads, of_heads, of_heads)
        parts = [("q_proj", size), ("k_proj", size), ("v_proj", size)]
        self._input: Linear[A] = read_linear(source, parts, order=all_rows)
        self._strength: Linear[A] = read_exact_linear(source, [("b_proj", heads)], order=numbers)
        self._decay: tuple[Linear[A], Linear[A]] = (
            read_exact_linear(source, [("f_a_proj", dim)]),
            read_exact_linear(source, [("f_b_proj", size)], dim, order=rows),
        )
        self._gate: tuple[Linear[A], Linear[A]] = (
            read_linear(source, [("g_a_proj", dim)]),
            read_linear(source, [("g_b_proj", size)], dim, order=rows),
        )
        filters = [("q_conv1d", size), ("k_conv1d", size), ("v_conv1d", size)]
        self._convolution = ops.convolution(read_filters(source, filters, config.width, order=all_rows), None)
        rates = -weights.exact(f"{prefix}A_log", 1, 1, heads, 1).flatten().exp()
        self._heads = ops.channel_heads(
            RecurrentHeads(
                num_heads=self._config.num_heads,
                num_key_heads=self._config.num_heads,
                key_dim=dim,
                value_dim=dim,
                corrects=True,
                decays_by_channel=True,
                rate=rates if numbers is None else rates[numbers],
                bias=weights.exact(f"{prefix}dt_bias", size, order=rows),
            )
        )
        self._norm: Norm = read_norm(config.norm, source, "o_norm", dim).folded()
        inputs = shard.inputs("num_heads of linear_attn_config", heads, dim)
        self._output: Linear[A] = read_linear(source, [("o_proj", source.hidden_size)], size, part=inputs)

    def __call__(self, x: A, step: Step[A], layer: int, wanted: A | None = None) -> A:
        """Return `[T, E]`, or `[W, E]` for the tokens that are `wanted`, a part of the sum over ranks.

        `layer` is the number of its memory.
        """
        ops, recurrence = self._ops, step.recurrence
        assert recurrence is not None
        to_ranks, to_channels = self._decay
        gates = ops.concat([self._strength(x), to_channels(to_ranks(x))])
        mixed = recurrence.convolve(self._input(x), 0, self._convolution, layer)
        mixed = recurrence.recur(mixed, gates, self._heads, layer)
        if wanted is not None:
            mixed, x = ops.take(mixed, wanted), ops.take(x, wanted)
        to_ranks, to_gate = self._gate
        gate = to_gate(to_ranks(x))
        return self._output(
            ops.multiply_columns(ops.norm_heads(mixed, self._norm, self._config.head_dim), gate, 0, "sigmoid")
        )
