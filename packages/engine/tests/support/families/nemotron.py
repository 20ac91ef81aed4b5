"""Nemotron."""

from __future__ import annotations

from families.case import Case

CASES = {
    "nemotron": Case(kind="Nemotron", extra={"eos_token_id": 0, "bos_token_id": 0}, norms_from_zero=True),
    "nemotron-biases": Case(
        kind="Nemotron",
        extra={
            "eos_token_id": 0, "bos_token_id": 0, "attention_bias": True, "mlp_bias": True, "head_dim": 24,
            "partial_rotary_factor": 0.25,
        },
        norms_from_zero=True,
    ),
}  # fmt: skip
