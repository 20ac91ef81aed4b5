"""Llama, and Mistral."""

from __future__ import annotations

from families.case import Case
from families.ropes import rope

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
    "mistral-no-window": Case(kind="Mistral", extra={"sliding_window": None}),
    "mixtral": Case(kind="Mixtral", extra={"num_local_experts": 4, "intermediate_size": 40, "head_dim": 16}),
}
