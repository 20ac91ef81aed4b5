"""Llama, Mistral, Mixtral, and decoders that differ from them in biases and layers without rotation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from pagewood.engine.models.families.family import Family
from pagewood.engine.models.families.mixture import Mixture
from pagewood.engine.models.parts.experts import ExpertNames
from pagewood.engine.models.parts.layer import FrameConfig
from pagewood.engine.models.parts.norm import NormConfig

_MISTRAL = Family(qkv_bias=False, output_bias=False, windows="all", defaults={"num_key_value_heads": 8})
_MISTRAL3 = replace(
    _MISTRAL,
    other_parts=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    defaults={
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
    },
)  # fmt: skip
_MINISTRAL3 = Family(
    qkv_bias=False,
    output_bias=False,
    windows="all",
    temperature="all",
    defaults={
        "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 34,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-5, "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    },
)  # fmt: skip

_LLAMA4 = Family(
    windows="chunks",
    rotated_layers="listed",
    has_neighbours=True,
    temperature="unrotated",
    qk_norm="plain",
    qk_norm_flag="use_qk_norm",
    theta=5e5,
    frame=FrameConfig(feed_forward="feed_forward"),
    norm=NormConfig(epsilon=1e-5),
    mixture=Mixture(
        names=ExpertNames(router="router", shared="shared_expert"),
        size="intermediate_size",
        dense_size="intermediate_size_mlp",
        dense_layers="listed",
        score="sigmoid",
        renormalises=False,
        weighs_inputs=True,
        shared_size="intermediate_size",
    ),
    defaults={
        "vocab_size": 202_048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16_384,
        "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 131_072, "num_experts_per_tok": 1, "num_local_experts": 16, "use_qk_norm": True,
        "interleave_moe_layer_step": 1,
    },
)  # fmt: skip

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(mlp_bias=None),
        "MistralForCausalLM": _MISTRAL,
        "MixtralForCausalLM": Family(
            qkv_bias=False,
            output_bias=False,
            windows="all",
            theta=1e6,
            mixture=Mixture(
                names=ExpertNames(gate="w1", up="w3", down="w2"), size="intermediate_size", renormalises=True
            ),
            frame=FrameConfig(feed_forward="block_sparse_moe"),
            norm=NormConfig(epsilon=1e-5),
            defaults={"num_key_value_heads": 8, "sliding_window": None, "num_experts_per_tok": 2},
        ),
        "Ministral3ForCausalLM": _MINISTRAL3,
        "Mistral3ForConditionalGeneration": replace(
            _MISTRAL3,
            by_text_type={"ministral3": replace(_MINISTRAL3, other_parts=_MISTRAL3.other_parts)},
        ),
        "SmolLM3ForCausalLM": Family(
            mlp_bias=None,
            windows="some",
            rotated_layers="listed",
            theta=2e6,
            defaults={"num_key_value_heads": 4, "tie_word_embeddings": True},
        ),
        "SeedOssForCausalLM": Family(
            bias_fields=("attention_bias", "attention_out_bias", "mlp_bias"),
            mlp_bias=None,
            defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
        ),
        "Llama4ForCausalLM": _LLAMA4,
        "Llama4ForConditionalGeneration": replace(
            _LLAMA4,
            other_parts=(
                "vision_model.", "multi_modal_projector.", "model.vision_model.", "model.multi_modal_projector.",
            ),
        ),
        "HunYuanDenseV1ForCausalLM": Family(
            qk_norm="heads",
            qk_norm_names=("query_layernorm", "key_layernorm"),
            qk_norm_follows=True,
            has_static_alpha=True,
            defaults={"rms_norm_eps": 1e-5},
        ),
    }
)  # fmt: skip
