"""Apertus."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagewood.engine.models.families.family import Family
from pagewood.engine.models.parts.layer import FrameConfig
from pagewood.engine.models.parts.norm import NormConfig

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "ApertusForCausalLM": Family(
            qk_norm="heads",
            is_gated=False,
            theta=12_000_000.0,
            norm=NormConfig(epsilon=1e-5),
            frame=FrameConfig(before_mixer="attention_layernorm", before_feed_forward="feedforward_layernorm"),
            defaults={"hidden_act": "xielu"},
        ),
    }
)
