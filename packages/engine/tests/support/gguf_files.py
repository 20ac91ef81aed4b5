"""GGUF files of tiny models, written by the `gguf` package, with the weights that it reads from them."""

# pyright: basic
# gguf, torch and transformers are typed in part only.

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from torch import Tensor

_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(
    folder: Path,
    file: Path,
    *,
    architecture: str,
    kinds: Sequence[str] = ("F32",),
    tokenizer: Mapping[str, Any] | None = None,
    keys: Mapping[str, Any] | None = None,
    rope_factors: Sequence[float] | None = None,
    seed: int = 0,
    part: tuple[int, int] = (0, 1),
    holds_all: bool = False,
) -> dict[str, Tensor]:
    """Write the model of a Hugging Face folder as a GGUF file.

    Args:
        folder: with safetensors.
        file: to write.
        architecture: as llama.cpp calls it.
        kinds: of matrices, in turn. The package rounds to those that it can; of the others, random blocks are stored.
        tokenizer: values of `tokenizer.ggml.*`; None: one byte-level token for each row of the embedding table.
        keys: more values, or others.
        rope_factors: the tensor `rope_freqs.weight`.
        seed: of random blocks.
        part: which part of how many to write: the first has all keys, and each has one of that many tensors in turn.
        holds_all: whether a part has all tensors.

    Returns:
        All weights in float32, under their names in Hugging Face's folder, as the package reads them.
    """
    random = np.random.default_rng(seed)
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters") or {}
    writer = gguf.GGUFWriter(file, architecture)
    values: dict[str, Any] = {
        f"{architecture}.context_length": config["max_position_embeddings"],
        f"{architecture}.embedding_length": config["hidden_size"],
        f"{architecture}.block_count": config["num_hidden_layers"],
        f"{architecture}.feed_forward_length": config["intermediate_size"],
        f"{architecture}.attention.head_count": config["num_attention_heads"],
        f"{architecture}.attention.head_count_kv": config["num_key_value_heads"],
        f"{architecture}.attention.key_length": config["head_dim"],
        f"{architecture}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{architecture}.rope.dimension_count": config["head_dim"],
        f"{architecture}.rope.freq_base": rope.get("rope_theta", config.get("rope_theta", 10000.0)),
        **(tokenizer or byte_tokens(config["vocab_size"])),
        **({} if config["eos_token_id"] is None else {"tokenizer.ggml.eos_token_id": config["eos_token_id"]}),
        **(keys or {}),
    }
    if part[0] > 0:
        values = {}
    if part[1] > 1:
        values |= {"split.no": part[0], "split.count": part[1]}
    for key, value in values.items():
        _add(writer, key, value)
    read: dict[str, Tensor] = {}
    weights = load_file(folder / "model.safetensors")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    number = 0
    for place, (name, tensor) in enumerate(weights.items()):
        if place % part[1] != part[0] and not holds_all:
            continue
        array, kind = tensor.float().numpy(), Kind.F32
        module, leaf = name.rsplit(".", 1)
        interleaved = heads.get(module.split(".")[-1]) if architecture == "llama" else None
        if interleaved:
            array = _permuted(array, interleaved)
        if array.ndim == 2:
            kind = Kind[kinds[number % len(kinds)]]
            number += 1
        data = _stored(array, kind, random)
        back = gguf.dequantize(data, kind).reshape(array.shape)
        read[name] = torch.from_numpy(_restored(back, interleaved) if interleaved else back).float()
        writer.add_tensor(_gguf_name(module, leaf), data, raw_dtype=kind)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, np.float32))
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


def _gguf_name(module: str, leaf: str) -> str:
    if module.startswith("model.layers."):
        _, _, layer, own = module.split(".", 3)
        return f"blk.{layer}.{_NAMES[own]}.{leaf}"
    return f"{_NAMES[module]}.{leaf}"


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


def _stored(array: Any, kind: Kind, random: np.random.Generator) -> Any:
    """Return a matrix in blocks: rounded by the package, or random with scales of the size of the matrix's numbers."""
    try:
        return gguf.quantize(array, kind)
    except NotImplementedError:
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        shape = (array.shape[0], array.shape[1] // per_block, block_bytes)
        blocks = random.integers(0, 256, shape).astype(np.uint8)
        starts = {
            "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,),
            "IQ4_XS": (0,),
        }[kind.name]  # fmt: skip
        for start in starts:
            scale = random.uniform(1e-4, 2e-4, shape[:2]).astype(np.float16)
            blocks[:, :, start : start + 2] = scale[:, :, None].view(np.uint8)
        return blocks.reshape(array.shape[0], -1)
