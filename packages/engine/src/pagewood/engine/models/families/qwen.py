"""Qwen, and MiMo."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagewood.engine.models.families.family import Family

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "Qwen2ForCausalLM": Family(qkv_bias=True, windows="some", defaults={"num_key_value_heads": 32}),
        "MiMoForCausalLM": Family(qkv_bias=True, windows="some", defaults={"num_key_value_heads": 32}),
        "Qwen3ForCausalLM": Family(
            qkv_bias=None,
            output_bias=None,
            qk_norm="heads",
            windows="some",
            defaults={"num_key_value_heads": 32, "head_dim": 128},
        ),
    }
)
