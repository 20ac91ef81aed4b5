"""Folders of adapters with random numbers, made by PEFT itself."""

# pyright: basic
# torch and peft are typed in part only.

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import torch

from families.case import build
from families.registry import CASES
from pagewood.engine.adapters.modules import ModelModules
from pagewood.engine.model_folder.adapter_modules import model_modules

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
"""Parameters of all experts of a layer."""
HEADS = {"head_dim": 64}
"""FlashInfer takes no smaller ones."""
LATENTS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
"""FlashInfer takes no others."""
References = Mapping[str | None, Any]
"""A model, and PEFT's ones by the name of the adapter."""


def write_adapter(reference: Any, folder: Path, *, seed: int = 0, **fields: Any) -> Any:
    """Save an adapter of `reference`, which is changed in place, and return the model with it.

    Every number is random: a new adapter would change nothing, because its B is zero.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(reference, peft.LoraConfig(task_type="CAUSAL_LM", **fields)).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
            elif ".modules_to_save." in name:
                parameter.add_(0.15 * torch.randn_like(parameter))
            elif "lora_" in name or (parameter.requires_grad and name.endswith(("bias", "delta.default"))):
                parameter.normal_(0.0, 0.15)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(str(folder))
    return model


def linear_names(reference: Any) -> list[str]:
    """Return the last names of the linear modules in the layers of a model."""
    found = {
        name.rpartition(".")[2]
        for name, module in reference.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D") and any(part.isdigit() for part in name.split("."))
    }
    return sorted(found)


def changeable(case: str, reference: Any, modules: ModelModules) -> dict[str, Any]:
    """Return the fields that let PEFT change all modules of a model that an adapter may change and PEFT can."""
    fields: dict[str, Any] = {"target_modules": changeable_names(case, reference, modules)}
    return {**fields, "target_parameters": EXPERTS} if modules.stacks else fields


def changeable_names(case: str, reference: Any, modules: ModelModules) -> list[str]:
    """Return the names of all modules of a model that an adapter may change and PEFT can."""
    linear = [
        one for one, module in reference.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D") or module is reference.get_input_embeddings()
    ]  # fmt: skip
    # PEFT renames feed-forwards of families with experts, also in a model without.
    has_experts = "deepseek3" in case or any(".experts" in one for one, _ in reference.named_parameters())
    of_mixers = ("self_attn", ".mixer.q_proj", ".mixer.k_proj", ".mixer.v_proj", ".mixer.in_proj")
    known = [one for one in linear if modules.places(one) and (not has_experts or any(own in one for own in of_mixers))]
    if reference.config.model_type in ("falcon_h1", "mamba2", "nemotron_h"):  # where PEFT refuses these
        known = [one for one in known if not one.endswith(".out_proj")]
    assert known
    return known


def write_mixture(folder: Path, name: str) -> References:
    """Write a model and three adapters, of all that can be changed, of all but experts, and of experts alone."""
    case = CASES[name]
    heads = HEADS if "head_dim" in case.extra else {"num_attention_heads": 1, "num_key_value_heads": 1}
    heads = LATENTS if "kv_lora_rank" in case.extra else heads
    chunk = {"attention_chunk_size": 256} if name == "llama4" else {}  # FlashInfer has no attention within chunks
    return write_adapters(folder, name, build(replace(case, extra={**case.extra, **heads, **chunk}), folder))


def write_adapters(folder: Path, name: str, reference: Any) -> References:
    """Write three adapters of a model, see `write_mixture`, of which one has no experts; return PEFT's models."""
    found: dict[str | None, Any] = {None: reference}
    modules = model_modules(folder)
    every = changeable(name, reference, modules)
    alone = {"target_modules": [], "target_parameters": EXPERTS[1:]} if modules.stacks else every
    dense = {"target_modules": every["target_modules"]}
    for seed, (adapter, fields) in enumerate({"a": every, "b": dense, "c": alone}.items()):
        own = {"r": 3 + seed, "lora_alpha": 6, **fields}
        found[adapter] = write_adapter(copy.deepcopy(reference), folder / adapter, seed=seed, **own)
    return found
