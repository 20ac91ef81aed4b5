"""OLMo."""

from __future__ import annotations

import torch
from torch import Tensor

from families.case import Case


def _filters_apart(tensors: dict[str, Tensor]) -> None:
    """Divide filters of convolutions by what they are of; `transformers` writes three parts of one size."""
    for last in [name for name in tensors if name.endswith(".v_conv1d.weight")]:
        names = [last.replace(".v_conv1d.", f".{kind}_conv1d.") for kind in "qkv"]
        sizes = [len(tensors[name.replace("_conv1d", "_proj")]) for name in names]
        filters, start = torch.cat([tensors[name] for name in names]), 0
        for name, size in zip(names, sizes, strict=True):
            tensors[name] = filters[start : start + size].contiguous()
            start += size


_HYBRID = {"eos_token_id": 0, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
CASES = {
    "olmo": Case(kind="Olmo", extra={"eos_token_id": 0}),
    "olmo2": Case(kind="Olmo2", extra={"eos_token_id": 0}),
    "olmo2-one-kv-head": Case(
        kind="Olmo2", extra={"eos_token_id": 0, "num_key_value_heads": 1, "attention_bias": True}
    ),
    "olmo3": Case(
        kind="Olmo3",
        extra={
            "eos_token_id": 0,
            "num_hidden_layers": 4,
            "sliding_window": 9,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "rope_theta": 5e5,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
    "olmo-hybrid": Case(
        kind="OlmoHybrid",
        tensors=_filters_apart,
        extra={**_HYBRID, "linear_key_head_dim": 12, "linear_value_head_dim": 20, "linear_num_value_heads": 4},
    ),
    "olmo-hybrid-rotated": Case(
        kind="OlmoHybrid",
        tensors=_filters_apart,
        extra={
            **_HYBRID, "linear_allow_neg_eigval": False, "num_hidden_layers": 4, "layer_types": None,
            "attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        },
    ),
    "olmoe": Case(kind="Olmoe", extra={"eos_token_id": 0, "num_experts": 5, "num_experts_per_tok": 2}),
}  # fmt: skip
