"""GLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from pagewood.engine.models.families.deepseek import MIXTURE3
from pagewood.engine.models.families.family import Family
from pagewood.engine.models.parts.layer import FrameConfig
from pagewood.engine.models.parts.norm import NormConfig

_GLM = Family(
    output_bias=False,
    gate_is_fused=True,
    rotary_share=0.5,
    has_neighbours=True,
    defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "attention_bias": True},
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "GlmForCausalLM": _GLM,
        "Glm4MoeForCausalLM": Family(
            output_bias=False,
            qk_norm="heads",
            qk_norm_flag="use_qk_norm",
            rotary_share=0.5,
            norm=NormConfig(epsilon=1e-5),
            mixture=MIXTURE3,
            defaults={
                "num_key_value_heads": 8, "first_k_dense_replace": 1, "n_routed_experts": 128,
                "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1,
                "num_attention_heads": 96, "max_position_embeddings": 131_072,
            },
        ),
        "Glm4ForCausalLM": replace(
            _GLM,
            frame=FrameConfig(
                behind_mixer="post_self_attn_layernorm",
                before_feed_forward="post_attention_layernorm",
                behind_feed_forward="post_mlp_layernorm",
            ),
        ),
    }
)  # fmt: skip
