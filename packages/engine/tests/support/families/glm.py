"""GLM."""

from __future__ import annotations

from families.case import Case

CASES = {
    "glm": Case(kind="Glm", extra={"head_dim": 16, "eos_token_id": 0, "attention_bias": False}),
    "glm4": Case(kind="Glm4", extra={"head_dim": 8, "eos_token_id": 0}),
    "glm4-moe": Case(
        kind="Glm4Moe",
        extra={
            "head_dim": 16, "eos_token_id": 0, "attention_bias": True, "use_qk_norm": True, "n_routed_experts": 6,
            "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_mtp_layers": 0, "routed_scaling_factor": 1.5,
        },
    ),
}  # fmt: skip
