"""OLMo."""

from __future__ import annotations

from families.case import Case

CASES = {
    "olmo": Case(kind="Olmo", extra={"eos_token_id": 0}),
    "olmo2": Case(kind="Olmo2", extra={"eos_token_id": 0}),
    "olmo2-one-kv-head": Case(
        kind="Olmo2", extra={"eos_token_id": 0, "num_key_value_heads": 1, "attention_bias": True}
    ),
    "olmo3": Case(
        kind="Olmo3",
        extra={
            "eos_token_id": 0,
            "num_hidden_layers": 4,
            "sliding_window": 9,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "rope_theta": 5e5,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
    "olmoe": Case(kind="Olmoe", extra={"eos_token_id": 0, "num_experts": 5, "num_experts_per_tok": 2}),
}
