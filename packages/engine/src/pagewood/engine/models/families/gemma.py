"""Gemma."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from pagewood.engine.models.families.family import Family
from pagewood.engine.models.parts.layer import FrameConfig
from pagewood.engine.models.parts.norm import NormConfig

_GEMMA3 = Family(
    qkv_bias=None,
    output_bias=None,
    qk_norm="heads",
    windows="periodic",
    has_local_rope=True,
    scale_field="query_pre_attn_scalar",
    field_names={"hidden_act": "hidden_activation"},
    norm=NormConfig(epsilon=1e-6, offset=1.0),
    scales_embeddings=True,
    frame=FrameConfig(
        behind_mixer="post_attention_layernorm",
        before_feed_forward="pre_feedforward_layernorm",
        behind_feed_forward="post_feedforward_layernorm",
    ),
    defaults={
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
        "hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "tie_word_embeddings": True,
    },
)  # fmt: skip

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "Gemma3ForCausalLM": _GEMMA3,
        "Gemma3ForConditionalGeneration": replace(
            _GEMMA3,
            other_parts=(
                "vision_tower.",
                "multi_modal_projector.",
                "model.vision_tower.",
                "model.multi_modal_projector.",
            ),
        ),
    }
)
