"""Llama, Mistral and Mixtral."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagewood.engine.models.families.family import Family
from pagewood.engine.models.families.mixture import Mixture
from pagewood.engine.models.parts.experts import ExpertNames
from pagewood.engine.models.parts.layer import FrameConfig

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(qkv_bias=None, output_bias=None, mlp_bias=None),
        "MistralForCausalLM": Family(windows="all", defaults={"num_key_value_heads": 8}),
        "MixtralForCausalLM": Family(
            windows="all",
            mixture=Mixture(
                names=ExpertNames(gate="w1", up="w3", down="w2"), size="intermediate_size", renormalises=True
            ),
            frame=FrameConfig(feed_forward="block_sparse_moe"),
            defaults={
                "num_key_value_heads": 8,
                "sliding_window": None,
                "rms_norm_eps": 1e-5,
                "num_experts_per_tok": 2,
            },
        ),
    }
)
