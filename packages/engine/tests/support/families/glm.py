"""GLM."""

from __future__ import annotations

from families.case import Case

_EXPERTS = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5, "n_group": 2, "topk_group": 1,
}  # fmt: skip
CASES = {
    "glm4-moe": Case(kind="Glm4Moe", extra={**_EXPERTS, "head_dim": 16, "use_qk_norm": True, "attention_bias": True}),
    "glm": Case(kind="Glm", extra={"head_dim": 16, "eos_token_id": 0, "attention_bias": False}),
    "glm4": Case(kind="Glm4", extra={"head_dim": 8, "eos_token_id": 0}),
}
