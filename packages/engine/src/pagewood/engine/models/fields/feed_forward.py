"""The fields of feed-forwards."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

from pagewood.engine.json_fields import Fields
from pagewood.engine.models.families.family import Family
from pagewood.engine.models.fields.agreement import read_bias
from pagewood.engine.models.fields.experts import read_experts
from pagewood.engine.models.fields.layer_kinds import own_feed_forwards
from pagewood.engine.models.fields.multipliers import read_multipliers
from pagewood.engine.models.limits import read_size
from pagewood.engine.models.parts.choice import AnyFeedForward
from pagewood.engine.models.parts.feed_forward import Activation, FeedForwardConfig
from pagewood.engine.models.parts.norm import NormConfig
from pagewood.engine.models.parts.plain_feed_forward import PlainFeedForwardConfig, PlainKind

_ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
)
_IN_ENCODERS: Mapping[str, Activation] = MappingProxyType({**_ACTIVATIONS, "gelu": "gelu"})
"""Activations of families in whose files gelu is the exact function, not its approximation."""
_PLAIN: Mapping[str, PlainKind] = MappingProxyType(
    {
        "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
        "quick_gelu": "gelu_quick", "relu2": "relu_squared", "xielu": "xielu",
    }
)  # fmt: skip
_Kind = TypeVar("_Kind", Activation, PlainKind)
_WIDENING = 4
"""Size of a feed-forward without a gate over that of the model, if no field names it."""


def read_feed_forward(
    fields: Fields, family: Family, num_layers: int, *, hidden_size: int, norm: NormConfig
) -> tuple[AnyFeedForward, ...]:
    """Return the feed-forward of each layer; `norm` has the numbers of all norms.

    Raises:
        ValueError: a field is missing, of another type or out of its range, or contradicts the architecture.
    """
    has_bias = read_bias(fields, family.bias_fields[2], family.mlp_bias)
    if not family.is_gated:
        size = read_size(fields, "intermediate_size", "intermediate_size", _WIDENING * hidden_size)
        plain = PlainFeedForwardConfig(size=size, activation=_read(fields, family, _PLAIN), has_bias=has_bias)
        if family.mixture is None:
            return (plain,) * num_layers
        return read_experts(fields, family.mixture, plain, num_layers)
    mixture = None if family.has_own_kinds else family.mixture
    size = read_size(fields, "intermediate_size" if mixture is None else mixture.size, "intermediate_size")
    if family.widens_by_two_thirds:
        size = _two_thirds(fields, size)
    of_gate, multiplier = read_multipliers(fields, "mlp_multipliers", 2) if family.has_mixers_beside else (1.0, 1.0)
    config = FeedForwardConfig(
        size=size,
        activation=_read(fields, family, _IN_ENCODERS if family.is_encoder else _ACTIVATIONS),
        has_bias=has_bias,
        is_fused=fields.flag("gate_is_fused", family.gate_is_fused),  # a GGUF file has gates apart
        gate_multiplier=of_gate,
        multiplier=multiplier,
    )
    if family.has_own_kinds:
        return own_feed_forwards(fields, family, config, norm, num_layers)
    return (config,) * num_layers if mixture is None else read_experts(fields, mixture, config, num_layers)


def _two_thirds(fields: Fields, size: int) -> int:
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    factor = fields.number("block_ffn_dim_multiplier", 1.0, low=1e-3, high=1e3)
    multiple = fields.integer("block_multiple_of", 256, low=1, high=1 << 20)
    return -(-int(factor * (2 * size // 3)) // multiple) * multiple


def _read(fields: Fields, family: Family, kinds: Mapping[str, _Kind]) -> _Kind:
    """Return the activation, by default the first of `kinds`."""
    activation = fields.text("hidden_act", next(iter(kinds)))
    activation = family.activations.get(activation, activation)
    if activation not in kinds:
        name = fields.names.get("hidden_act", "hidden_act")
        raise ValueError(f"{fields.source}: {name} must be {' or '.join(kinds)}, got {activation!r:.80}")
    return kinds[activation]
