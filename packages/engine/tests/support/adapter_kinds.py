"""What adapters are tested with: kinds of them, and families of models."""

from __future__ import annotations

from typing import Any

import numpy as np

from families.case import Case
from families.registry import CASES

TOKENS = np.random.default_rng(3).integers(0, 97, 45).tolist()
LAYOUTS = (
    "llama-biases",
    "gpt2",
    "gpt-neox",
    "phi3-window",
    "starcoder2",
    "gemma3",
    "granite4",
    "gpt-oss",
    "mixtral",
    "llama4",
)
"""Cases whose names or arrangements of modules differ; all others are slow."""
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 6},
    "rslora": {"r": 4, "lora_alpha": 6, "use_rslora": True},
    "patterns": {
        "r": 4, "lora_alpha": 6, "rank_pattern": {"q_proj": 2, r".*layers\.[12]\..*up_proj": 7},
        "alpha_pattern": {"v_proj": 3, "model.layers.0.mlp.down_proj": 11},
    },
    "biases": {"r": 4, "lora_alpha": 6, "bias": "lora_only"},
    "a bias of B": {"r": 4, "lora_alpha": 6, "lora_bias": True},
    "dora": {"r": 4, "lora_alpha": 6, "use_dora": True},
    "dora with biases": {"r": 4, "lora_alpha": 6, "use_dora": True, "bias": "lora_only"},
    "some modules": {"r": 40, "lora_alpha": 80, "target_modules": ["q_proj", "v_proj"]},
    "activated": {"r": 4, "lora_alpha": 6, "alora_invocation_tokens": TOKENS[20:23]},
    "both ends": {"r": 4, "target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "tokens": {"r": 4, "target_modules": ["q_proj"], "trainable_token_indices": [TOKENS[3], 5, TOKENS[9]]},
    "whole modules": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head", "up_proj"]},
    "by an expression": {"r": 4, "target_modules": r".*\.1\..*(k_proj|down_proj)"},
}  # fmt: skip


def can_be_compared(case: Case) -> bool:
    return not case.by_token and not case.is_long


COMPARED = [name for name, case in CASES.items() if can_be_compared(case)]
