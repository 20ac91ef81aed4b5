"""The keys of an architecture in a GGUF file: keys that are read, keys without effect here, and refused keys."""

from __future__ import annotations

import logging
import math
from typing import cast

from pagewood.engine.weights.gguf.file import GGUFFile

_log = logging.getLogger(__name__)

_READ = frozenset(
    {
        "context_length", "embedding_length", "block_count", "feed_forward_length", "expert_count",
        "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
        "attention.layer_norm_rms_epsilon", "attention.sliding_window",
        "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor",
        "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }
)  # fmt: skip
"""Keys that `config_of` reads."""
_WITHOUT_EFFECT = frozenset(
    {
        "vocab_size",  # the rows of the embedding table count
        "tensor_data_layout", "rope.scaling.finetuned", "pooling_type",
        "attention.layer_norm_epsilon",  # for norms that these architectures lack
        "expert_used_count", "expert_shared_count", "expert_group_count", "expert_group_used_count",
        "expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_chunk_feed_forward_length",
        "expert_weights_scale", "expert_weights_norm", "expert_gating_func", "expert_group_scale", "experts_per_group",
        "moe_every_n_layers", "interleave_moe_layer_step", "leading_dense_block_count",  # expert_count is 0
    }
)  # fmt: skip
_ONE = ("logit_scale", "residual_scale", "embedding_scale", "attention.output_scale", "rope.scaling.alpha")
"""Factors; llama.cpp ignores a factor of 0."""
_ZERO = (
    "embedding_length_out", "nextn_predict_layers", "n_deepstack_layers", "attn_logit_softcapping",
    "router_logit_softcapping", "final_logit_softcapping", "rescale_every_n_layers", "token_shift_count",
    "full_attention_interval", "activation_sparsity_scale", "embedding_length_per_layer_input", "swiglu_clamp_exp",
    "swiglu_clamp_shexp", "moe_latent_size", "use_parallel_residual", "swin_norm",
    "attention.max_alibi_bias", "attention.clamp_kqv", "attention.q_lora_rank", "attention.kv_lora_rank",
    "attention.relative_buckets_count", "attention.temperature_length", "attention.temperature_scale",
    "attention.key_length_mla", "attention.value_length_mla", "attention.key_length_swa", "attention.value_length_swa",
    "attention.shared_kv_layers", "attention.sliding_window_pattern", "attention.indexer.head_count",
    "attention.indexer.key_length", "attention.indexer.top_k", "attention.group_norm_groups",
    "rope.dimension_count_swa", "rope.dimension_sections", "rope.freq_base_swa",
)  # fmt: skip
"""Features that these architectures lack: the value must be 0, false or a list of these."""


def check_keys(file: GGUFFile, name: str, *, head_dim: int) -> None:
    """Refuse keys of an architecture that would change the result and are not supported.

    Args:
        file: with the keys.
        name: the architecture, with which they begin.
        head_dim: elements of a head, from which the usual scale of attention follows.

    Raises:
        ValueError: a key asks for something that is not supported.
    """
    metadata = file.metadata
    for key, plain, rule in (*((key, (0, 1), "1") for key in _ONE), *((key, (0,), "0") for key in _ZERO)):
        value = metadata.get(f"{name}.{key}", plain[0])
        values = cast("list[object]", value) if isinstance(value, list) else [value]
        if any(one not in plain for one in values):
            raise ValueError(f"{file.path}: {name}.{key} must be absent or {rule}, got {value!r:.80}")
    if metadata.get(f"{name}.attention.causal", True) is not True:
        raise ValueError(
            f"{file.path}: {name}.attention.causal must be absent or true, got {metadata[f'{name}.attention.causal']!r}"
        )
    usual = head_dim**-0.5
    scale = metadata.get(f"{name}.attention.scale", 0)
    if scale and not (isinstance(scale, float) and math.isclose(scale, usual, rel_tol=1e-5)):
        raise ValueError(
            f"{file.path}: {name}.attention.scale must be absent or 1 / sqrt({head_dim}), {usual:.6g}, "
            f"got {scale!r:.80}"
        )


def unknown_keys(file: GGUFFile, name: str) -> list[str]:
    """Return the unknown keys of an architecture."""
    known = {*_READ, *_WITHOUT_EFFECT, *_ONE, *_ZERO, "attention.causal", "attention.scale"}
    own = (key.removeprefix(f"{name}.") for key in file.metadata if key.startswith(f"{name}."))
    return [f"{name}.{key}" for key in own if key not in known]


def log_ignored(file: GGUFFile, name: str) -> None:
    """Log the ignored keys that might change the result: unknown ones, and advice on sampling."""
    if unknown := unknown_keys(file, name):
        _log.warning("%s: keys that are not known are ignored: %s", file.path, ", ".join(unknown))
    advice = [
        key
        for key in file.metadata
        if key.startswith("general.sampling.") and key.rpartition(".")[2] not in ("temp", "top_k", "top_p", "min_p")
    ]
    if advice:
        _log.warning("%s: its advice on drawing tokens is not followed in %s", file.path, ", ".join(advice))
