"""config.json and generation_config.json from the keys of a GGUF file."""

from __future__ import annotations

from typing import Any, cast

from pagewood.engine.json_fields import Fields
from pagewood.engine.weights.gguf.architecture import Architecture
from pagewood.engine.weights.gguf.architectures import ARCHITECTURES
from pagewood.engine.weights.gguf.file import GGUFFile
from pagewood.engine.weights.gguf.keys import Keys, check_keys
from pagewood.engine.weights.gguf.rope import rope_scaling_of

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TOKENS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<end_of_turn>"}
)
_CONTROL = 3


def architecture_of(file: GGUFFile) -> Architecture:
    """Return the architecture of a file.

    Raises:
        ValueError: it is not supported.
    """
    name = Fields(str(file.path), file.metadata).text("general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"{file.path}: general.architecture must be one of {known}, got {name[:80]!r}")
    return ARCHITECTURES[name]


def config_of(file: GGUFFile) -> dict[str, Any]:
    """Return the content of config.json.

    Raises:
        ValueError: the architecture or something else is not supported, or a key is missing or wrong.
    """
    own = architecture_of(file)
    fields = Fields(str(file.path), file.metadata)
    name = fields.text("general.architecture")
    keys = Keys(file, name)
    size = keys.first_size if own.has_own_kinds else keys.only_size if own.has_recurrence else keys.size
    hidden = keys.size("embedding_length")
    heads = size("attention.head_count", 1 if own.has_recurrence else None)
    head_dim, rotated = _head_sizes(keys, own, hidden // heads or 1)
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise ValueError(f"{file.path} lacks the tensor token_embd.weight of shape (vocabulary, {hidden})")
    length = keys.size("context_length")
    config: dict[str, Any] = {
        "architectures": [own.family],
        "model_type": own.model_type,
        "vocab_size": table.shape[0],
        "hidden_size": hidden,
        "intermediate_size": size("feed_forward_length", 1 if own.has_recurrence else None),
        "num_hidden_layers": keys.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": length,
        "rms_norm_eps": keys.number(own.epsilon, low=1e-30, high=1),
        "rope_theta": keys.number("rope.freq_base", 10000.0, low=2, high=1e12),
        "rope_scaling": None
        if own.has_own_kinds
        else rope_scaling_of(
            file, fields, name, length, head_dim, has_latents=own.has_latents, has_growth=own.has_growth
        ),
        "attention_bias": keys.has_in_layers("attn_q.bias") or keys.has_in_layers("attn_qkv.bias"),
        "mlp_bias": keys.has_in_layers("ffn_up.bias"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": _ends(fields, table.shape[0]),
    }
    if own.rotates_part:
        config["partial_rotary_factor"] = rotated / head_dim
    config |= own.more(keys, config)
    check_keys(file, keys, head_dim=head_dim)
    return config


def _head_sizes(keys: Keys, own: Architecture, usual: int) -> tuple[int, int]:
    """Return how many elements a head has, and how many of them are rotated.

    Raises:
        ValueError: values are of another size than keys, or a part alone is rotated where that is not supported.
    """
    if own.has_latents:
        rotated = keys.size("rope.dimension_count", usual)
        return rotated, rotated
    head_dim = keys.size("attention.key_length", usual)
    rotated = keys.size("rope.dimension_count", head_dim)
    for key, value in (
        ("rope.dimension_count", head_dim if own.rotates_part else rotated),
        ("attention.value_length", keys.size("attention.value_length", head_dim)),
    ):
        if value != head_dim:
            raise ValueError(f"{keys.source}: {keys.name}.{key} must be {head_dim}, the size of a head, got {value}")
    return head_dim, rotated


def generation_config_of(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return the content of generation_config.json: the file's recommended sampling parameters."""
    fields = Fields(str(file.path), file.metadata)
    values: dict[str, Any] = {"eos_token_id": config["eos_token_id"]}
    for key, name, high in (("temp", "temperature", 100.0), ("top_p", "top_p", 1.0), ("min_p", "min_p", 1.0)):
        if f"general.sampling.{key}" in file.metadata:
            values[name] = fields.number(f"general.sampling.{key}", low=0, high=high)
    if "general.sampling.top_k" in file.metadata:
        values["top_k"] = fields.integer("general.sampling.top_k", high=1 << 30)
    if suppressed := fields.values.get("tokenizer.ggml.suppress_tokens"):  # as Gemma 4's converter writes them
        values["suppress_tokens"] = suppressed
    return values


def _ends(fields: Fields, vocab_size: int) -> list[int]:
    """Return the tokens that end an answer: those named by keys, and those known by their text."""
    ends = [
        fields.integer(f"tokenizer.ggml.{key}", low=0, high=vocab_size - 1)
        for key in _END_KEYS
        if f"tokenizer.ggml.{key}" in fields.values
    ]
    tokens = (fields.texts("tokenizer.ggml.tokens") or ())[:vocab_size]
    kinds = fields.values.get("tokenizer.ggml.token_type")
    if isinstance(kinds, list):
        named = zip(tokens, cast("list[object]", kinds), strict=False)
        ends += [i for i, (token, kind) in enumerate(named) if kind == _CONTROL and token in _END_TOKENS]
    return list(dict.fromkeys(ends))
