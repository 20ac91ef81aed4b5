"""GPT-NeoX."""

from __future__ import annotations

from families.case import Case

_EXTRA = {"num_key_value_heads": 4, "eos_token_id": 0, "rotary_pct": 0.5, "rotary_emb_base": 5e3}
CASES = {
    "gpt-neox": Case(kind="GPTNeoX", extra=_EXTRA),
    "gpt-neox-in-turn": Case(
        kind="GPTNeoX",
        extra={**_EXTRA, "use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True},
    ),
}
