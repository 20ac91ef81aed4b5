"""Kimi Linear."""

from __future__ import annotations

from families.case import Case

_SIZES = {
    "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16, "moe_intermediate_size": 16,
    "num_local_experts": 6, "num_experts_per_tok": 3, "linear_num_heads": 4, "linear_head_dim": 20,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_key_value_heads": 4,
    "eos_token_id": 0, "bos_token_id": 1,
}  # fmt: skip
_FILE = {
    "layer_types": None, "mlp_layer_types": None, "linear_num_heads": None, "linear_head_dim": None,
    "linear_conv_kernel_dim": None, "first_k_dense_replace": 1, "moe_layer_freq": 1, "mla_use_nope": True,
    "head_dim": 72, "moe_router_activation_func": "sigmoid", "use_grouped_topk": True,
    "linear_attn_config": {
        "full_attn_layers": [2], "kda_layers": [1, 3], "num_heads": 4, "head_dim": 20, "short_conv_kernel_size": 4,
    },
}  # fmt: skip
CASES = {
    "kimi-linear": Case(kind="KimiLinear", extra=_SIZES, file=_FILE),
    "kimi-linear-groups": Case(
        kind="KimiLinear",
        extra={
            **_SIZES, "q_lora_rank": 20, "n_group": 2, "topk_group": 1, "linear_conv_kernel_dim": 3,
            "norm_topk_prob": False, "mlp_layer_types": ["sparse", "dense", "sparse"], "n_shared_experts": 2,
        },
    ),
}  # fmt: skip
