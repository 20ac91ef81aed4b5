"""How the converter of llama.cpp arranges the tensors of some architectures."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_BIAS_OF_CHOICE = "e_score_correction_bias"
_INPUTS_FIRST = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
_INSIDE, _IMAGES = re.compile(r"(model\.)?language_model\.(model\.)?"), re.compile(r".*(visual|vision|projector)")
_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up|down)_proj")
_GEMMA4 = re.compile(r"model\.layers\.(\d+)\.((?:experts|router)\.(?!proj)\w+)")
_GEMMA4_NAMES = {
    "experts.gate_up_proj": "ffn_gate_up_exps.weight", "experts.down_proj": "ffn_down_exps.weight",
    "router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale",
}  # fmt: skip
_HEADS = re.compile(r"(.*\.self_attn\.)([qkv])_proj\.(weight|bias)")
_FUSED = re.compile(r".*\.attention\.query_key_value\.(weight|bias)")


def converted(
    architecture: str,
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    splits_latents: bool = True,
    fuses_heads: bool = False,
) -> dict[str, Tensor]:
    """Return the tensors as the converter arranges them, under the names that it maps to GGUF's.

    Args:
        architecture: as llama.cpp calls it.
        weights: of a Hugging Face folder.
        config: its configuration.
        splits_latents: whether keys and values of latents are stored apart, as since April 2025.
        fuses_heads: whether queries, keys and values are one tensor, as ChatGLM's own checkpoints have them.
    """
    found: dict[str, Tensor] = {}
    if any(_IMAGES.match(name) for name in weights):
        own = {_INSIDE.sub("model.", name): tensor for name, tensor in weights.items() if not _IMAGES.match(name)}
        weights = {name.replace("model.lm_head", "lm_head"): tensor for name, tensor in own.items()}
    for name, tensor in weights.items():
        if architecture == "gpt2" and name.endswith(_INPUTS_FIRST):
            found[name] = tensor.T.contiguous()
        elif architecture == "gptneox" and _FUSED.fullmatch(name):
            heads = tensor.unflatten(0, (config["num_attention_heads"], 3, -1))
            found[name] = torch.cat([heads[:, part].flatten(0, 1) for part in range(3)])
        elif architecture == "gemma4" and (match := _GEMMA4.fullmatch(name)):
            found[f"blk.{match[1]}.{_GEMMA4_NAMES[match[2]]}"] = tensor
        elif architecture == "qwen3vlmoe" and (match := _EXPERTS.fullmatch(name)):
            halves = tensor.chunk(2, dim=1) if match[2] == "gate_up" else (tensor,)
            for part, numbers in zip(match[2].split("_"), halves, strict=True):
                found |= {f"{match[1]}.{i}.{part}_proj.weight": one.contiguous() for i, one in enumerate(numbers)}
        elif architecture == "llama4" and (match := _EXPERTS.fullmatch(name)):
            halves = tensor.transpose(1, 2).chunk(2, dim=1) if match[2] == "gate_up" else (tensor.transpose(1, 2),)
            for part, numbers in zip(match[2].split("_"), halves, strict=True):
                found |= {f"{match[1]}.{i}.{part}_proj.weight": one.contiguous() for i, one in enumerate(numbers)}
        elif fuses_heads and (match := _HEADS.fullmatch(name)):
            if match[2] == "q":
                parts = [weights[f"{match[1]}{kind}_proj.{match[3]}"] for kind in "qkv"]
                found[f"{match[1]}qkv_proj.{match[3]}"] = torch.cat(parts)
        elif name.endswith("kv_b_proj.weight") and splits_latents:
            heads = tensor.unflatten(0, (config["num_attention_heads"], -1))
            keys, values = heads.split([config["qk_nope_head_dim"], config["v_head_dim"]], dim=1)
            found[name.replace("kv_b_proj", "k_b_proj")] = keys.transpose(1, 2).contiguous()
            found[name.replace("kv_b_proj", "v_b_proj")] = values.contiguous()
        elif name.endswith(_BIAS_OF_CHOICE):
            found[name.replace(_BIAS_OF_CHOICE, "e_score_correction.bias")] = tensor.reshape(-1)
        else:
            found[name] = tensor
    return found
