"""Nemotron."""

from __future__ import annotations

from families.case import Case

_STATES = {
    "mamba_num_heads": 4, "mamba_head_dim": 24, "ssm_state_size": 16, "n_groups": 2, "head_dim": 16, "chunk_size": 32,
    "rescale_prenorm_residual": False, "moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 40,
}  # fmt: skip
CASES = {
    "nemotron": Case(kind="Nemotron", extra={"eos_token_id": 0, "bos_token_id": 0}, norms_from_zero=True),
    "nemotron-biases": Case(
        kind="Nemotron",
        extra={
            "eos_token_id": 0, "bos_token_id": 0, "attention_bias": True, "mlp_bias": True, "head_dim": 24,
            "partial_rotary_factor": 0.25,
        },
        norms_from_zero=True,
    ),
    "nemotron-h": Case(
        kind="NemotronH",
        extra={
            **_STATES, "layers_block_type": ["mlp", "linear_attention", "full_attention", "linear_attention", "mlp"],
            "use_bias": True, "mlp_bias": True, "use_conv_bias": False,
        },
    ),
    "nemotron-h-moe": Case(
        kind="NemotronH",
        extra={
            **_STATES, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
            "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 2, "routed_scaling_factor": 1.7,
        },
        file={"layers_block_type": None, "hybrid_override_pattern": "ME*-E", "num_hidden_layers": 5},
    ),
    "nemotron-h-latents": Case(
        kind="NemotronH",
        extra={
            **_STATES, "layers_block_type": ["linear_attention", "moe", "full_attention"], "n_routed_experts": 5,
            "num_experts_per_tok": 3, "moe_latent_size": 32, "norm_topk_prob": False, "mlp_bias": True,
        },
    ),
}  # fmt: skip
