"""Folders of tiny models with random weights, of every supported architecture, and of drafters for them.

All have the same vocabulary, whose token 0 ends a text, and heads of the same size, so that one kernel computes them.
"""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from scratch import scratch_folder

VOCAB_SIZE, SIZE, HEAD_DIM, WIDTH = 60, 32, 16, 48
NUM_HEADS, NUM_KV_HEADS = 4, 2
DRAFT_VOCAB_SIZE = 40

_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 9}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "mimo": ("Qwen2", {}),
    "olmo2": ("Olmo2", {}),
    "gemma3": ("Gemma3", {"sliding_window": 7, "sliding_window_pattern": 2, "query_pre_attn_scalar": 20}),
}
ARCHITECTURES = tuple(_MODELS)
_EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "n_group": 2, "topk_group": 1,
}  # fmt: skip
_RANK, _QUERY_RANK, _PLAIN, _ROTATED, _VALUE = 16, 12, 8, 4, 8
_MODELS |= {
    "glm4-moe": ("Glm4Moe", {**_EXPERTS, "use_qk_norm": True, "num_mtp_layers": 0}),
    "deepseek3": (
        "DeepseekV3",
        {
            **_EXPERTS, "kv_lora_rank": _RANK, "q_lora_rank": _QUERY_RANK, "qk_nope_head_dim": _PLAIN,
            "qk_rope_head_dim": _ROTATED, "v_head_dim": _VALUE, "num_mtp_layers": 0,
        },
    ),
    "falcon-h1": ("FalconH1", {"mamba_d_ssm": 48, "mamba_n_heads": 4, "mamba_d_state": 16}),
}  # fmt: skip
WITH_EXPERTS = ("glm4-moe", "deepseek3")
"""Those whose layers for multi-token prediction have experts."""


@cache
def model_folder(architecture: str, *, seed: int = 0, noise: float = 0.0, has_mtp: bool = False) -> Path:
    """Write a model with random weights; `noise` disturbs them, and `has_mtp` adds a layer for multi-token prediction.

    `transformers` has no MiMo: its decoder is that of Qwen2, and its extra layers have names of their own.
    """
    kind, extra = _MODELS[architecture]
    torch.manual_seed(seed)
    config_class = "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config"
    config: Any = getattr(transformers, config_class)(
        vocab_size=VOCAB_SIZE, hidden_size=SIZE, intermediate_size=WIDTH, num_hidden_layers=2, head_dim=HEAD_DIM,
        num_attention_heads=NUM_HEADS, num_key_value_heads=NUM_KV_HEADS, max_position_embeddings=256,
        initializer_range=0.3, bos_token_id=None, eos_token_id=0, **extra,
    )  # fmt: skip
    folder = scratch_folder()
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * torch.randn_like(parameter)
    model.save_pretrained(folder)
    values: dict[str, Any] = {}
    if architecture == "mimo":
        values = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    if has_mtp:
        values |= {"num_nextn_predict_layers": 1, "num_mtp_layers": None}
        tensors = load_file(folder / "model.safetensors") | _mtp_layer(architecture)
        save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_config_of(folder) | values))
    return folder


@cache
def head_folder(architecture: str, *, seed: int = 0) -> Path:
    """Write an EAGLE-3 head with random weights for the model, which drafts a part of its vocabulary."""
    return random_head(_config_of(model_folder(architecture)), seed=100 + seed)


def random_head(config: dict[str, Any], *, seed: int) -> Path:
    """Write an EAGLE-3 head with random weights for a model with this configuration."""
    torch.manual_seed(seed)
    size, ids = config["hidden_size"], torch.randperm(config["vocab_size"])[:DRAFT_VOCAB_SIZE].sort().values
    tensors = {
        "fc.weight": torch.randn(size, 3 * size) * 0.2,
        "midlayer.hidden_norm.weight": 1 + torch.randn(size) * 0.2,
        "norm.weight": 1 + torch.randn(size) * 0.2,
        "lm_head.weight": torch.randn(DRAFT_VOCAB_SIZE, size),
        "d2t": ids - torch.arange(DRAFT_VOCAB_SIZE),
        **_layer("midlayer", 2 * size, size=size),
    }
    return _head(config, tensors)


def following(token: int) -> int:
    """Return what the cyclic model generates after a token: the tokens are one cycle."""
    return (token + 7) % VOCAB_SIZE


def num_right(token: int, count: int) -> int:
    """Return how many of `count` drafts after a token are right, if the head of the cyclic model makes them."""
    for number in range(count):
        if token % 5 == 0:
            return number
        token = following(token)
    return count


