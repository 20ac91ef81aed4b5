"""Mamba 2 without attention."""

from __future__ import annotations

from typing import Any

import torch

from families.case import Case

_FILE: dict[str, Any] = dict.fromkeys(
    ("num_attention_heads", "num_key_value_heads", "intermediate_size", "max_position_embeddings", "layer_types")
)
_SIZES = {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 2, "chunk_size": 32, "eos_token_id": 0}


def _as_codestral(tensors: dict[str, torch.Tensor]) -> None:
    """Name the tensors as in the one file of Codestral Mamba."""
    for name in list(tensors):
        tensors[f"model.{name}"] = tensors.pop(name)


CASES = {
    "mamba2": Case(kind="Mamba2", extra=_SIZES, file=_FILE),
    "mamba2-codestral": Case(
        kind="Mamba2",
        extra={**_SIZES, "n_groups": 1, "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False},
        file=_FILE,
        tensors=_as_codestral,
    ),
}
