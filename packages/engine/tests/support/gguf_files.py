"""GGUF files of tiny models, written by the `gguf` package, with the weights that it reads from them."""

# pyright: basic
# gguf, torch and transformers are typed in part only.

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from torch import Tensor

from gguf_hybrids import HYBRIDS, hybrid_keys, hybrid_tensors
from gguf_layouts import converted

_PAIRS = (
    "llama", "granite", "granitemoe", "olmo", "smollm3", "mistral3", "granitehybrid", "nemotron_h", "nemotron_h_moe",
)  # fmt: skip
"""Architectures whose queries and keys the converter of llama.cpp reorders (`LlamaModel.permute`)."""
_ONE_ADDED = ("gemma", "gemma2", "gemma3", "nemotron", "qwen3next", "qwen35", "qwen35moe")
"""Architectures whose norms the converter stores with 1 added."""
_EPSILONS = ("norm_epsilon", "layer_norm_eps", "norm_eps", "layer_norm_epsilon")
_OTHER_NAMES = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions", "intermediate_size": "n_inner",
}  # fmt: skip
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
_ROUTER = re.compile(
    r"(mlp\.gate|moe\.gate|mixer\.gate|feed_forward\.gate|router|router\.layer|shared_expert_gate|shortconv\.conv"
    r"|ssm_(conv1d(_[qkv])?|norm))\.|_bias$|\.bias$|ssm_[ad]$"
)
"""Tensors with several dimensions that stay plain."""
_TOGETHER = re.compile(
    r"(?P<place>model\.layers\.\d+\.).*\.(?P<kind>(?<=\.experts\.)(?:gate_up|down)_proj|input_linear|output_linear)"
    r"(?:\.weight|(?P<bias>_bias)|)"
)
_XIELU = re.compile(r"model\.layers\.(\d+)\.mlp\.act_fn\.(\w+)")


