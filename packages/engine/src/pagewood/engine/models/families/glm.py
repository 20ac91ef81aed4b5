"""GLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from pagewood.engine.models.families.family import Family
from pagewood.engine.models.parts.layer import FrameConfig

_GLM = Family(
    qkv_bias=None,
    gate_is_fused=True,
    rotary_share=0.5,
    has_neighbours=True,
    defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "attention_bias": True},
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "GlmForCausalLM": _GLM,
        "Glm4ForCausalLM": replace(
            _GLM,
            frame=FrameConfig(
                behind_mixer="post_self_attn_layernorm",
                before_feed_forward="post_attention_layernorm",
                behind_feed_forward="post_mlp_layernorm",
            ),
        ),
    }
)
