"""The fields of models whose kinds of layers have attentions of their own: Gemma 4.

Layers that see all positions have heads of another size, and may have no values of their own. The last layers read the
keys and values of the last earlier layer of their kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pagewood.engine.json_fields import Fields, check_same
from pagewood.engine.models.families.family import Family
from pagewood.engine.models.fields.agreement import must_be
from pagewood.engine.models.fields.experts import read_experts
from pagewood.engine.models.fields.rope import local_ropes, read_rope
from pagewood.engine.models.limits import LARGEST, read_size
from pagewood.engine.models.parts.attention import AttentionConfig
from pagewood.engine.models.parts.choice import AnyFeedForward
from pagewood.engine.models.parts.experts import ExpertsConfig
from pagewood.engine.models.parts.experts_beside import ExpertsBesideConfig
from pagewood.engine.models.parts.feed_forward import FeedForwardConfig
from pagewood.engine.models.parts.layer import FrameConfig
from pagewood.engine.models.parts.layer_inputs import LayerInputsConfig
from pagewood.engine.models.parts.norm import NormConfig

_OF_LAYER = frozenset({"head_dim", "num_key_value_heads"})
"""Fields that a layer may have in `per_layer_config`."""
_GLOBAL_HEAD_DIM = 512
"""The size of heads that see all positions, if no field names it."""


def own_windows(windows: Sequence[int | None]) -> tuple[int | None, ...]:
    """Return the windows of layers: the last one sees all positions, whatever a file says."""
    return (*windows[:-1], None)


def own_attentions(
    fields: Fields, family: Family, attentions: Sequence[AttentionConfig], norm: NormConfig
) -> tuple[AttentionConfig, ...]:
    """Return the attention of each layer.

    Args:
        fields: of config.json, with the defaults of the family.
        family: the fixed properties of the architecture.
        attentions: of each layer, as if all kinds had the same heads.
        norm: the numbers of norms of values.

    Raises:
        ValueError: a field is missing, of another type or out of its range, or contradicts another one.
    """
    must_be(fields, "use_bidirectional_attention", "vision", False)
    sections = fields.section("per_layer_config") or fields.empty("per_layer_config")
    unknown = sorted(sections.values.keys() - {str(layer) for layer in range(len(attentions))})
    if unknown:
        raise ValueError(
            f"{sections.source} must have objects for numbers of layers below {len(attentions)}, got {unknown[0]!r:.80}"
        )
    num_own = len(attentions) - _num_shared(fields, len(attentions))
    latest: dict[bool, int] = {config.window is None: layer for layer, config in enumerate(attentions[:num_own])}
    missing = {config.window is None for config in attentions} - latest.keys()
    if missing:
        kind = "full_attention" if True in missing else "sliding_attention"
        raise ValueError(
            f"{fields.source}: num_kv_shared_layers must leave a layer of {kind} with keys and values of its own, "
            f"got {len(attentions) - num_own}"
        )
    values_are_keys = fields.flag("attention_k_eq_v", False)
    rope_fields = local_ropes(fields, family)[0]
    found: list[AttentionConfig] = []
    for layer, config in enumerate(attentions):
        sees_all = config.window is None
        head_dim, num_kv_heads = _heads(fields, config, layer, values_are_keys=values_are_keys)
        own = replace(
            config,
            head_dim=head_dim,
            num_kv_heads=num_kv_heads,
            rope=read_rope(rope_fields, family, head_dim=head_dim) if sees_all else config.rope,
            scale=1.0,
            value_norm=norm,
            values_are_keys=values_are_keys and sees_all,
            source=latest[sees_all] if layer >= num_own else None,
        )
        source = own if own.source is None else found[own.source]
        check_same(
            f"{fields.source}: layers {own.source} and {layer}",
            [("(head_dim, num_key_value_heads)", (one.head_dim, one.num_kv_heads)) for one in (source, own)],
        )
        found.append(own)
    return tuple(found)


def own_feed_forwards(
    fields: Fields, family: Family, dense: FeedForwardConfig, norm: NormConfig, num_layers: int
) -> tuple[AnyFeedForward, ...]:
    """Return the feed-forward of each layer.

    Args:
        fields: of config.json, with the defaults of the family.
        family: the fixed properties of the architecture.
        dense: the feed-forward of layers with keys and values of their own.
        norm: the numbers of all norms.
        num_layers: of the model.

    Raises:
        ValueError: see `own_attentions`.
    """
    num_shared = _num_shared(fields, num_layers)
    wide = replace(dense, size=2 * dense.size) if fields.flag("use_double_wide_mlp", False) else dense
    own = (*(dense,) * (num_layers - num_shared), *(wide,) * num_shared)
    if family.mixture is None or not fields.flag("enable_moe_block", False):
        return own
    experts = read_experts(fields, family.mixture, dense, num_layers)
    return tuple(
        ExpertsBesideConfig(dense=one, experts=other, norm=norm)
        for one, other in zip(own, experts, strict=True)
        if isinstance(other, ExpertsConfig)
    )


def own_inputs(fields: Fields, norm: NormConfig) -> LayerInputsConfig | None:
    """Return what layers add of each token beside its embedding.

    Raises:
        ValueError: see `own_attentions`.
    """
    size = fields.integer("hidden_size_per_layer_input", 0, high=LARGEST["hidden_size"])
    if not size:
        return None
    rows = read_size(fields, "vocab_size_per_layer_input", "vocab_size")
    return LayerInputsConfig(vocab_size=rows, size=size, norm=norm)


def frame_of(frame: FrameConfig, feed_forward: AnyFeedForward) -> FrameConfig:
    """Return the frame of a layer: experts beside a feed-forward have norms of their own."""
    if not isinstance(feed_forward, ExpertsBesideConfig):
        return frame
    return replace(frame, before_feed_forward=None, feed_forward=None)


def _num_shared(fields: Fields, num_layers: int) -> int:
    return fields.integer("num_kv_shared_layers", 0, high=num_layers - 1)


def _heads(fields: Fields, config: AttentionConfig, layer: int, *, values_are_keys: bool) -> tuple[int, int]:
    """Return the size and the number of key heads of a layer.

    They are in `per_layer_config` (transformers 5), by the number of the layer, or in fields of their own.
    """
    sections = fields.section("per_layer_config")
    if sections is None:
        if config.window is not None:
            return config.head_dim, config.num_kv_heads
        head_dim = read_size(fields, "global_head_dim", "head_dim", _GLOBAL_HEAD_DIM)
        usual = config.num_kv_heads
        num_kv_heads = read_size(fields, "num_global_key_value_heads", "num_kv_heads", usual)
        return head_dim, num_kv_heads if values_are_keys else usual
    own = sections.section(str(layer)) or sections.empty(str(layer))
    unknown = sorted(own.values.keys() - _OF_LAYER)
    if unknown:
        raise ValueError(
            f"{own.source} must have no fields but {' and '.join(sorted(_OF_LAYER))}, got {unknown[0][:80]!r}"
        )
    return (
        read_size(own, "head_dim", "head_dim", config.head_dim),
        read_size(own, "num_key_value_heads", "num_kv_heads", config.num_kv_heads),
    )
