"""Llama, Mistral, SmolLM3, Seed-OSS, ERNIE and HunYuan."""

from __future__ import annotations

from families.case import Case
from families.ropes import rope

_END = {"eos_token_id": 0, "bos_token_id": 1}
_LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)

CASES = {
    "llama": Case(kind="Llama"),
    "llama-multi-head": Case(kind="Llama", extra={"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-one-kv-head": Case(kind="Llama", extra={"num_key_value_heads": 1, "head_dim": 8}),
    "llama-biases": Case(kind="Llama", extra={"attention_bias": True, "mlp_bias": True}),
    "llama-linear": Case(kind="Llama", extra=rope("linear", factor=3.0)),
    "llama-dynamic": Case(
        kind="Llama", extra={**rope("dynamic", factor=2.0), "max_position_embeddings": 24}, by_token=True
    ),
    "llama-yarn": Case(kind="Llama", extra=rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "llama-linear-stretched": Case(kind="Llama", extra={**rope("linear", factor=4.0), "max_position_embeddings": 40}),
    "llama-llama3": Case(kind="Llama", extra={**_LLAMA3, "tie_word_embeddings": True}),
    "mistral-window": Case(kind="Mistral", extra={"sliding_window": 9, "head_dim": 8}),
    "ministral3": Case(
        kind="Ministral3",
        extra={
            "head_dim": 16,
            **rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=16,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.3,
            ),
        },
    ),
    "mistral3": Case(
        kind="Mistral3",
        config="Ministral3Config",
        extra={
            "head_dim": 16,
            **rope("yarn", factor=4.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.1),
        },
        is_inside=True,
    ),
    "smollm3": Case(kind="SmolLM3", extra={"no_rope_layer_interval": 2, "tie_word_embeddings": True, **_END}),
    "ernie4.5": Case(kind="Ernie4_5", extra={"head_dim": 8, "use_bias": True}),
    "hunyuan": Case(
        kind="HunYuanDenseV1",
        extra={"head_dim": 16, **rope("dynamic", alpha=50.0, factor=1.0, beta_fast=32, mscale=1.0)},
    ),
    "seed-oss": Case(kind="SeedOss", extra={"head_dim": 8, "attention_out_bias": True}),
    "mistral-no-window": Case(kind="Mistral", extra={"sliding_window": None}),
    "mixtral": Case(kind="Mixtral", extra={"num_local_experts": 4, "intermediate_size": 40, "head_dim": 16}),
}
