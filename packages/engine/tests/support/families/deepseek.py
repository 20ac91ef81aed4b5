"""DeepSeek."""

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
    "first_k_dense_replace": 3,
}
_YARN = rope(
    "yarn", factor=8.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=0.7, beta_fast=32, beta_slow=1
)

_EXPERTS = {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "num_mtp_layers": 0}

CASES = {
    "deepseek2-dense": Case(kind="DeepseekV2", extra={**_SIZES, "q_lora_rank": None}),
    "deepseek3-dense": Case(
        kind="DeepseekV3",
        extra={**_SIZES, **_YARN, "attention_bias": True, "num_mtp_layers": 0, "rms_norm_eps": 1e-2},
    ),
    "deepseek3-halves": Case(kind="DeepseekV3", extra={**_SIZES, "rope_interleave": False, "num_mtp_layers": 0}),
    "deepseek32-dense": Case(
        kind="DeepseekV32", is_long=True, extra={**_SIZES, "index_topk": 160, "index_n_heads": 2, "index_head_dim": 16}
    ),
    "deepseek2-experts": Case(
        kind="DeepseekV2",
        extra={**_SIZES, **_EXPERTS, "topk_method": "group_limited_greedy", "routed_scaling_factor": 3.0},
    ),
    "deepseek3-experts": Case(kind="DeepseekV3", extra={**_SIZES, **_EXPERTS, "n_shared_experts": 2}),
}
