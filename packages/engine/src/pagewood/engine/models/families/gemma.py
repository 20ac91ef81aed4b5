"""Gemma."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from pagewood.engine.models.families.family import Family
from pagewood.engine.models.families.mixture import Mixture
from pagewood.engine.models.parts.experts import ExpertNames
from pagewood.engine.models.parts.layer import FrameConfig
from pagewood.engine.models.parts.norm import NormConfig


def _in_models_of_images(parts: Sequence[str]) -> tuple[str, ...]:
    """Return the prefixes of parts of a model, which checkpoints store alone or under "model."."""
    return (*parts, *(f"model.{part}" for part in parts))


_CAPS = frozenset({"attn_logit_softcapping", "final_logit_softcapping"})
_FOUR_NORMS = FrameConfig(
    behind_mixer="post_attention_layernorm",
    before_feed_forward="pre_feedforward_layernorm",
    behind_feed_forward="post_feedforward_layernorm",
)
_GEMMA = Family(
    ignores=frozenset({"hidden_activation"}),
    activations={"gelu": "gelu_pytorch_tanh"},
    norm=NormConfig(epsilon=1e-6, offset=1.0),
    scales_embeddings=True,
    defaults={
        "vocab_size": 256_000, "hidden_size": 3072, "intermediate_size": 24_576, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192,
        "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    },
)  # fmt: skip
_GEMMA2 = replace(
    _GEMMA,
    windows="periodic",
    scale_field="query_pre_attn_scalar",
    field_names={"hidden_act": "hidden_activation"},
    ignores=frozenset(),
    activations={},
    knows=_CAPS,
    frame=_FOUR_NORMS,
    defaults={
        **_GEMMA.defaults, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
)  # fmt: skip
_GEMMA3 = replace(
    _GEMMA2,
    qk_norm="heads",
    has_local_rope=True,
    theta=1e6,
    defaults={
        **_GEMMA2.defaults, "vocab_size": 262_208, "max_position_embeddings": 131_072, "sliding_window_pattern": 6,
        "attn_logit_softcapping": None, "final_logit_softcapping": None,
    },
)  # fmt: skip
_GEMMA4 = replace(
    _GEMMA3,
    norm=NormConfig(epsilon=1e-6),
    scale_field=None,
    has_own_kinds=True,
    qkv_bias=None,
    output_bias=None,
    mixture=Mixture(
        names=ExpertNames(router="router.proj", factors="router.per_expert_scale"), renormalises=True, has_factors=True
    ),
    knows=_CAPS
    | {
        "attention_k_eq_v", "enable_moe_block", "hidden_size_per_layer_input", "num_kv_shared_layers",
        "per_layer_config", "use_bidirectional_attention", "use_double_wide_mlp",
    },
    defaults={
        "vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
        "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "sliding_window": 512,
        "vocab_size_per_layer_input": 262_144, "hidden_size_per_layer_input": 256,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
    },
)  # fmt: skip
_OTHERS4 = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.", "vision_embedder.")
_UNIFIED4 = replace(
    _GEMMA4,
    mixture=None,
    defaults={
        **_GEMMA4.defaults, "max_position_embeddings": 262_144, "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    },
)  # fmt: skip

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "GemmaForCausalLM": _GEMMA,
        "Gemma2ForCausalLM": _GEMMA2,
        "Gemma3ForCausalLM": _GEMMA3,
        "Gemma3TextModel": replace(
            _GEMMA3,
            is_encoder=True,
            embeds_without_norm=True,
            knows=_CAPS | {"use_bidirectional_attention"},
            defaults={**_GEMMA3.defaults, "use_bidirectional_attention": False},
        ),
        "Gemma3ForConditionalGeneration": replace(
            _GEMMA3,
            other_parts=_in_models_of_images(("vision_tower.", "multi_modal_projector.")),
        ),
        "Gemma4ForCausalLM": _GEMMA4,
        "Gemma4ForConditionalGeneration": replace(_GEMMA4, other_parts=_in_models_of_images(_OTHERS4)),
        "Gemma4UnifiedForCausalLM": _UNIFIED4,
        "Gemma4UnifiedForConditionalGeneration": replace(_UNIFIED4, other_parts=_in_models_of_images(_OTHERS4)),
    }
)
