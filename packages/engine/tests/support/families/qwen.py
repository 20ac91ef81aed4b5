"""Qwen."""

from __future__ import annotations

from families.case import Case
from families.ropes import rope

_END = {"eos_token_id": 0, "bos_token_id": 1}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}

_DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 20, "linear_conv_kernel_dim": 4,
}  # fmt: skip
CASES = {
    "qwen2": Case(kind="Qwen2", extra={"tie_word_embeddings": True}),
    "qwen2-windows": Case(
        kind="Qwen2", extra={"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    ),
    "qwen3": Case(kind="Qwen3", extra={"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-yarn-stretched": Case(
        kind="Qwen3",
        is_long=True,
        extra={
            "head_dim": 16,
            "max_position_embeddings": 40,
            **rope("yarn", factor=4.0, original_max_position_embeddings=40),
        },
    ),
    "qwen2.5-vl": Case(
        kind="Qwen2_5_VL",
        config="Qwen2_5_VLTextConfig",
        is_inside=True,
        extra={**_END, **rope("default", mrope_section=[2, 3, 3])},
    ),
    "qwen3-vl": Case(
        kind="Qwen3VL",
        config="Qwen3VLTextConfig",
        is_inside=True,
        extra={**_END, "head_dim": 16, **rope("default", mrope_section=[4, 2, 2], mrope_interleaved=True)},
    ),
    "qwen3-vl-moe": Case(
        kind="Qwen3VLMoe",
        config="Qwen3VLMoeTextConfig",
        is_inside=True,
        extra={
            **_END,
            **_EXPERTS,
            "head_dim": 16,
            "mlp_only_layers": [1],
            **rope("default", mrope_section=[4, 2, 2], mrope_interleaved=True),
        },
    ),
    "qwen3-windows": Case(
        kind="Qwen3",
        extra={
            "head_dim": 8,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 11,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen2-moe": Case(
        kind="Qwen2Moe",
        extra={**_EXPERTS, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2, "num_hidden_layers": 4},
    ),
    "qwen3-moe": Case(
        kind="Qwen3Moe", extra={**_EXPERTS, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1]}
    ),
    "qwen3-next": Case(
        kind="Qwen3Next",
        norms_from_zero=True,
        extra={
            **_EXPERTS,
            **_DELTA,
            "head_dim": 16,
            "shared_expert_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3.5": Case(
        kind="Qwen3_5",
        config="Qwen3_5TextConfig",
        norms_from_zero=True,
        extra={**_DELTA, "head_dim": 16, "linear_num_value_heads": 2, "num_hidden_layers": 4, "layer_types": None},
    ),
    "qwen3.5-vl": Case(
        kind="Qwen3_5",
        config="Qwen3_5TextConfig",
        is_inside=True,
        norms_from_zero=True,
        extra={**_END, **_DELTA, "head_dim": 16, "linear_num_value_heads": 2},
    ),
    "qwen3.5-vl-moe": Case(
        kind="Qwen3_5Moe",
        config="Qwen3_5MoeTextConfig",
        is_inside=True,
        norms_from_zero=True,
        extra={**_END, **_EXPERTS, **_DELTA, "head_dim": 16, "shared_expert_intermediate_size": 40},
    ),
    "qwen3.5-moe": Case(
        kind="Qwen3_5Moe",
        config="Qwen3_5MoeTextConfig",
        norms_from_zero=True,
        extra={**_EXPERTS, **_DELTA, "head_dim": 16, "shared_expert_intermediate_size": 40},
    ),
}
