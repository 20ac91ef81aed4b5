"""Bamba and Falcon-H1."""

from __future__ import annotations

from families.case import Case

_STATES = {"mamba_n_heads": 4, "mamba_d_state": 16}
_MULTIPLIERS = {
    "embedding_multiplier": 1.7, "lm_head_multiplier": 0.6, "key_multiplier": 0.8, "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.7, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.9,
    "mlp_multipliers": [1.4, 0.8], "ssm_multipliers": [0.7, 1.3, 0.8, 1.2, 1.1],
}  # fmt: skip
_BIASES = {"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True}
CASES = {
    "bamba": Case(kind="Bamba", extra={**_STATES, "attn_layer_indices": [1]}),
    "bamba-groups": Case(
        kind="Bamba",
        extra={**_STATES, **_BIASES, "attn_layer_indices": [0], "mamba_n_groups": 2, "mamba_conv_bias": False},
        file={"attn_layer_indices": None, "layers_block_type": ["attention", "mamba", "mamba"]},
    ),
    "falcon-h1": Case(kind="FalconH1", extra={**_STATES, **_MULTIPLIERS, "mamba_d_ssm": 96}),
    "falcon-h1-norm-first": Case(
        kind="FalconH1",
        extra={
            **_STATES, **_MULTIPLIERS, **_BIASES, "mamba_d_ssm": None, "mamba_n_groups": 2, "mamba_rms_norm": True,
            "projectors_bias": True,
        },
    ),
    "falcon-h1-norm-last": Case(
        kind="FalconH1",
        extra={
            **_STATES, "mamba_d_ssm": 96, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 2,
            "mamba_conv_bias": False,
        },
    ),
}  # fmt: skip
