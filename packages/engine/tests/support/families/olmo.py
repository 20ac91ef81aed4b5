"""OLMo."""

from __future__ import annotations

from families.case import Case

CASES = {
    "olmo": Case(kind="Olmo", extra={"eos_token_id": 0}),
    "olmo2": Case(kind="Olmo2", extra={"eos_token_id": 0}),
    "olmo2-one-kv-head": Case(
        kind="Olmo2", extra={"eos_token_id": 0, "num_key_value_heads": 1, "attention_bias": True}
    ),
    "olmoe": Case(kind="Olmoe", extra={"eos_token_id": 0, "num_experts": 5, "num_experts_per_tok": 2}),
}
