"""Cases of GGUF files: every architecture, with the model of which it is made, and what a decoder computes of it."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

import gguf_files
from families.case import build
from families.registry import CASES
from families.ropes import rope
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.models.torch_ops import TorchOps, WholeTexts
from pagewood.engine.models.torch_recurrence import WholeTextStates

LENGTH = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A GGUF file of one of `CASES`."""

    architecture: str
    case: str
    splits_latents: bool = True
    """Whether keys and values of latents are stored apart."""
    fuses_heads: bool = False
    """Whether queries, keys and values are one tensor."""
    keys: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keys that only this architecture has."""
    tensors: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])
    """Tensors that only this architecture has."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of the configuration in place of those that GGUF cannot say."""


MOE = {"decoder_sparse_step": 1, "mlp_only_layers": []}
LATENTS = {
    "attention.head_count_kv": 1,
    "attention.key_length": 32,
    "attention.value_length": 24,
    "attention.kv_lora_rank": 24,
    "attention.key_length_mla": 20,
    "attention.value_length_mla": 16,
    "rope.dimension_count": 8,
}
"""The sizes of the cases with latents."""
_GRANITE = {"attention.scale": 0.11, "embedding_scale": 3.0, "residual_scale": 0.6, "logit_scale": 2.5}
_MINISTRAL = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16,
    "rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.3,
}  # fmt: skip
_GEMMA4 = {
    "attention.key_length": 32, "attention.value_length": 32, "attention.key_length_swa": 16,
    "attention.value_length_swa": 16, "rope.dimension_count": 32, "rope.dimension_count_swa": 16,
    "rope.freq_base": 5e5, "rope.freq_base_swa": 2e4, "attention.sliding_window": 9,
    "attention.sliding_window_pattern": [True, True, False] * 2, "final_logit_softcapping": 4.0,
}  # fmt: skip
_LLAMA4 = {"feed_forward_length": 48, "expert_feed_forward_length": 80, "interleave_moe_layer_step": 2}
_LLAMA4_NUMBERS = {
    "no_rope_layer_interval": 4, "attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1,
}  # fmt: skip
_LLAMA4_ROPE = {
    "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_theta": 5e5,
}  # fmt: skip
_LLAMA4_FACTORS = [1.0 if 8192 / (2 * math.pi) >= 5e5 ** (i / 8) else 16.0 for i in range(8)]
"""Each frequency of a head of 16 turns in 8,192 positions at least once, or is divided: Llama 4 has none in between."""
_GEMMA4_FACTORS = {"rope_freqs.weight": [1.0] * 4 + [1e30] * 12}
FILES = {
    "llama": File(architecture="llama", case="llama-biases"),
    "mixtral": File(architecture="llama", case="mixtral", extra={"sliding_window": None}),
    "mixtral with a window": File(
        architecture="llama", case="mixtral", keys={"attention.sliding_window": 9}, extra={"sliding_window": 9}
    ),
    "mistral": File(architecture="llama", case="mistral-window", keys={"attention.sliding_window": 9}),
    "qwen2": File(architecture="qwen2", case="qwen2"),
    "qwen3": File(architecture="qwen3", case="qwen3"),
    "llama4": File(architecture="llama4", case="llama4", keys=_LLAMA4, extra=_LLAMA4_NUMBERS),
    "llama4 with llama 3's rope": File(
        architecture="llama4", case="llama4", keys=_LLAMA4, tensors={"rope_freqs.weight": _LLAMA4_FACTORS},
        extra={**_LLAMA4_NUMBERS, **rope("llama3", **_LLAMA4_ROPE)},
    ),
    "llama4 without chunks": File(
        architecture="llama4", case="llama4", keys={**_LLAMA4, "attention.sliding_window": 0},
        extra={**_LLAMA4_NUMBERS, "no_rope_layers": [1] * 4, "attention_chunk_size": 64},
    ),
    "qwen3 with large heads": File(
        architecture="qwen3", case="qwen3", extra={"head_dim": 32}, keys={"rope.dimension_count": None}
    ),
    "qwen2moe": File(architecture="qwen2moe", case="qwen2-moe", extra={**MOE, "norm_topk_prob": False}),
    "qwen2moe with other weights": File(
        architecture="qwen2moe", case="qwen2-moe", keys={"expert_weights_norm": True},
        extra={**MOE, "norm_topk_prob": True},
    ),
    "qwen3moe": File(architecture="qwen3moe", case="qwen3-moe", extra=MOE),
    "qwen2vl": File(
        architecture="qwen2vl", case="qwen2.5-vl", keys={"rope.dimension_sections": [2, 3, 3, 0]}
    ),
    "qwen3vl": File(
        architecture="qwen3vl", case="qwen3-vl",
        keys={"rope.dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 3},
    ),
    "qwen3vlmoe": File(
        architecture="qwen3vlmoe", case="qwen3-vl-moe", keys={"rope.dimension_sections": [4, 2, 2, 0]},
        extra={"mlp_only_layers": []},
    ),
    "mistral3 with a temperature": File(architecture="mistral3", case="ministral3", keys=_MINISTRAL),
    "mistral3 in a model of images": File(
        architecture="mistral3", case="mistral3",
        keys={**_MINISTRAL, "attention.temperature_scale": 0.1, "rope.scaling.yarn_log_multiplier": 0.0},
    ),
    "mistral3 without a temperature": File(architecture="mistral3", case="mistral-no-window"),
    "olmoe": File(architecture="olmoe", case="olmoe"),
    "olmo2": File(architecture="olmo2", case="olmo2"),
    "gemma": File(architecture="gemma", case="gemma"),
    "gemma2": File(
        architecture="gemma2", case="gemma2", extra={"query_pre_attn_scalar": 16},
        keys={"attention.sliding_window": 9, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0},
    ),
    "olmo": File(architecture="olmo", case="olmo"),
    "gemma3": File(
        architecture="gemma3", case="gemma3",
        keys={
            "attention.sliding_window": 9, "attention.sliding_window_pattern": [True, True, False],
            "rope.freq_base": 5e5, "rope.freq_base_swa": 2e4, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0,
        },
        extra={"query_pre_attn_scalar": 16},
    ),
    "gemma3 by default": File(
        architecture="gemma3", case="gemma3", keys={"attention.sliding_window": 9, "rope.freq_base": 1e6},
        extra={
            "query_pre_attn_scalar": 16, "sliding_window_pattern": 6, "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma4": File(
        architecture="gemma4", case="gemma4-small", tensors=_GEMMA4_FACTORS,
        keys={
            **_GEMMA4, "attention.shared_kv_layers": 3, "embedding_length_per_layer_input": 8,
            "feed_forward_length": [80, 80, 80, 160, 160, 160],
        },
    ),
    "gemma4 with keys for values": File(
        architecture="gemma4", case="gemma4-large", tensors=_GEMMA4_FACTORS,
        keys={**_GEMMA4, "attention.head_count_kv": [2, 2, 1, 2, 2, 1]},
    ),
    "gemma4 with experts": File(
        architecture="gemma4", case="gemma4-experts", tensors=_GEMMA4_FACTORS,
        keys={
            **_GEMMA4, "attention.head_count_kv": [2, 2, 1], "attention.sliding_window_pattern": [True, True, False],
            "expert_used_count": 2,
        },
    ),
    "granite": File(
        architecture="granite", case="granite-tied",
        keys=_GRANITE,
    ),
    "granite of Granite 4": File(
        architecture="granite", case="granite4", keys=_GRANITE,
        extra={"intermediate_size": 80},
    ),
    "granitemoe": File(architecture="granitemoe", case="granite-moe", keys=_GRANITE),
    "granitemoe with shared experts": File(architecture="granitemoe", case="granite-moe-shared", keys=_GRANITE),
    "gpt-oss": File(
        architecture="gpt-oss", case="gpt-oss",
        keys={
            "attention.sliding_window": 9, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64, "expert_feed_forward_length": 40,
        },
    ),
    "gpt2": File(architecture="gpt2", case="gpt2", extra={"n_inner": 256}),
    "gptneox": File(
        architecture="gptneox", case="gpt-neox", extra={"hidden_act": "gelu_fast", "rotary_emb_base": 1e4},
        keys={"rope.dimension_count": 8, "use_parallel_residual": True},
    ),
    "gptneox in turn": File(
        architecture="gptneox", case="gpt-neox-in-turn",
        keys={"rope.dimension_count": 8, "use_parallel_residual": False},
        extra={"hidden_act": "gelu_fast", "rotary_emb_base": 1e4, "attention_bias": True},
    ),
    "glm4moe": File(
        architecture="glm4moe", case="glm4-moe",
        keys={"rope.dimension_count": 8, "expert_gating_func": 2, "expert_weights_norm": True},
    ),
    "glm4moe by default": File(
        architecture="glm4moe", case="glm4-moe", keys={"rope.dimension_count": 8},
        extra={"norm_topk_prob": False, "use_qk_norm": False, "attention_bias": False, "routed_scaling_factor": 1.0},
    ),
    "ernie4_5-moe": File(
        architecture="ernie4_5-moe", case="ernie4.5-moe", keys={"expert_shared_feed_forward_length": 40},
        extra={"use_bias": False, "moe_layer_interval": 2, "moe_layer_start_index": 1, "num_hidden_layers": 4},
    ),
    "minimax-m2": File(
        architecture="minimax-m2", case="minimax-m2",
        keys={"rope.dimension_count": 8, "expert_gating_func": 2, "expert_feed_forward_length": 80},
    ),
    "deepseek2": File(architecture="deepseek2", case="deepseek2", keys=LATENTS),
    "deepseek2 of an earlier converter": File(
        architecture="deepseek2", case="deepseek2", splits_latents=False,
        keys={
            "attention.key_length": 20, "attention.value_length": 16, "attention.kv_lora_rank": 24,
            "rope.dimension_count": 8,
        },
    ),
    "deepseek2 in groups": File(
        architecture="deepseek2", case="deepseek2-groups", keys={**LATENTS, "attention.q_lora_rank": 20},
        extra={"attention_bias": False},
    ),
    "deepseek2 with sigmoid": File(
        architecture="deepseek2", case="deepseek3",
        keys={
            **LATENTS, "attention.q_lora_rank": 20, "expert_gating_func": 2, "expert_weights_norm": True,
            "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 32,
            "rope.scaling.yarn_log_multiplier": 0.07,
        },
        extra={
            "attention_bias": False,
            **rope("yarn", factor=8.0, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=0.7),
        },
    ),
    "deepseek32": File(
        architecture="deepseek32", case="deepseek32",
        keys={
            **LATENTS, "attention.q_lora_rank": 20, "expert_gating_func": 2, "expert_weights_norm": True,
            "attention.indexer.top_k": 40, "attention.indexer.head_count": 2, "attention.indexer.key_length": 16,
        },
        extra={"index_topk": 40},
    ),
    "deepseek2 of GLM": File(
        architecture="deepseek2", case="glm4-lite",
        keys={**LATENTS, "attention.q_lora_rank": 20, "expert_gating_func": 2},
    ),
    "olmo3": File(
        architecture="olmo2", case="olmo3",
        keys={
            "attention.sliding_window": 9, "rope.freq_base": 5e5, "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64,
        },
    ),
    "smollm3": File(
        architecture="smollm3", case="smollm3", extra={"no_rope_layer_interval": 4, "num_hidden_layers": 5}
    ),
    "exaone4": File(
        architecture="exaone4", case="exaone4",
        keys={"attention.sliding_window": 9, "attention.sliding_window_pattern": 3},
    ),
    "exaone4 without windows": File(architecture="exaone4", case="exaone4-no-window"),
    "seed_oss": File(architecture="seed_oss", case="seed-oss", extra={"attention_out_bias": False}),
    "ernie4_5": File(architecture="ernie4_5", case="ernie4.5", extra={"use_bias": False}),
    "hunyuan-dense": File(architecture="hunyuan-dense", case="hunyuan", extra=rope("default")),
    "glm4": File(architecture="glm4", case="glm4", keys={"rope.dimension_count": 4}),
    "chatglm": File(architecture="chatglm", case="glm", keys={"rope.dimension_count": 8}),
    "chatglm of its own checkpoints": File(
        architecture="chatglm", case="glm", fuses_heads=True, keys={"rope.dimension_count": 8},
        extra={"attention_bias": True},
    ),
    "phi3": File(architecture="phi3", case="phi3-window", keys={"attention.sliding_window": 9}),
    "phi3 with longrope": File(
        architecture="phi3", case="phi4-both",
        keys={"rope.dimension_count": 12, "rope.scaling.attn_factor": (4 / 3) ** 0.5,
              "rope.scaling.original_context_length": 64},
        tensors={"rope_factors_short.weight": [1.1] * 6, "rope_factors_long.weight": [1.0, 1.5, 2.0, 3.0, 5.0, 9.0]},
    ),
    "nemotron": File(architecture="nemotron", case="nemotron", keys={"rope.dimension_count": 8}),
    "nemotron with biases": File(architecture="nemotron", case="nemotron-biases", keys={"rope.dimension_count": 6}),
    "command-r": File(architecture="command-r", case="cohere", keys={"logit_scale": 0.3, "rope.scaling.type": "none"}),
    "cohere2": File(
        architecture="cohere2", case="cohere2", extra={"tie_word_embeddings": True},
        keys={
            "attention.sliding_window": 9, "attention.sliding_window_pattern": 3, "logit_scale": 0.3,
            "rope.scaling.type": "none",
        },
    ),
    "starcoder2": File(architecture="starcoder2", case="starcoder2"),
    "starcoder2 without biases": File(
        architecture="starcoder2", case="starcoder2-window", keys={"attention.sliding_window": 9}
    ),
    "apertus": File(architecture="apertus", case="apertus", extra=rope("linear", factor=2.0),
                    keys={"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}),
    "qwen3next": File(architecture="qwen3next", case="qwen3-next", extra={"mlp_only_layers": []}),
    "qwen35": File(architecture="qwen35", case="qwen3.5", extra={"linear_num_value_heads": 6}),
    "qwen35 with as many heads of keys": File(architecture="qwen35", case="qwen3.5"),
    "qwen35moe": File(architecture="qwen35moe", case="qwen3.5-moe"),
    "granitehybrid": File(architecture="granitehybrid", case="granite4-states", extra={"intermediate_size": 80}),
    "granitehybrid in groups": File(
        architecture="granitehybrid", case="granite4-groups", extra={"intermediate_size": 80}
    ),
    "granitehybrid with experts": File(
        architecture="granitehybrid", case="granite4-moe", extra={"position_embedding_type": None}
    ),
    "granitehybrid of Bamba": File(architecture="granitehybrid", case="bamba"),
    "granitehybrid of Bamba with biases": File(architecture="granitehybrid", case="bamba-groups"),
    "falcon-h1": File(architecture="falcon-h1", case="falcon-h1"),
    "falcon-h1 with norms": File(architecture="falcon-h1", case="falcon-h1-norm-last"),
    "nemotron_h": File(architecture="nemotron_h", case="nemotron-h"),
    "nemotron_h_moe": File(
        architecture="nemotron_h_moe", case="nemotron-h-latents",
        extra={"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    ),
    "nemotron_h_moe in groups": File(
        architecture="nemotron_h_moe", case="nemotron-h-latents",
        extra={"n_group": 2, "topk_group": 1, "n_routed_experts": 6, "moe_latent_size": None, "mlp_bias": False,
               "num_experts_per_tok": 2, "routed_scaling_factor": 1.7, "norm_topk_prob": True},
    ),
    "lfm2": File(architecture="lfm2", case="lfm2"),
    "lfm2moe": File(architecture="lfm2moe", case="lfm2-moe", extra={"routed_scaling_factor": 1.0}),
    "lfm2moe without a bias": File(
        architecture="lfm2moe", case="lfm2-moe-plain", keys={"expert_weights_norm": False},
        extra={"routed_scaling_factor": 1.0},
    ),
    "kimi-linear": File(architecture="kimi-linear", case="kimi-linear"),
    "mamba2": File(architecture="mamba2", case="mamba2"),
}  # fmt: skip


def write(file: File, path: Path, **options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Write a file; return the model of `transformers` and the weights in the file."""
    case = CASES[file.case]
    made = path / "model"
    reference = build(replace(case, extra={**case.extra, **file.extra}), made)
    keys = {f"{file.architecture}.{key}": value for key, value in file.keys.items()}
    weights = gguf_files.write_gguf(
        made,
        path / "m.gguf",
        architecture=file.architecture,
        keys=keys,
        tensors=file.tensors,
        splits_latents=file.splits_latents,
        fuses_heads=file.fuses_heads,
        **options,
    )
    return reference, weights


@torch.inference_mode()
def logits(made: Path, length: int = LENGTH) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of a text, and its logits by a model."""
    model = load_model(made, TorchOps())
    positions = torch.arange(length)
    tokens = positions * 7 % model.config.vocab_size
    attention = WholeTexts([layer.mixer for layer in model.config.layers], length)
    is_short = model.config.is_short(length)
    ropes = [rope(positions, is_short=is_short) for rope in model.ropes]
    return tokens, model(tokens, ropes, attention, positions, recurrence=WholeTextStates(length))


def rewrite(
    source: Path,
    file: Path,
    parts: Sequence[str],
    whole: str,
    *,
    axis: int = 0,
    keys: Mapping[str, int] | None = None,
    other: Mapping[str, tuple[Any, Any] | None] | None = None,
) -> None:
    """Write a file again with some tensors of a layer as one.

    Args:
        source: a file of the architecture that its keys name.
        file: to write.
        parts: of the names of these tensors, one below the other.
        whole: the same of the new one.
        axis: on which their rows are.
        keys: with other values, or new ones.
        other: tensors in place of these, or new ones, with their types; None: it is left out.
    """
    other, keys = other or {}, keys or {}
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(file, str(reader.fields["general.architecture"].contents()))
    for one in reader.fields.values():
        if not one.name.startswith("GGUF.") and one.name not in ("general.architecture", *keys):
            writer.add_key_value(one.name, one.contents(), one.types[0], one.types[1] if len(one.types) > 1 else None)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name, tensor in tensors.items():
        if name in other or any(part in name for part in parts[1:]):
            continue
        joined = [tensors[name.replace(parts[0], part)] for part in parts] if parts[0] in name else [tensor]
        data = np.concatenate([np.array(one.data) for one in joined], axis=axis if len(joined) > 1 else 0)
        writer.add_tensor(name.replace(parts[0], whole), data, raw_dtype=tensor.tensor_type)
    for key, value in keys.items():
        writer.add_uint32(key, value)
    for name, one in other.items():
        if one is not None:
            writer.add_tensor(name, one[0], raw_dtype=one[1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
