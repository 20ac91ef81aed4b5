"""Gemma."""

from __future__ import annotations

from dataclasses import replace

from families.case import Case

_GEMMA3 = {
    "head_dim": 16,
    "sliding_window": 9,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 24,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    },
}
_CASE3 = Case(kind="Gemma3", config="Gemma3TextConfig", extra=_GEMMA3, norms_from_zero=True)
_ENDS = {"eos_token_id": 0, "pad_token_id": 0, "bos_token_id": 0}
_GEMMA2 = {
    **_ENDS,
    "head_dim": 16,
    "sliding_window": 9,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 4.0,
}
_GEMMA4 = {
    **_ENDS,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 9,
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 97,
    "final_logit_softcapping": 4.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    },
}
_SMALL4 = {
    **_GEMMA4,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
}
_LARGE4 = {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
_EXPERTS4 = {
    **_LARGE4,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
_CASE4 = Case(kind="Gemma4", config="Gemma4TextConfig", extra=_SMALL4, query_norm=0.2)
_UNIFIED4 = replace(_CASE4, kind="Gemma4Unified", config="Gemma4UnifiedTextConfig", extra=_LARGE4)
CASES = {
    "gemma": Case(kind="Gemma", extra={**_ENDS, "head_dim": 16}, norms_from_zero=True),
    "gemma2": Case(kind="Gemma2", extra=_GEMMA2, norms_from_zero=True),
    "gemma2-no-caps": Case(
        kind="Gemma2",
        extra={**_GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None},
        norms_from_zero=True,
    ),
    "gemma3": _CASE3,
    "gemma3-in-a-model-of-images": replace(_CASE3, is_inside=True),
    "gemma4-small": _CASE4,
    "gemma4-large": replace(_CASE4, extra=_LARGE4),
    "gemma4-experts": replace(_CASE4, extra=_EXPERTS4),
    "gemma4-in-a-model-of-images": replace(_CASE4, is_inside=True),
    "gemma4-unified": _UNIFIED4,
    "gemma4-unified-in-a-model-of-images": replace(_UNIFIED4, is_inside=True),
}
