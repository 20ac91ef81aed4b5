"""From the fields of a config.json to the layers of a model."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagewood.engine.json_fields import Fields
from pagewood.engine.models.agreement import must_be
from pagewood.engine.models.families import Family
from pagewood.engine.models.limits import read_size
from pagewood.engine.models.parts.attention import AttentionConfig
from pagewood.engine.models.parts.feed_forward import Activation, FeedForwardConfig
from pagewood.engine.models.parts.layer import LayerConfig
from pagewood.engine.models.parts.norm import NormConfig
from pagewood.engine.models.rope_config import LAYER_TYPES, local_ropes, read_rope

_ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
)
_LONGEST_WINDOW = (1 << 31) - 1
_PERIOD = 6
"""Each n-th layer sees all positions in a family with periodic windows if `sliding_window_pattern` is absent."""
_DEFAULT_WINDOW = 4096
"""The window if a family has windows and `sliding_window` is absent; null means no windows."""


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
    num_layers = read_size(fields, "num_hidden_layers", "num_layers")
    num_heads = read_size(fields, "num_attention_heads", "num_heads")
    head_dim = read_size(fields, "head_dim", "head_dim", _even_share(fields, hidden_size, num_heads))
    max_position = read_size(fields, "max_position_embeddings", "max_position")
    views = local_ropes(fields) if family.has_local_rope else (fields, fields)
    ropes = [read_rope(view, head_dim=head_dim, max_position=max_position) for view in views]
    activation = fields.text(family.activation_field, "silu")
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"{fields.source}: {family.activation_field} must be {' or '.join(_ACTIVATIONS)}, got {activation!r:.80}"
        )
    feed_forward = FeedForwardConfig(
        size=read_size(fields, "intermediate_size", "intermediate_size"),
        activation=_ACTIVATIONS[activation],
        has_bias=_bias(fields, "mlp_bias", family.mlp_bias),
    )
    num_kv_heads = read_size(fields, "num_key_value_heads", "num_kv_heads", num_heads)
    qkv_bias = _bias(fields, "attention_bias", family.qkv_bias)
    output_bias = fields.flag("attention_bias", False) if family.output_bias is None else family.output_bias

    scalar = head_dim if family.scale_field is None else fields.number(family.scale_field, low=1e-3, high=1e6)

    def layer(window: int | None) -> LayerConfig:
        mixer = AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope=ropes[window is not None],
            scale=scalar**-0.5,
            window=window,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            qk_norm=None if family.qk_norm == "none" else norm,
            qk_norm_is_whole=family.qk_norm == "whole",
        )
        return LayerConfig(mixer=mixer, feed_forward=feed_forward, norm=norm, frame=family.frame)

    return tuple(layer(window) for window in _windows(fields, family, num_layers))


def _even_share(fields: Fields, hidden_size: int, num_heads: int) -> int | None:
    """Return the size of a head if no field names it; None if it would not be a whole number.

    Raises:
        ValueError: no field names it, and it cannot be derived.
    """
    if hidden_size % num_heads and fields.values.get("head_dim") is None:
        raise ValueError(
            f"{fields.source}: hidden_size must be a multiple of num_attention_heads {num_heads} where head_dim is "
            f"absent, got {hidden_size}"
        )
    return hidden_size // num_heads or None


def _bias(fields: Fields, name: str, fixed: bool | None) -> bool:
    """Return whether there is a bias; raise if the field contradicts an architecture without a choice."""
    if fixed is None:
        return fields.flag(name, False)
    must_be(fields, name, fixed)
    return fixed


def _windows(fields: Fields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    kinds = _layer_types(fields, num_layers)
    if kinds is None and family.windows == "periodic":
        period = fields.integer("sliding_window_pattern", _PERIOD, low=1, high=_LONGEST_WINDOW)
        kinds = tuple("sliding_attention" if layer % period else "full_attention" for layer in range(1, num_layers + 1))
    window = _window(fields, family)
    if kinds is None:
        first = 0 if family.windows == "all" else fields.integer("max_window_layers", 28, high=_LONGEST_WINDOW)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if window is None and "sliding_attention" in kinds:
        if family.windows == "none":
            raise ValueError(f"{fields.source}: layer_types must not name sliding_attention in this architecture")
        asked = {
            name: fields.values[name] for name in ("sliding_window", "use_sliding_window") if name in fields.values
        }
        raise ValueError(
            f"{fields.source}: layer_types may name sliding_attention only where sliding_window is not null and "
            f"use_sliding_window is not false, got {asked!r:.80}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _window(fields: Fields, family: Family) -> int | None:
    """Return the window of the layers that have one, or None if no layer has one."""
    if family.windows == "some" and not fields.flag("use_sliding_window", False):
        return None
    if family.windows == "none":
        if fields.flag("use_sliding_window", True):
            must_be(fields, "sliding_window")
        return None
    if "sliding_window" in fields.values and fields.values["sliding_window"] is None:
        return None
    return fields.integer("sliding_window", _DEFAULT_WINDOW, low=1, high=_LONGEST_WINDOW)


def _layer_types(fields: Fields, num_layers: int) -> tuple[str, ...] | None:
    kinds = fields.texts("layer_types")
    if kinds is None:
        return None
    unknown = sorted(set(kinds) - LAYER_TYPES)
    if unknown:
        raise ValueError(
            f"{fields.source}: layer_types must be full_attention or sliding_attention, got {unknown[0][:80]!r}"
        )
    if len(kinds) != num_layers:
        raise ValueError(f"{fields.source}: layer_types must have {num_layers} entries, got {len(kinds)}")
    return kinds
