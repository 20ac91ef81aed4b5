"""Qwen, and MiMo."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagewood.engine.models.families.family import Family
from pagewood.engine.models.families.mixture import Mixture
from pagewood.engine.models.parts.experts import ExpertNames

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
        "Qwen2MoeForCausalLM": Family(
            qkv_bias=True,
            mixture=Mixture(
                names=ExpertNames(shared="shared_expert"),
                dense_layers="step",
                shared_size="shared_expert_intermediate_size",
                has_shared_gate=True,
            ),
            defaults={
                "num_key_value_heads": 16, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
                "num_experts": 60, "num_experts_per_tok": 4,
            },
        ),
        "Qwen3MoeForCausalLM": Family(
            qkv_bias=None,
            output_bias=None,
            qk_norm="heads",
            mixture=Mixture(dense_layers="step"),
            defaults={"num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts_per_tok": 8},
        ),
    }
)  # fmt: skip
