"""Granite."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagewood.engine.models.families.family import Family

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "GraniteForCausalLM": Family(
            qkv_bias=None,
            output_bias=None,
            mlp_bias=None,
            knows=frozenset({"attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"}),
            defaults={"attention_multiplier": 1.0},
        ),
    }
)
