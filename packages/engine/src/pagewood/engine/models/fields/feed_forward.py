"""The fields of feed-forwards."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagewood.engine.json_fields import Fields
from pagewood.engine.models.families.family import Family
from pagewood.engine.models.fields.agreement import read_bias
from pagewood.engine.models.fields.experts import read_experts
from pagewood.engine.models.limits import read_size
from pagewood.engine.models.parts.experts import ExpertsConfig
from pagewood.engine.models.parts.feed_forward import Activation, FeedForwardConfig

_ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
)


def read_feed_forward(fields: Fields, family: Family, num_layers: int) -> tuple[FeedForwardConfig | ExpertsConfig, ...]:
    """Return the feed-forward of each layer.

    Raises:
        ValueError: a field is missing, of another type or out of its range, or contradicts the architecture.
    """
    activation = fields.text(family.activation_field, "silu")
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"{fields.source}: {family.activation_field} must be {' or '.join(_ACTIVATIONS)}, got {activation!r:.80}"
        )
    mixture = family.mixture
    config = FeedForwardConfig(
        size=read_size(fields, "intermediate_size" if mixture is None else mixture.size, "intermediate_size"),
        activation=_ACTIVATIONS[activation],
        has_bias=read_bias(fields, "mlp_bias", family.mlp_bias),
    )
    return (config,) * num_layers if mixture is None else read_experts(fields, mixture, config, num_layers)
