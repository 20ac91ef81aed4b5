"""Cohere's Command R."""

from __future__ import annotations

from families.case import Case

CASES = {
    "cohere": Case(kind="Cohere", extra={"logit_scale": 0.3, "eos_token_id": 0, "bos_token_id": 0}),
    "cohere2": Case(
        kind="Cohere2",
        extra={
            "logit_scale": 0.3, "eos_token_id": 0, "bos_token_id": 0, "sliding_window": 9, "sliding_window_pattern": 3,
            "tie_word_embeddings": False,
        },
    ),
}  # fmt: skip
