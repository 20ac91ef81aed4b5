"""LFM2."""

from __future__ import annotations

from families.case import Case

_SIZES = {"intermediate_size": 100, "block_multiple_of": 16, "layer_types": ["conv", "full_attention", "conv"]}
_EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "num_dense_layers": 1,
    "layer_types": ["conv", "full_attention", "conv"], "routed_scaling_factor": 1.3,
}  # fmt: skip
CASES = {
    "lfm2": Case(kind="Lfm2", extra=_SIZES),
    "lfm2-biases": Case(
        kind="Lfm2",
        extra={**_SIZES, "conv_bias": True, "conv_L_cache": 5, "block_auto_adjust_ff_dim": False},
        file={"layer_types": None, "full_attn_idxs": [1]},
    ),
    "lfm2-moe": Case(kind="Lfm2Moe", extra=_EXPERTS),
    "lfm2-moe-plain": Case(kind="Lfm2Moe", extra={**_EXPERTS, "use_expert_bias": False, "norm_topk_prob": False}),
}
