"""DeepSeek, and GLM with latents."""

from __future__ import annotations

from families.case import Case
from families.ropes import rope

_SIZES = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.7,
}
_GROUPS = {"n_group": 4, "topk_group": 2}
_YARN = rope(
    "yarn", factor=8.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=0.7, beta_fast=32, beta_slow=1
)
_KIMI_YARN = {
    "factor": 8.0, "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 1.0,
    "beta_slow": 1.0,
}  # fmt: skip
_KIMI_FILE = {
    "model_type": "kimi_k2", "rope_parameters": None, "aux_loss_alpha": 0.001, "seq_aux": True, "ep_size": 1,
    "pretraining_tp": 1, "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 0, "num_mtp_layers": None,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
}  # fmt: skip

CASES = {
    "deepseek2": Case(kind="DeepseekV2", extra={**_SIZES, "q_lora_rank": None}),
    "deepseek2-groups": Case(
        kind="DeepseekV2", extra={**_SIZES, **_GROUPS, "topk_method": "group_limited_greedy", "attention_bias": True}
    ),
    "deepseek3": Case(
        kind="DeepseekV3",
        extra={**_SIZES, **_GROUPS, **_YARN, "attention_bias": True, "num_mtp_layers": 0, "rms_norm_eps": 1e-2},
    ),
    "deepseek3-dense": Case(
        kind="DeepseekV3",
        extra={**_SIZES, "first_k_dense_replace": 3, "rope_interleave": False, "num_mtp_layers": 0},
    ),
    "kimi-k2": Case(
        kind="DeepseekV3",
        extra={
            **_SIZES,
            **rope("yarn", **_KIMI_YARN),
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "num_mtp_layers": 0,
        },
        file={**_KIMI_FILE, "rope_scaling": {"type": "yarn", **_KIMI_YARN}, "rope_theta": 10000.0},
    ),
    "deepseek32": Case(
        kind="DeepseekV32",
        is_long=True,
        extra={**_SIZES, **_GROUPS, "index_topk": 160, "index_n_heads": 2, "index_head_dim": 16},
    ),
    "glm4-lite": Case(kind="Glm4MoeLite", extra={**_SIZES, "norm_topk_prob": False}),
}
