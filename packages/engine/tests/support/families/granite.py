"""Granite."""

from __future__ import annotations

from families.case import Case

_MULTIPLIERS = {
    "attention_multiplier": 0.11,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.5,
    "residual_multiplier": 0.6,
}
_FOUR = {
    **_MULTIPLIERS, "layer_types": ["full_attention"] * 3, "num_local_experts": 0, "num_experts_per_tok": 0,
    "shared_intermediate_size": 80, "intermediate_size": 96, "mamba_n_heads": 4, "mamba_d_head": 32,
}  # fmt: skip
_STATES = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}
CASES = {
    "granite": Case(kind="Granite", extra=_MULTIPLIERS),
    "granite-tied": Case(
        kind="Granite",
        extra={**_MULTIPLIERS, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 16},
    ),
    "granite4": Case(kind="GraniteMoeHybrid", extra={**_FOUR, "position_embedding_type": "rope"}),
    "granite4-unrotated": Case(
        kind="GraniteMoeHybrid",
        extra={**_FOUR, "tie_word_embeddings": True},
        file={"layer_types": ["attention"] * 3, "position_embedding_type": "nope"},
    ),
    "granite4-states": Case(
        kind="GraniteMoeHybrid",
        extra={**_FOUR, "layer_types": ["linear_attention", "full_attention", "linear_attention"], **_STATES},
    ),
    "granite4-groups": Case(
        kind="GraniteMoeHybrid",
        extra={
            **_FOUR, "layer_types": ["linear_attention", "full_attention", "linear_attention"], **_STATES,
            "mamba_n_groups": 2, "mamba_d_head": 32, "mamba_proj_bias": True, "mamba_conv_bias": False,
        },
        file={"layer_types": ["mamba", "attention", "mamba"]},
    ),
    "granite4-moe": Case(
        kind="GraniteMoeHybrid",
        extra={
            **_FOUR, **_STATES, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32,
            "shared_intermediate_size": 24, "position_embedding_type": "rope",
        },
    ),
    "granite-moe": Case(
        kind="GraniteMoe", extra={**_MULTIPLIERS, "num_local_experts": 5, "num_experts_per_tok": 2}
    ),
    "granite-moe-shared": Case(
        kind="GraniteMoeShared",
        extra={
            **_MULTIPLIERS, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32,
            "shared_intermediate_size": 24,
        },
    ),
}  # fmt: skip
