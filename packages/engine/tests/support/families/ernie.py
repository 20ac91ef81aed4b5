"""ERNIE, and MiniMax."""

from __future__ import annotations

from families.case import Case

_ERNIE = {
    "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 48, "moe_num_shared_experts": 1,
}  # fmt: skip
_MINIMAX = {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8}
_END = {"bos_token_id": 1, "eos_token_id": 0}
CASES = {
    "ernie4.5": Case(kind="Ernie4_5", extra={"head_dim": 8, "use_bias": True}),
    "ernie4.5-moe": Case(kind="Ernie4_5_Moe", extra=_ERNIE),
    "ernie4.5-moe-biases": Case(kind="Ernie4_5_Moe", extra={**_ERNIE, "use_bias": True}),
    "minimax-m2": Case(kind="MiniMaxM2", extra={**_MINIMAX, **_END}),
}
