"""Qwen, and MiMo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from pagewood.engine.models.families.family import Family
from pagewood.engine.models.families.mixture import Mixture
from pagewood.engine.models.parts.experts import ExpertNames
from pagewood.engine.models.parts.norm import NormConfig

_QWEN2 = Family(qkv_bias=True, output_bias=False, windows="some", defaults={"num_key_value_heads": 32})
_QWEN3 = Family(
    qk_norm="heads",
    windows="some",
    defaults={"num_key_value_heads": 32, "head_dim": 128},
)
_QWEN3_MOE = Family(
    qk_norm="heads",
    mixture=Mixture(dense_layers="step"),
    defaults={"num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts_per_tok": 8},
)
_PREDICTION = ("mtp.",)
"""Layers that predict further tokens."""
_NEXT_EXPERTS = Mixture(
    names=ExpertNames(shared="shared_expert"),
    dense_layers="step",
    shared_size="shared_expert_intermediate_size",
    has_shared_gate=True,
    renormalises_by_default=True,
)
_NEXT = Family(
    recurrence="delta",
    delta_projections="fused",
    has_output_gate=True,
    qk_norm="heads",
    rotary_share=0.25,
    norm=NormConfig(epsilon=1e-6, offset=1.0),
    mixture=_NEXT_EXPERTS,
    other_parts=_PREDICTION,
    defaults={
        "num_key_value_heads": 2, "head_dim": 256, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "num_experts": 512, "num_experts_per_tok": 10,
    },
)  # fmt: skip
_QWEN35 = replace(
    _NEXT,
    delta_projections="joined",
    mixture=None,
    defaults={"num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 12_288},
)
_QWEN35_MOE = replace(
    _NEXT,
    delta_projections="joined",
    mixture=replace(_NEXT_EXPERTS, dense_layers="none"),
    defaults={**_NEXT.defaults, "num_experts": 256, "num_experts_per_tok": 8},
)
_IMAGES = ("visual.", "model.visual.")

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "Qwen2ForCausalLM": _QWEN2,
        "MiMoForCausalLM": _QWEN2,
        "Qwen3ForCausalLM": _QWEN3,
        "Qwen2_5_VLForConditionalGeneration": replace(
            _QWEN2,
            theta=1e6,
            other_parts=_IMAGES,
            defaults={
                "vocab_size": 152_064, "hidden_size": 8192, "intermediate_size": 29_568, "num_hidden_layers": 80,
                "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 32_768,
                "rms_norm_eps": 1e-5,
            },
        ),
        "Qwen3VLForConditionalGeneration": replace(
            _QWEN3,
            windows="none",
            theta=5e5,
            other_parts=_IMAGES,
            defaults={
                "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128,
                "max_position_embeddings": 128_000,
            },
        ),
        "Qwen2MoeForCausalLM": Family(
            qkv_bias=True,
            output_bias=False,
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
        "Qwen3MoeForCausalLM": _QWEN3_MOE,
        "Qwen3NextForCausalLM": _NEXT,
        "Qwen3_5ForCausalLM": _QWEN35,
        "Qwen3_5MoeForCausalLM": _QWEN35_MOE,
        "Qwen3_5ForConditionalGeneration": replace(_QWEN35, other_parts=(*_IMAGES, *_PREDICTION)),
        "Qwen3_5MoeForConditionalGeneration": replace(_QWEN35_MOE, other_parts=(*_IMAGES, *_PREDICTION)),
        "Qwen3VLMoeForConditionalGeneration": replace(
            _QWEN3_MOE,
            theta=5e5,
            mixture=Mixture(dense_layers="step", renormalises=True),
            other_parts=_IMAGES,
            defaults={
                "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
                "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 128_000,
                "moe_intermediate_size": 1408, "num_experts_per_tok": 4,
            },
        ),
    }
)  # fmt: skip
