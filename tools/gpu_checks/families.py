"""Checks of small random models of each family."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from pathlib import Path

import torch

from gpu_checks.engine import compare_logits
from gpu_checks.host import Failed, Host, Skipped

_SHAPE = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512,
}  # fmt: skip
_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")


def check_families(host: Host) -> str:
    """Random models of each family, without windows, have the CPU runner's logits."""
    if importlib.util.find_spec("transformers") is None:
        raise Skipped("the package transformers is not installed")
    found: list[str] = []
    for family in _FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            _save(family, folder)
            try:
                compare_logits(host, Path(folder))
            except Exception as error:  # the remaining families still run
                found.append(f"{family}: {error}")
    if found:
        raise Failed("; ".join(found))
    return ", ".join(_FAMILIES)


def _save(family: str, folder: str) -> None:
    transformers = importlib.import_module("transformers")
    config = getattr(transformers, f"{family}Config")(**_SHAPE, sliding_window=None)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)  # transformers initializes biases to 0
    model.save_pretrained(folder)
