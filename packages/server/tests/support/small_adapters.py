"""Adapters of the embedded model with random numbers."""

# pyright: basic
# safetensors has no types.

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

_SIZES = {"self_attn.q_proj": (192, 256), "mlp.down_proj": (576, 192)}
"""Inputs and outputs of modules."""


def write_adapter(folder: Path, seed: int, *, size: float = 0.6) -> None:
    """Write an adapter of rank 4, whose numbers have this size."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": [name.split(".")[1] for name in _SIZES]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    rng, tensors = np.random.default_rng(seed), dict[str, np.ndarray]()
    for layer in range(4):
        for name, (inputs, outputs) in _SIZES.items():
            place = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{place}.lora_A.weight"] = rng.normal(0, size, (4, inputs)).astype(np.float32)
            tensors[f"{place}.lora_B.weight"] = rng.normal(0, size, (outputs, 4)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
