"""Two mixers beside each other in one layer, with one input, and one sum of their results: Falcon-H1.

Legend: T tokens of a step, W wanted tokens, E hidden_size.
Source: Falcon LLM Team, Falcon-H1, 2025.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic

from pagewood.engine.models.ops import A, Step
from pagewood.engine.models.parts.attention import AttentionConfig, SelfAttention
from pagewood.engine.models.parts.rope import PositionConfig
from pagewood.engine.models.parts.source import Source
from pagewood.engine.models.parts.state_space import StateSpace, StateSpaceConfig
from pagewood.engine.models.shard import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class MixersBesideConfig:
    """The numbers of both, and what multiplies their inputs and their results."""

    attention: AttentionConfig
    recurrent: StateSpaceConfig
    attention_input: float = 1.0
    attention_output: float = 1.0
    recurrent_input: float = 1.0
    recurrent_output: float = 1.0

    @property
    def position_configs(self) -> tuple[PositionConfig, ...]:
        """What they need to know of positions."""
        return self.attention.position_configs

    @property
    def window(self) -> int | None:
        """Number of positions that a token sees in the attention; None: itself and all before it."""
        return self.attention.window

    def for_length(self, length: int) -> MixersBesideConfig:
        """Return the mixers of a model whose sequences have at most `length` positions."""
        return replace(self, attention=self.attention.for_length(length))

    def for_shard(self, shard: Shard) -> MixersBesideConfig:
        """Return what a rank has, a part of both.

        Raises:
            ValueError: one of them cannot be divided among the ranks.
        """
        return replace(self, attention=self.attention.for_shard(shard), recurrent=self.recurrent.for_shard(shard))


class MixersBeside(Generic[A]):
    """Both, with their parameters."""

    __slots__ = ("_attention", "_config", "_hidden_size", "_ops", "_recurrent")

    def __init__(self, config: MixersBesideConfig, source: Source[A]) -> None:
        """Take the parameters of a rank from the source of the layer."""
        self._config = config
        self._hidden_size = source.hidden_size
        self._ops = source.ops
        self._recurrent = StateSpace(config.recurrent, source.below("mamba"))
        self._attention = SelfAttention(config.attention, source.below("self_attn"))

    def __call__(self, x: A, step: Step[A], layer: int, wanted: A | None = None) -> A:
        """Return `[T, E]`, or `[W, E]` for the tokens that are `wanted`; `layer` is the number of both memories."""
        config = self._config
        mixed = self._recurrent(self._times(x, config.recurrent_input), step, layer)
        attended = self._attention(self._times(x, config.attention_input), step, layer)
        mixed = self._ops.scale(mixed, config.recurrent_output)
        self._ops.add(self._ops.scale(attended, config.attention_output), mixed)
        return mixed if wanted is None else self._ops.take(mixed, wanted)  # at the end, because both read all tokens

    def _times(self, x: A, factor: float) -> A:
        """Return `x` times `factor`, in new memory unless it is `x` itself."""
        return x if factor == 1 else self._ops.scale(self._ops.columns(x, 0, self._hidden_size), factor)
