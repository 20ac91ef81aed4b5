"""Copies of a family's tiny model: with other weights, and with a layer for multi-token prediction."""

# pyright: basic
# torch and safetensors are typed in part only.

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def disturbed(folder: Path, copy: Path, *, noise: float = 0.02) -> Path:
    """Write a draft model, each weight of which is the model's times a number near one."""
    shutil.copytree(folder, copy)
    generator, tensors = torch.Generator().manual_seed(11), load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = tensor * (1 + noise * torch.randn(tensor.shape, generator=generator))
    save_file(tensors, copy / "model.safetensors")
    return copy


def with_next_prediction(folder: Path, copy: Path) -> Path:
    """Write the model with a layer that drafts, in the naming of Qwen: its last layer with attention, as below."""
    shutil.copytree(folder, copy)
    tensors = load_file(folder / "model.safetensors")
    last = max((name for name in tensors if name.endswith(".self_attn.o_proj.weight")), key=_layer_number)
    prefix = last.removesuffix("self_attn.o_proj.weight")
    norm = next(x for name, x in tensors.items() if name.endswith("model.norm.weight"))
    size = norm.numel()
    more = {name.replace(prefix, "mtp.layers.0."): x.clone() for name, x in tensors.items() if prefix in name}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        more[f"mtp.{name}.weight"] = torch.zeros(size)  # stored less one
    more["mtp.norm.weight"] = norm.clone()
    more["mtp.fc.weight"] = torch.cat([0.5 * torch.eye(size), torch.eye(size)], dim=1)
    save_file(tensors | more, copy / "model.safetensors")
    return copy


def _layer_number(name: str) -> int:
    return int(name.partition("layers.")[2].partition(".")[0])


def with_prediction(folder: Path, copy: Path) -> Path:
    """Write the model with a layer that drafts, in the naming of DeepSeek and GLM: its last layer, with more tensors.

    The layer's input is half of its token's embedding and half of the state before it, so it drafts what the last layer
    would say, which is sometimes right.
    """
    shutil.copytree(folder, copy)
    config = json.loads((folder / "config.json").read_text())
    tensors, number = load_file(folder / "model.safetensors"), config["num_hidden_layers"]
    last, own = f"model.layers.{number - 1}.", f"model.layers.{number}."
    size = tensors["model.norm.weight"].numel()
    more: dict[str, Tensor] = {name.replace(last, own): x.clone() for name, x in tensors.items() if last in name}
    for name in ("enorm", "hnorm"):
        more[f"{own}{name}.weight"] = torch.ones(size)
    more[f"{own}shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    more[f"{own}eh_proj.weight"] = torch.cat([0.5 * torch.eye(size), torch.eye(size)], dim=1)
    save_file(tensors | more, copy / "model.safetensors")
    config = {**config, "num_nextn_predict_layers": 1}
    config.pop("num_mtp_layers", None)
    (copy / "config.json").write_text(json.dumps(config))
    return copy
