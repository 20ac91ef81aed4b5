"""Folders of adapters with random numbers, made by PEFT itself."""

# pyright: basic
# torch and peft are typed in part only.

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import torch

from pagewood.engine.adapters.modules import ModelModules

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
"""Parameters of all experts of a layer."""


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