@cache
def cyclic_folders() -> tuple[Path, Path]:
    """Write a model that continues a token with `following`, and an EAGLE-3 head that does so except after every fifth.

    Hidden states are one-hot. The model computes the next token from the last one alone; the head computes it from the
    hidden state that it is given, so drafts from the state of another position or row are wrong.
    """
    torch.manual_seed(7)
    size = VOCAB_SIZE
    step, flawed = torch.zeros(size, size), torch.zeros(size, size)
    for token in range(size):
        step[following(token), token] = 1.0  # step @ one_hot(token) == one_hot(following(token))
        flawed[following(token) if token % 5 else token, token] = 1.0
    config: Any = transformers.LlamaConfig(
        vocab_size=size, hidden_size=size, intermediate_size=size, num_hidden_layers=2, head_dim=HEAD_DIM,
        num_attention_heads=NUM_HEADS, num_key_value_heads=NUM_KV_HEADS, max_position_embeddings=256,
        bos_token_id=None, eos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.copy_(20.0 * step)
    folder = scratch_folder()
    model.save_pretrained(folder)
    keys = HEAD_DIM * NUM_KV_HEADS
    eye = torch.eye(size)
    tensors = {
        "fc.weight": torch.cat([torch.zeros(size, size), eye, torch.zeros(size, size)], dim=1),
        "midlayer.hidden_norm.weight": torch.ones(size),
        "midlayer.input_layernorm.weight": torch.ones(size),
        "midlayer.post_attention_layernorm.weight": torch.ones(size),
        "midlayer.self_attn.q_proj.weight": torch.randn(HEAD_DIM * NUM_HEADS, 2 * size),
        "midlayer.self_attn.k_proj.weight": torch.randn(keys, 2 * size),
        "midlayer.self_attn.v_proj.weight": torch.randn(keys, 2 * size),
        "midlayer.self_attn.o_proj.weight": torch.zeros(size, HEAD_DIM * NUM_HEADS),
        "midlayer.mlp.gate_proj.weight": eye,
        "midlayer.mlp.up_proj.weight": eye,
        "midlayer.mlp.down_proj.weight": 10.0 * step,
        "norm.weight": torch.ones(size),
        "lm_head.weight": 20.0 * flawed,
    }
    return folder, _head(_config_of(folder), tensors, draft_vocab_size=size, norm_before_residual=True)


def _head(
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    *,
    draft_vocab_size: int = DRAFT_VOCAB_SIZE,
    norm_before_residual: bool = False,
) -> Path:
    folder = scratch_folder()
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    values = {
        **config,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 1],
        "norm_before_residual": norm_before_residual,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": None,
        "hidden_act": "silu",
        "hidden_activation": None,
        "query_pre_attn_scalar": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def _layer(prefix: str, width: int, *, size: int = SIZE, has_biases: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a decoder layer of `size` whose attention reads `width` numbers."""
    queries, keys = HEAD_DIM * NUM_HEADS, HEAD_DIM * NUM_KV_HEADS
    shapes = {
        "self_attn.q_proj": (queries, width), "self_attn.k_proj": (keys, width), "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (size, queries), "mlp.gate_proj": (WIDTH, size), "mlp.up_proj": (WIDTH, size),
        "mlp.down_proj": (size, WIDTH),
    }  # fmt: skip
    tensors = {f"{prefix}.{name}.weight": torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}.{name}.weight"] = 1 + torch.randn(size) * 0.2
    if has_biases:
        for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            tensors[f"{prefix}.self_attn.{name}.bias"] = torch.randn(rows) * 0.2
    return tensors


def _mtp_layer(architecture: str) -> dict[str, Tensor]:
    prefix = "model.mtp_layers.0" if architecture == "mimo" else "model.layers.2"
    names = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj")
    if architecture != "mimo":
        names = ("enorm", "hnorm", "shared_head.norm", "eh_proj")
    *norms, projection = names
    layer = _layer(prefix, SIZE, has_biases=architecture == "mimo")
    if architecture in WITH_EXPERTS:
        layer = {name: x for name, x in layer.items() if ".mlp." not in name} | _experts(f"{prefix}.mlp")
    if architecture == "glm4-moe":
        layer |= {f"{prefix}.self_attn.{name}_norm.weight": 1 + torch.randn(HEAD_DIM) * 0.2 for name in "qk"}
    if architecture == "deepseek3":
        layer = {name: x for name, x in layer.items() if ".self_attn." not in name} | _latents(f"{prefix}.self_attn")
    return {
        **layer,
        **{f"{prefix}.{name}.weight": 1 + torch.randn(SIZE) * 0.2 for name in norms},
        f"{prefix}.{projection}.weight": torch.randn(SIZE, 2 * SIZE) * 0.2,
    }


def _experts(prefix: str) -> dict[str, Tensor]:
    size = _EXPERTS["moe_intermediate_size"]
    blocks = [f"{prefix}.experts.{i}" for i in range(_EXPERTS["n_routed_experts"])] + [f"{prefix}.shared_experts"]
    shapes = {"gate_proj": (size, SIZE), "up_proj": (size, SIZE), "down_proj": (SIZE, size)}
    return {
        f"{prefix}.gate.weight": torch.randn(_EXPERTS["n_routed_experts"], SIZE) * 0.2,
        f"{prefix}.gate.e_score_correction_bias": torch.randn(_EXPERTS["n_routed_experts"]) * 0.2,
        **{f"{block}.{name}.weight": torch.randn(shape) * 0.2 for block in blocks for name, shape in shapes.items()},
    }


def _latents(prefix: str) -> dict[str, Tensor]:
    shapes = {
        "q_a_proj": (_QUERY_RANK, SIZE), "q_b_proj": (NUM_HEADS * (_PLAIN + _ROTATED), _QUERY_RANK),
        "kv_a_proj_with_mqa": (_RANK + _ROTATED, SIZE), "kv_b_proj": (NUM_HEADS * (_PLAIN + _VALUE), _RANK),
        "o_proj": (SIZE, NUM_HEADS * _VALUE),
    }  # fmt: skip
    norms = {"q_a_layernorm": _QUERY_RANK, "kv_a_layernorm": _RANK}
    return {
        **{f"{prefix}.{name}.weight": torch.randn(shape) * 0.2 for name, shape in shapes.items()},
        **{f"{prefix}.{name}.weight": 1 + torch.randn(size) * 0.2 for name, size in norms.items()},
    }


def _config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())
