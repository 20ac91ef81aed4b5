"""A tiny random target with two drafting heads, and their drafts in plain torch."""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from pagewood.engine.model_folder.load import load_head, load_model
from pagewood.engine.models.ops import Ops
from scratch import scratch_folder
from stand_ins.torch_decoding import SequenceAttention, rotations_at, torch_ops
from tiny_models import model_folder

DIM, SIZE, VOCAB, DRAFT_VOCAB = 16, 32, 50, 30
KINDS = ["eagle", "mtp"]
"""The targets of others have more: "experts", and "latents" with experts; so have their heads."""


@cache
def folders() -> tuple[Path, Path]:
    """Return the folders of a target with a layer for multi-token prediction, and of an EAGLE-3 head."""
    target, head = scratch_folder(), scratch_folder()
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": SIZE, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": DIM, "initializer_range": 0.3,
    }  # fmt: skip
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    names = {"self_attn.q_proj": (64, 1), "self_attn.k_proj": (32, 1), "self_attn.v_proj": (32, 1)}
    shapes = {"self_attn.o_proj": (SIZE, 64), "mlp.gate_proj": (48, SIZE), "mlp.up_proj": (48, SIZE)}
    shapes |= {"mlp.down_proj": (SIZE, 48)}

    def layer(prefix: str, width: int) -> dict[str, Tensor]:
        tensors = {name: torch.randn(rows, width) * 0.2 for name, (rows, _) in names.items()}
        tensors |= {name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}
        tensors |= {name: 1 + torch.randn(SIZE) * 0.2 for name in ("input_layernorm", "post_attention_layernorm")}
        return {f"{prefix}.{name}.weight": tensor for name, tensor in tensors.items()}

    mtp = layer("model.layers.4", SIZE)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        mtp[f"model.layers.4.{name}.weight"] = 1 + torch.randn(SIZE) * 0.2
    mtp["model.layers.4.eh_proj.weight"] = torch.randn(SIZE, 2 * SIZE) * 0.2
    model.save_pretrained(target)
    save_file({**{k: v.contiguous() for k, v in model.state_dict().items()}, **mtp}, target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))

    ids = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    own = {
        "fc.weight": torch.randn(SIZE, 3 * SIZE) * 0.2,
        "midlayer.hidden_norm.weight": 1 + torch.randn(SIZE) * 0.2,
        "norm.weight": 1 + torch.randn(SIZE) * 0.2,
        "lm_head.weight": torch.randn(DRAFT_VOCAB, SIZE),
        "d2t": ids - torch.arange(DRAFT_VOCAB),
        **layer("midlayer", 2 * SIZE),
    }
    save_file(own, head / "model.safetensors")
    values = {"num_hidden_layers": 1, "draft_vocab_size": DRAFT_VOCAB, "eagle_aux_hidden_state_layer_ids": [0, 1, 3]}
    (head / "config.json").write_text(json.dumps({**config, **values, "architectures": ["LlamaForCausalLMEagle3"]}))
    return target, head


def folders_of(kind: str) -> tuple[Path, Path]:
    """Return the folders of the target and of its head."""
    if kind in ("latents", "experts"):
        folder = model_folder("deepseek3" if kind == "latents" else "glm4-moe", has_mtp=True)
        return folder, folder
    target, head = folders()
    return target, head if kind == "eagle" else target


def load(kind: str, ops: Ops[Any]) -> tuple[Any, Any]:
    """Return the target and its head."""
    target_folder, head_folder = folders_of(kind)
    target = load_model(target_folder, ops)
    return target, load_head(head_folder, target, ops)


@torch.inference_mode()
def drafted(kind: str, tokens: list[int], count: int = 1, *, begin: int = 0) -> tuple[list[int], Tensor]:
    """Return the greedy drafts after `tokens` of the head in plain torch, and its state at the last token.

    Its attention begins at position `begin`.
    """
    target, head = load(kind, torch_ops())
    ids, places = torch.tensor(tokens), list(range(len(tokens) - 1))
    one = torch.tensor([len(places) - 1])
    attention = SequenceAttention.of(target.config).at(places)
    _, states = target.states(
        ids[:-1], rotations_at(target.ropes, places), attention, one, captured=head.config.captured
    )
    attention, drafts, position = SequenceAttention.of(head.config.layer, begin=begin), [], len(places)
    logits, state = head(ids[1:], head.features(states), rotations_at(head.ropes, places), attention.at(places), one)
    kept = state[0].clone()
    while True:
        number = logits.argmax(-1)
        token = number if head.token_map is None else head.token_map[number]
        drafts.append(int(token))
        if len(drafts) == count:
            return drafts, kept
        rotation, first = rotations_at(head.ropes, [position]), torch.tensor([0])
        logits, state = head(token, state, rotation, attention.at([position]), first)
        position += 1


def prompts_of(num: int) -> list[list[int]]:
    """Return prompts of different lengths."""
    return [np.random.default_rng(i).integers(0, VOCAB, 3 + 5 * i).tolist() for i in range(num)]