def write_gguf(
    folder: Path,
    file: Path,
    *,
    architecture: str,
    kinds: Sequence[str] = ("F32",),
    tokenizer: Mapping[str, Any] | None = None,
    keys: Mapping[str, Any] | None = None,
    rope_factors: Sequence[float] | None = None,
    tensors: Mapping[str, Sequence[float]] | None = None,
    seed: int = 0,
    part: tuple[int, int] = (0, 1),
    holds_all: bool = False,
    splits_latents: bool = True,
    fuses_heads: bool = False,
) -> dict[str, Tensor]:
    """Write the model of a Hugging Face folder as a GGUF file.

    Args:
        folder: with safetensors.
        file: to write.
        architecture: as llama.cpp calls it.
        kinds: of matrices, in turn. The package rounds to those that it can; of the others, random blocks are stored.
        tokenizer: values of `tokenizer.ggml.*`; None: one byte-level token for each row of the embedding table.
        keys: more values, or others; None: a key is left out.
        rope_factors: the tensor `rope_freqs.weight`.
        tensors: further ones, under llama.cpp's names.
        seed: of random blocks.
        part: which part of how many to write: the first has all keys, and each has one of that many tensors in turn.
        holds_all: whether a part has all tensors.
        splits_latents: see `converted`.
        fuses_heads: see `converted`.

    Returns:
        All weights in float32, under their names in Hugging Face's folder, as the package reads them.
    """
    random = np.random.default_rng(seed)
    config = json.loads((folder / "config.json").read_text())
    config |= config.get("text_config", {})
    config |= {name: config[other] for name, other in _OTHER_NAMES.items() if other in config}
    rope = config.get("rope_parameters") or {}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    stored = load_file(folder / "model.safetensors")
    own_keys: dict[str, Any] = {}
    if architecture in HYBRIDS:
        stored = hybrid_tensors(architecture, stored, config)
        given = hybrid_keys(architecture, config)
        own_keys = {f"{architecture}.{key}": value for key, value in given.items()}
        absent = dict.fromkeys(("max_position_embeddings", "intermediate_size", "num_key_value_heads"), 0)
        config = {**absent, "num_attention_heads": 1, "num_hidden_layers": given.get("block_count"), **config}
    loaded = converted(architecture, stored, config, splits_latents=splits_latents, fuses_heads=fuses_heads)
    weights, parameters = _arranged(_separated(loaded, has_experts=bool(config.get("num_local_experts"))))
    writer = gguf.GGUFWriter(file, architecture)
    values: dict[str, Any] = {
        f"{architecture}.context_length": config["max_position_embeddings"],
        f"{architecture}.embedding_length": config["hidden_size"],
        f"{architecture}.block_count": config["num_hidden_layers"],
        f"{architecture}.feed_forward_length": config["intermediate_size"],
        f"{architecture}.attention.head_count": config["num_attention_heads"],
        f"{architecture}.attention.head_count_kv": config["num_key_value_heads"],
        f"{architecture}.attention.key_length": head_dim,
        **_epsilon(architecture, config),
        f"{architecture}.rope.dimension_count": head_dim,
        f"{architecture}.rope.freq_base": rope.get("rope_theta", config.get("rope_theta", 10000.0)),
        **(tokenizer or byte_tokens(config["vocab_size"])),
        **({} if config["eos_token_id"] is None else {"tokenizer.ggml.eos_token_id": config["eos_token_id"]}),
        **_of_experts(architecture, config),
        **parameters,
        **own_keys,
        **(keys or {}),
    }
    if part[0] > 0:
        values = {}
    if part[1] > 1:
        values |= {"split.no": part[0], "split.count": part[1]}
    for key, value in values.items():
        if value is not None:
            _add(writer, key, value)
    read: dict[str, Tensor] = {}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    num_layers = config["num_hidden_layers"] + (keys or {}).get(f"{architecture}.nextn_predict_layers", 0)
    named = gguf.get_tensor_name_map(_number_of(architecture), num_layers)
    number = 0
    for place, (name, parts) in enumerate(weights.items()):
        if place % part[1] != part[0] and not holds_all:
            continue
        array, kind = np.stack([tensor.float().numpy() for tensor in parts.values()]), Kind.F32
        array = array if _is_fused(parts) else array[0]
        interleaved = heads.get(name.split(".")[-2]) if architecture in _PAIRS else None
        if interleaved:
            array = _permuted(array, interleaved)
        added = architecture in _ONE_ADDED and name.endswith("norm.weight") and "ssm_norm" not in name
        if added:
            array = array + np.float32(1)
        if array.ndim >= 2 and not _ROUTER.search(name):
            kind = Kind[kinds[number % len(kinds)]]
            number += 1
            if architecture in HYBRIDS and array.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
                kind = Kind.F32
        if name.endswith("shared_expert_gate.weight"):
            array = array.reshape(-1)
        data = blocks(array, kind, random)
        back = gguf.dequantize(data, kind).reshape(array.shape)
        back = _restored(back, interleaved) if interleaved else back - np.float32(1) if added else back
        for own, numbers in zip(parts, back if _is_fused(parts) else [back], strict=True):
            read[own] = torch.from_numpy(numbers).float().reshape(parts[own].shape)
        writer.add_tensor(_gguf_name(named, name), data, raw_dtype=kind)
    of_rope = {} if rope_factors is None else {"rope_freqs.weight": rope_factors}
    for name, numbers in {**of_rope, **(tensors or {})}.items():
        writer.add_tensor(name, np.array(numbers, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read


def byte_tokens(vocab_size: int) -> dict[str, Any]:
    """Return a byte-level tokenizer: token 0 ends a text, the others are letters."""
    tokens = ["<|end|>", *(chr(0x21 + i) for i in range(min(vocab_size - 1, 90)))]
    tokens += [f"[PAD{i}]" for i in range(len(tokens), vocab_size)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (vocab_size - 1),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.add_bos_token": False,
    }


def byte_level_tokenizer(file: Path, *, pre: str) -> dict[str, Any]:
    """Return the values for a byte-level tokenizer.json."""
    content = json.loads(file.read_text(encoding="utf-8"))
    vocab: dict[str, int] = content["model"]["vocab"]
    special = {token["id"]: token for token in content["added_tokens"]}
    tokens = {**{i: token for token, i in vocab.items()}, **{i: token["content"] for i, token in special.items()}}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [tokens[i] for i in range(len(tokens))],
        "tokenizer.ggml.token_type": [3 if i in special else 1 for i in range(len(tokens))],
        "tokenizer.ggml.merges": [
            merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]
        ],
        "tokenizer.ggml.add_bos_token": False,
    }


