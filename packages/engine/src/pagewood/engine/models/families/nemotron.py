"""Nemotron, without state space layers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagewood.engine.models.families.family import Family
from pagewood.engine.models.parts.norm import NormConfig

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "NemotronForCausalLM": Family(
            qkv_bias=None,
            output_bias=None,
            mlp_bias=None,
            rotary_share=0.5,
            field_names={"rms_norm_eps": "norm_eps"},
            is_gated=False,
            norm=NormConfig(epsilon=1e-5, offset=1.0, is_centred=True, has_bias=True),
            defaults={"hidden_act": "relu2"},
        ),
    }
)
