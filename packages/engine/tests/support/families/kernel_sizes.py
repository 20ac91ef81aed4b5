"""Cases in sizes for which FlashInfer has kernels: heads of 64 elements, or latents of 512 with rotated keys of 64."""

# pyright: basic
# Fields of configurations have any type.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from families.case import SMALL, Case

HEAD_DIM, GROUP = 64, 4
_VOCAB_SIZE, _MAX_POSITION = 512, 512
_SIZES = {
    "vocab_size": _VOCAB_SIZE,
    "hidden_size": HEAD_DIM * GROUP,
    "num_attention_heads": GROUP,
    "max_position_embeddings": _MAX_POSITION,
    "initializer_range": 0.06,
}
_LATENTS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
_PER_PAIR = ("short_factor", "long_factor")
"""Fields of ropes with a number for each rotated pair."""


def for_kernels(case: Case) -> Case:
    """Return the case in these sizes; a group of heads has one KV head, unless each head has its own."""
    has_latents = "kv_lora_rank" in case.extra
    old_heads = {**SMALL, **case.extra}
    old_dim = old_heads.get("head_dim", old_heads["hidden_size"] // old_heads["num_attention_heads"])
    is_multi_head = old_heads["num_key_value_heads"] == old_heads["num_attention_heads"]
    extra = {**_scaled(case.extra, HEAD_DIM // old_dim), **_SIZES, "num_key_value_heads": GROUP if is_multi_head else 1}
    if has_latents:
        extra |= _LATENTS
    elif "head_dim" in case.extra:
        extra["head_dim"] = HEAD_DIM
    if case.kind == "Mamba2":  # its heads have twice the hidden size, and are no attention's
        extra["num_heads"] = 2 * GROUP
    return replace(case, extra=extra)


def _scaled(fields: Mapping[str, Any], factor: int) -> dict[str, Any]:
    """Return `fields`, with what depends on the size of a head for heads that are `factor` times as large."""
    scaled: dict[str, Any] = {}
    for name, value in fields.items():
        if name == "global_head_dim":
            scaled[name] = value * factor
        elif name == "vocab_size_per_layer_input":
            scaled[name] = _VOCAB_SIZE
        elif isinstance(value, dict):
            scaled[name] = _scaled(value, factor)
        elif name in ("mrope_section", "rotary_dim", "mamba_d_head"):
            scaled[name] = [size * factor for size in value] if isinstance(value, list) else value * factor
        elif name == "attention_chunk_size":
            scaled[name] = _MAX_POSITION  # shorter chunks are refused on CUDA
        elif name in _PER_PAIR:
            scaled[name] = [number for number in value for _ in range(factor)]
        else:
            scaled[name] = value
    return scaled