def sentence_pieces(*, seed: int = 0, size: int = 340) -> dict[str, Any]:
    """Return the values for a tokenizer of sentence pieces with bytes, as Llama 2 has it, over a few letters."""
    random = np.random.default_rng(seed)
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = [*"▁abcdefghilmnorstu"]
    words = list(letters)
    while len(pieces) + len(words) < size:
        word = words[random.integers(len(words))] + words[random.integers(len(words))]
        if word not in words and len(word) <= 6 and "▁" not in word[1:]:
            words.append(word)
    scores = [0.0] * len(pieces) + [-float(rank) for rank in random.permutation(len(words))]
    longest_first = words[len(letters) :] + letters  # sentence pieces lists merged pieces before letters
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces + longest_first,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def _add(writer: Any, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case []:
            pass  # the package stores no empty lists
        case _:
            writer.add_array(key, value)


def _epsilon(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    if "rms_norm_eps" in config:
        return {f"{architecture}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"]}
    return {
        f"{architecture}.attention.layer_norm_epsilon": next(
            (config[name] for name in _EPSILONS if name in config), 1e-5
        )
    }


def _of_experts(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the converter writes of a mixture."""
    fields = {
        "expert_count": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        "expert_used_count": ("num_experts_per_tok", "moe_k"),
        "expert_feed_forward_length": ("moe_intermediate_size",),
        "expert_shared_count": ("n_shared_experts", "moe_num_shared_experts"),
        "expert_group_count": ("n_group",),
        "expert_group_used_count": ("topk_group",),
        "expert_weights_scale": ("routed_scaling_factor",),
        "leading_dense_block_count": ("first_k_dense_replace", "moe_layer_start_index"),
        "interleave_moe_layer_step": ("moe_layer_interval",),
        "expert_shared_feed_forward_length": ("shared_expert_intermediate_size", "shared_intermediate_size"),
    }
    return {
        f"{architecture}.{key}": config[name] for key, names in fields.items() for name in names if config.get(name)
    }


def _separated(weights: Mapping[str, Tensor], *, has_experts: bool) -> dict[str, Tensor]:
    """Return weights with a gate and an up projection for every expert where they are stored together.

    Without experts, Granite's shared feed-forward is the only one.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        match = _TOGETHER.fullmatch(name)
        if match is None:
            found[name] = tensor
            continue
        place, kind = match["place"], match["kind"]
        alone = "shared_mlp" in name
        own = tensor[None] if alone else tensor
        if kind.endswith("_proj"):  # as gpt-oss has it: outputs are columns, or, of biases, a row
            own = own.transpose(-1, -2) if not match["bias"] else own
            parts = {"gate": own[:, ::2], "up": own[:, 1::2]} if kind == "gate_up_proj" else {"down": own}
        else:
            size = own.shape[1] // 2
            parts = {"gate": own[:, :size], "up": own[:, size:]} if kind == "input_linear" else {"down": own}
        leaf = "bias" if match["bias"] else "weight"
        for part, numbers in parts.items():
            for expert, matrix in enumerate(numbers):
                module = "mlp.shared_expert" if has_experts else "mlp"
                module = module if alone else f"mlp.experts.{expert}"
                found[f"{place}{module}.{part}_proj.{leaf}"] = matrix.contiguous()
    return found


def _arranged(weights: Mapping[str, Tensor]) -> tuple[dict[str, dict[str, Tensor]], dict[str, list[float]]]:
    """Return the tensors that are stored as one, by a name without the number of an expert, and those that are keys."""
    found: dict[str, dict[str, Tensor]] = {}
    parameters: dict[str, dict[int, float]] = {}
    for name in sorted(weights, key=lambda name: [int(part) if part.isdigit() else part for part in name.split(".")]):
        if match := _XIELU.fullmatch(name):
            parameters.setdefault(f"xielu.{match[2]}", {})[int(match[1])] = weights[name].float().item()
            continue
        match = _EXPERT.fullmatch(name)
        found.setdefault(f"{match[1]}.{match[3]}" if match else name, {})[name] = weights[name]
    return found, {key: [numbers[layer] for layer in sorted(numbers)] for key, numbers in parameters.items()}


def _is_fused(tensors: Mapping[str, Tensor]) -> bool:
    return all(_EXPERT.fullmatch(name) for name in tensors)


def _number_of(architecture: str) -> gguf.MODEL_ARCH:
    if architecture == "deepseek32":  # newer than the package, with the tensors of another one
        return gguf.MODEL_ARCH.GLM_DSA
    return next(
        (number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), gguf.MODEL_ARCH.LLAMA
    )


def _gguf_name(named: gguf.TensorNameMap, name: str) -> str:
    if name.startswith("blk."):
        return name
    found = named.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found if found.endswith((".weight", ".bias")) else f"{found}.weight"


def _permuted(array: Any, heads: int) -> Any:
    """Reorder the rows as llama.cpp's converter does (`LlamaModel.permute`)."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def _restored(array: Any, heads: int) -> Any:
    """Undo `_permuted`, row by row."""
    result = np.empty_like(array)
    size = len(array) // heads
    for head in range(heads):
        for i in range(size):
            half, place = i // (size // 2), i % (size // 2)
            result[head * size + i] = array[head * size + 2 * place + half]
    return result


def blocks(array: Any, kind: Kind, random: np.random.Generator) -> Any:
    """Return a matrix in blocks: rounded by the package, or random with scales of the size of the matrix's numbers."""
    try:
        return gguf.quantize(array, kind)
    except NotImplementedError:
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        shape = (*array.shape[:-1], array.shape[-1] // per_block, block_bytes)
        blocks = random.integers(0, 256, shape).astype(np.uint8)
        starts = {
            "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,),
            "IQ4_XS": (0,),
        }[kind.name]  # fmt: skip
        for start in starts:
            scale = random.uniform(1e-4, 2e-4, shape[:-1]).astype(np.float16)
            blocks[..., start : start + 2] = scale[..., None].view(np.uint8)
        return blocks.reshape(*array.shape[:-1], -1)
