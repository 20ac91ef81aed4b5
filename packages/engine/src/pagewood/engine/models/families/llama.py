"""Llama, and Mistral."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagewood.engine.models.families.family import Family

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(qkv_bias=None, output_bias=None, mlp_bias=None),
        "MistralForCausalLM": Family(windows="all", defaults={"num_key_value_heads": 8}),
    }
)
