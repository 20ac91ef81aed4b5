"""From the fields of a config.json to the layers of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pagewood.engine.json_fields import Fields
from pagewood.engine.models.families.family import Family
from pagewood.engine.models.fields.attention import read_attention
from pagewood.engine.models.fields.feed_forward import read_feed_forward
from pagewood.engine.models.fields.kinds import Kind, read_kinds
from pagewood.engine.models.fields.latent_attention import read_latent_attention
from pagewood.engine.models.fields.layer_kinds import frame_of, own_attentions, own_inputs, own_windows
from pagewood.engine.models.fields.multipliers import read_multiplier
from pagewood.engine.models.fields.recurrent import beside, read_recurrent
from pagewood.engine.models.fields.windows import read_windows
from pagewood.engine.models.parts.absent import AbsentConfig
from pagewood.engine.models.parts.attention import AttentionConfig
from pagewood.engine.models.parts.choice import AnyFeedForward, AnyMixer, Recurrent, WithPages
from pagewood.engine.models.parts.layer import FrameConfig, LayerConfig
from pagewood.engine.models.parts.norm import NormConfig


def read_layers(fields: Fields, family: Family, *, hidden_size: int, norm: NormConfig) -> tuple[LayerConfig, ...]:
    """Return the layers.

    Args:
        fields: of config.json, with the defaults of the family.
        family: the fixed properties of the architecture.
        hidden_size: of the model.
        norm: the numbers of all its norms.

    Raises:
        ValueError: a field is missing, of another type or out of its range, needs something that is not supported, or
            contradicts another one.
    """
    kinds = read_kinds(fields, family)
    num_layers = len(kinds)
    mixers: Sequence[AnyMixer]
    if {*kinds} != {"attention"}:
        mixers = _mixers_of(kinds, fields, family, hidden_size=hidden_size, norm=norm)
    elif family.mixer == "attention":
        windows = read_windows(fields, family, num_layers)
        if family.has_own_kinds:
            windows = own_windows(windows)
        mixers = read_attention(fields, family, windows, hidden_size=hidden_size, norm=norm)
        if family.has_own_kinds:
            mixers = own_attentions(fields, family, mixers, norm)
    else:
        mixers = (read_latent_attention(fields, family),) * num_layers
    feed_forwards = _feed_forwards_of(kinds, fields, family, hidden_size=hidden_size, norm=norm)
    inputs = own_inputs(fields, norm) if family.has_own_kinds else None
    multiplier = read_multiplier(fields, "residual_multiplier")
    frame = replace(family.frame, is_parallel=fields.flag("use_parallel_residual", family.frame.is_parallel))
    return tuple(
        LayerConfig(
            mixer=mixer,
            feed_forward=feed_forward,
            norm=norm,
            frame=_frame_of(frame, family, mixer, feed_forward, is_first=index == 0),
            residual_multiplier=multiplier,
            inputs=inputs,
            has_scalar=family.has_own_kinds,
        )
        for index, (mixer, feed_forward) in enumerate(zip(mixers, feed_forwards, strict=True))
    )


def _mixers_of(
    kinds: Sequence[Kind], fields: Fields, family: Family, *, hidden_size: int, norm: NormConfig
) -> list[AnyMixer]:
    """Return the mixer of each layer of a model some of whose layers are recurrent."""
    attention: WithPages
    if family.mixer == "attention":
        others = fields.over({"layer_types": None})
        (attention,) = read_attention(others, family, (None,), hidden_size=hidden_size, norm=norm)
    else:
        attention = read_latent_attention(fields, family)
    own = read_recurrent(fields, family, hidden_size=hidden_size, norm=norm)
    found = list[AnyMixer]()
    for kind in kinds:
        match kind:
            case "attention":
                found.append(attention)
            case "recurrent":
                found.append(own)
            case "beside":
                assert isinstance(attention, AttentionConfig)
                found.append(beside(fields, attention, own))
            case "feed_forward" | "experts":
                found.append(AbsentConfig())
    return found


def _feed_forwards_of(
    kinds: Sequence[Kind], fields: Fields, family: Family, *, hidden_size: int, norm: NormConfig
) -> Sequence[AnyFeedForward]:
    """Return the feed-forward of each layer; where layers are single parts, most have none."""

    def read(family: Family) -> Sequence[AnyFeedForward]:
        return read_feed_forward(fields, family, len(kinds), hidden_size=hidden_size, norm=norm)

    if not family.has_single_parts:
        return read(family)
    absent = (AbsentConfig(),) * len(kinds)
    dense = read(replace(family, mixture=None)) if "feed_forward" in kinds else absent
    experts = read(family) if "experts" in kinds else absent
    by_kind = {"feed_forward": dense[0], "experts": experts[0]}
    return [by_kind.get(kind, AbsentConfig()) for kind in kinds]


def _frame_of(
    frame: FrameConfig, family: Family, mixer: AnyMixer, feed_forward: AnyFeedForward, *, is_first: bool
) -> FrameConfig:
    """Return the frame of a layer; the input of a first one may have been normed before."""
    if is_first and family.begins_without_norm:
        return replace(frame, before_mixer=None)
    own = frame_of(frame, feed_forward)
    if not isinstance(mixer, Recurrent) or own.is_single:
        return own
    return replace(family.recurrent_frame or own, mixer=family.recurrent_name)
