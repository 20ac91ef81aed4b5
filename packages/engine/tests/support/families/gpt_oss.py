"""gpt-oss."""

from __future__ import annotations

from families.case import Case
from families.ropes import rope

_YARN = rope(
    "yarn", factor=4.0, original_max_position_embeddings=64, truncate=False, beta_fast=32.0, beta_slow=1.0
)  # fmt: skip

CASES = {
    "gpt-oss": Case(
        kind="GptOss",
        extra={
            **_YARN,
            "head_dim": 16,
            "sliding_window": 9,
            "intermediate_size": 40,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
        },
    ),
}
