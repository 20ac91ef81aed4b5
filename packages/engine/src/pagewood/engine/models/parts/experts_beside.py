"""A mixture of experts beside a feed-forward, each in norms of its own, whose results are added up.

All of them read the residual stream. The router has a norm of its own too, whose weights it multiplies.

Legend: T tokens of a step, E hidden_size, N experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic

from pagewood.engine.models.ops import A, Norm
from pagewood.engine.models.parts.experts import Experts, ExpertsConfig
from pagewood.engine.models.parts.feed_forward import FeedForward, FeedForwardConfig
from pagewood.engine.models.parts.norm import NormConfig, read_norm
from pagewood.engine.models.parts.source import Source
from pagewood.engine.models.shard import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsBesideConfig:
    """The numbers of both, and of their norms."""

    dense: FeedForwardConfig
    experts: ExpertsConfig
    norm: NormConfig

    @property
    def size(self) -> int:
        """Inputs of the last projection of a token: of the feed-forward, or of one of its experts if that is larger."""
        return max(self.dense.size, self.experts.size)

    def for_shard(self, shard: Shard) -> ExpertsBesideConfig:
        """Return what a rank has, a part of both.

        Raises:
            ValueError: a size cannot be divided among the ranks.
        """
        return replace(self, dense=self.dense.for_shard(shard), experts=self.experts.for_shard(shard))

    def num_idle(self, hidden_size: int) -> int:
        """Return the number of parameters of the experts that a token does not use."""
        return self.experts.num_idle(hidden_size)


class ExpertsBeside(Generic[A]):
    """Both, with their parameters."""

    __slots__ = (
        "_dense", "_dense_norm", "_experts", "_experts_norm", "_is_whole", "_ops", "_router_norm", "_sum_norms",
    )  # fmt: skip

    def __init__(self, config: ExpertsBesideConfig, source: Source[A]) -> None:
        """Take the parameters of a rank from the source of the layer."""
        hidden_size = source.hidden_size

        def norm(name: str) -> Norm:
            return read_norm(config.norm, source, name, hidden_size)

        self._ops = source.ops
        self._is_whole = source.shard.is_whole
        self._dense_norm, self._experts_norm = norm("pre_feedforward_layernorm"), norm("pre_feedforward_layernorm_2")
        self._sum_norms = norm("post_feedforward_layernorm_1"), norm("post_feedforward_layernorm_2")
        scale = source.weights.stack([(f"{source.prefix}router.scale", hidden_size)])
        self._router_norm = Norm(weight=scale * hidden_size**-0.5, epsilon=config.norm.epsilon)
        self._dense = FeedForward(config.dense, source.below("mlp"))
        self._experts = Experts(config.experts, source)

    def __call__(self, x: A) -> A:
        """Return `[T, E]` of the residual stream `[T, E]`, the sum over ranks: norms need that of each result."""
        ops = self._ops
        dense = ops.norm(self._summed(self._dense(ops.norm(x, self._dense_norm))), self._sum_norms[0])
        routed = self._experts(ops.norm(x, self._experts_norm), judged=ops.norm(x, self._router_norm))
        routed = self._summed(routed)
        ops.norm_add(routed, dense, self._sum_norms[1])
        return dense

    def _summed(self, x: A) -> A:
        return x if self._is_whole else self._ops.sum_ranks(x)
