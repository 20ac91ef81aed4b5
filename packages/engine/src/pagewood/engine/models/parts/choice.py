"""Which part computes what a configuration describes.

Legend: T tokens of a step, W wanted tokens, E hidden_size.
"""

from __future__ import annotations

from typing import Protocol

from pagewood.engine.models.ops import A, Step
from pagewood.engine.models.parts.absent import AbsentConfig
from pagewood.engine.models.parts.attention import AttentionConfig, SelfAttention
from pagewood.engine.models.parts.channel_delta import ChannelDelta, ChannelDeltaConfig
from pagewood.engine.models.parts.experts import Experts, ExpertsConfig
from pagewood.engine.models.parts.experts_beside import ExpertsBeside, ExpertsBesideConfig
from pagewood.engine.models.parts.feed_forward import FeedForward, FeedForwardConfig
from pagewood.engine.models.parts.gated_delta import GatedDelta, GatedDeltaConfig
from pagewood.engine.models.parts.latent_attention import LatentAttention, LatentAttentionConfig
from pagewood.engine.models.parts.mixers_beside import MixersBeside, MixersBesideConfig
from pagewood.engine.models.parts.plain_feed_forward import PlainFeedForward, PlainFeedForwardConfig
from pagewood.engine.models.parts.short_convolution import ShortConvolution, ShortConvolutionConfig
from pagewood.engine.models.parts.source import Source
from pagewood.engine.models.parts.state_space import StateSpace, StateSpaceConfig

WithPages = AttentionConfig | LatentAttentionConfig
"""Mixers that read what they have kept of every earlier token."""
Recurrent = ShortConvolutionConfig | GatedDeltaConfig | ChannelDeltaConfig | StateSpaceConfig
"""Mixers that have a state instead, of one size for every text."""
AnyMixer = WithPages | Recurrent | MixersBesideConfig | AbsentConfig
"""Every kind of mixer: what lets tokens see earlier ones."""
AnyFeedForward = FeedForwardConfig | PlainFeedForwardConfig | ExpertsConfig | ExpertsBesideConfig | AbsentConfig
"""Every kind of feed-forward: what computes each token by itself."""


def paged_part(mixer: AnyMixer) -> WithPages | None:
    """Return what has pages in a mixer: the mixer, or one of two beside each other; None: nothing."""
    own = mixer.attention if isinstance(mixer, MixersBesideConfig) else mixer
    return own if isinstance(own, WithPages) else None


def recurrent_part(mixer: AnyMixer) -> Recurrent | None:
    """Return what has a state in a mixer: the mixer, or one of two beside each other; None: nothing."""
    own = mixer.recurrent if isinstance(mixer, MixersBesideConfig) else mixer
    return own if isinstance(own, Recurrent) else None


class Mixer(Protocol[A]):
    """A mixer with its parameters; it leaves its input unchanged."""

    def __call__(self, x: A, step: Step[A], layer: int, wanted: A | None = None) -> A:
        """Return `[T, E]`, or `[W, E]` for the tokens that are `wanted`, a part of the sum over ranks.

        `layer` is the number of its memory.
        """
        ...


class PerToken(Protocol[A]):
    """A feed-forward with its parameters; it leaves its input unchanged."""

    def __call__(self, x: A) -> A:
        """Return `[T, E]` of `[T, E]`, a part of the sum over ranks; experts beside a feed-forward return the sum."""
        ...


def make_mixer(config: AnyMixer, source: Source[A], *, inputs: int | None) -> Mixer[A] | None:
    """Return a mixer with its parameters, if there is one; see `SelfAttention` for the arguments.

    Two mixers beside each other have names of their own in the layer, so `source` is then that of the layer.
    """
    if isinstance(config, AttentionConfig):
        return SelfAttention(config, source, inputs=inputs)
    assert inputs is None, "drafting heads have other mixers"
    match config:
        case LatentAttentionConfig():
            return LatentAttention(config, source)
        case ShortConvolutionConfig():
            return ShortConvolution(config, source)
        case GatedDeltaConfig():
            return GatedDelta(config, source)
        case ChannelDeltaConfig():
            return ChannelDelta(config, source)
        case StateSpaceConfig():
            return StateSpace(config, source)
        case MixersBesideConfig():
            return MixersBeside(config, source)
        case AbsentConfig():
            return None


def make_feed_forward(config: AnyFeedForward, source: Source[A]) -> PerToken[A] | None:
    """Return a rank's feed-forward with its parameters, if there is one."""
    match config:
        case FeedForwardConfig():
            return FeedForward(config, source)
        case PlainFeedForwardConfig():
            return PlainFeedForward(config, source)
        case ExpertsConfig():
            return Experts(config, source)
        case ExpertsBesideConfig():
            return ExpertsBeside(config, source)
        case AbsentConfig():
            return None
