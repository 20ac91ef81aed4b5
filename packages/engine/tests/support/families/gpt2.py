"""GPT-2."""

from __future__ import annotations

from families.case import Case

CASES = {
    "gpt2": Case(
        kind="GPT2",
        model="GPT2LMHeadModel",
        extra={"n_inner": 80, "num_key_value_heads": 4, "eos_token_id": 0, "bos_token_id": 0},
    ),
}
