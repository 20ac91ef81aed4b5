"""GLM."""

from __future__ import annotations

from families.case import Case

CASES = {
    "glm": Case(kind="Glm", extra={"head_dim": 16, "eos_token_id": 0, "attention_bias": False}),
    "glm4": Case(kind="Glm4", extra={"head_dim": 8, "eos_token_id": 0}),
}
