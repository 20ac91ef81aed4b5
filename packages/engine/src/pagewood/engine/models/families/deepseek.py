"""DeepSeek, and Kimi K2, whose class has the name of DeepSeek V3's."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagewood.engine.models.families.family import Family

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "DeepseekV2ForCausalLM": Family(mixer="latents", mlp_bias=None),
        "DeepseekV3ForCausalLM": Family(mixer="latents", defaults={"first_k_dense_replace": 3}),
        "DeepseekV32ForCausalLM": Family(mixer="indexed latents", defaults={"first_k_dense_replace": 3}),
    }
)
