"""GGUF files of every architecture: their logits are those of `transformers`, and experts stay in blocks."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import gguf_files
from families.case import build
from families.registry import CASES
from families.ropes import rope
from pagewood.engine.model_folder.folder import default_sampling, model_folder
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.expert_division import divided_by_expert
from pagewood.engine.models.head_config import find_head_names
from pagewood.engine.models.stored.checkpoint import Checkpoint
from pagewood.engine.models.stored.checkpoint_files import tensor_names
from pagewood.engine.models.torch_ops import TorchOps, WholeTexts
from pagewood.engine.models.torch_recurrence import WholeTextStates
from pagewood.engine.weights.gguf import folder, mixtures
from pagewood.engine.weights.gguf.architectures import ARCHITECTURES
from pagewood.engine.weights.gguf.tensors import GGUFTensors
from rank_threads import ranks_logits

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


_MOE = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_LATENTS = {
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
    "qwen2moe": File(architecture="qwen2moe", case="qwen2-moe", extra={**_MOE, "norm_topk_prob": False}),
    "qwen2moe with other weights": File(
        architecture="qwen2moe", case="qwen2-moe", keys={"expert_weights_norm": True},
        extra={**_MOE, "norm_topk_prob": True},
    ),
    "qwen3moe": File(architecture="qwen3moe", case="qwen3-moe", extra=_MOE),
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
    "deepseek2": File(architecture="deepseek2", case="deepseek2", keys=_LATENTS),
    "deepseek2 of an earlier converter": File(
        architecture="deepseek2", case="deepseek2", splits_latents=False,
        keys={
            "attention.key_length": 20, "attention.value_length": 16, "attention.kv_lora_rank": 24,
            "rope.dimension_count": 8,
        },
    ),
    "deepseek2 in groups": File(
        architecture="deepseek2", case="deepseek2-groups", keys={**_LATENTS, "attention.q_lora_rank": 20},
        extra={"attention_bias": False},
    ),
    "deepseek2 with sigmoid": File(
        architecture="deepseek2", case="deepseek3",
        keys={
            **_LATENTS, "attention.q_lora_rank": 20, "expert_gating_func": 2, "expert_weights_norm": True,
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
            **_LATENTS, "attention.q_lora_rank": 20, "expert_gating_func": 2, "expert_weights_norm": True,
            "attention.indexer.top_k": 40, "attention.indexer.head_count": 2, "attention.indexer.key_length": 16,
        },
        extra={"index_topk": 40},
    ),
    "deepseek2 of GLM": File(
        architecture="deepseek2", case="glm4-lite",
        keys={**_LATENTS, "attention.q_lora_rank": 20, "expert_gating_func": 2},
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
    "kimi-linear": File(
        architecture="kimi-linear", case="kimi-linear", extra={"linear_num_heads": 4},
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "cache_root", lambda: tmp_path / "cache")


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


@pytest.mark.parametrize("name", FILES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    reference, _ = write(FILES[name], tmp_path)
    tokens, found = logits(model_folder(tmp_path / "m.gguf"))
    with torch.inference_mode():
        torch.testing.assert_close(found, reference(tokens[None]).logits[0], atol=1e-4, rtol=0)


def test_the_second_set_of_factors_is_that_of_long_texts(tmp_path: Path) -> None:
    reference, _ = write(FILES["phi3 with longrope"], tmp_path)
    tokens, found = logits(model_folder(tmp_path / "m.gguf"), 90)
    with torch.inference_mode():
        torch.testing.assert_close(found, reference(tokens[None]).logits[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("keys", "tensors", "message"),
    [
        ({}, {"rope_factors_long.weight": [1.0] * 6}, "must have the tensors .* or neither, got none of .*_short"),
        ({"rope.scaling.type": "yarn"}, {}, "rope.scaling.type must be absent or longrope .*, got 'yarn'"),
        ({"rope.scaling.factor": 2.0}, {}, "rope.scaling.factor must be absent or 1 .*, got 2"),
        ({}, {"rope_factors_long.weight": [1.0], "rope_factors_short.weight": [1.0]}, "short_factor must"),
    ],
)
def test_factors_that_are_not_a_longrope(
    keys: dict[str, Any], tensors: dict[str, list[float]], message: str, tmp_path: Path
) -> None:
    file = FILES["phi3 with longrope"]
    write(replace(file, keys={**file.keys, **keys}, tensors=tensors or file.tensors), tmp_path)
    with pytest.raises(ValueError, match=message):
        load_model(model_folder(tmp_path / "m.gguf"), TorchOps())


def test_chunks_and_temperature_of_llama4_are_those_of_its_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixtures, "_LLAMA4_CHUNK", 13)  # 8192 would need long texts
    file = FILES["llama4"]
    reference, _ = write(replace(file, extra={**file.extra, "attention_chunk_size": 13, "floor_scale": 13}), tmp_path)
    tokens, found = logits(model_folder(tmp_path / "m.gguf"))
    with torch.inference_mode():
        torch.testing.assert_close(found, reference(tokens[None]).logits[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("count", "has_norms"), [(16, True), (128, False)])
def test_llama4_with_128_experts_has_no_norms_of_queries(count: int, has_norms: bool, tmp_path: Path) -> None:
    file = FILES["llama4"]
    write(replace(file, keys={**file.keys, "expert_count": count}), tmp_path)
    config = json.loads((model_folder(tmp_path / "m.gguf") / "config.json").read_text())
    assert config["use_qk_norm"] == has_norms


def rewrite(source: Path, file: Path, parts: Sequence[str], whole: str, *, axis: int = 0) -> None:
    """Write a file again with some tensors of a layer as one.

    Args:
        source: a file of the architecture that its keys name.
        file: to write.
        parts: of the names of these tensors, one below the other.
        whole: the same of the new one.
        axis: on which their rows are.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(file, str(reader.fields["general.architecture"].contents()))
    for one in reader.fields.values():
        if not one.name.startswith("GGUF.") and one.name != "general.architecture":
            writer.add_key_value(one.name, one.contents(), one.types[0], one.types[1] if len(one.types) > 1 else None)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name, tensor in tensors.items():
        if any(part in name for part in parts[1:]):
            continue
        joined = [tensors[name.replace(parts[0], part)] for part in parts] if parts[0] in name else [tensor]
        data = np.concatenate([np.array(one.data) for one in joined], axis=axis if len(joined) > 1 else 0)
        writer.add_tensor(name.replace(parts[0], whole), data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def assert_same(first: Path, second: Path) -> None:
    """Check that two files have the same tensors, by Hugging Face's names, bit for bit."""
    expected, found = GGUFTensors(first), GGUFTensors(second)
    assert set(found.names()) == set(expected.names())
    for name in expected.names():
        assert found.header(name) == expected.header(name)
        assert np.array_equal(found.array(name), expected.array(name)), name


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_one_tensor_for_queries_keys_and_values_is_the_same_as_three(kind: str, tmp_path: Path) -> None:
    """As newer converters may write them for every architecture; rows of Llama's queries and keys are reordered too."""
    write(replace(FILES["llama"], extra={"intermediate_size": 96}), tmp_path, kinds=[kind])
    apart, together = tmp_path / "m.gguf", tmp_path / "together.gguf"
    rewrite(apart, together, ("attn_q.", "attn_k.", "attn_v."), "attn_qkv.")
    assert_same(apart, together)


def test_gates_and_the_others_of_experts_may_be_one_tensor(tmp_path: Path) -> None:
    """As newer converters may write them for every mixture: of each expert, the gate above the other."""
    write(FILES["qwen3moe"], tmp_path)
    apart, together = tmp_path / "m.gguf", tmp_path / "together.gguf"
    rewrite(apart, together, ("ffn_gate_exps.", "ffn_up_exps."), "ffn_gate_up_exps.", axis=1)
    assert_same(apart, together)


def test_tokens_that_a_file_suppresses_are_said_not_to_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = FILES["gemma4"]
    write(file, tmp_path)
    keys = {f"gemma4.{key}": value for key, value in file.keys.items()} | {"tokenizer.ggml.suppress_tokens": [3, 4]}
    gguf_files.write_gguf(
        tmp_path / "model", tmp_path / "m.gguf", architecture="gemma4", keys=keys, tensors=file.tensors
    )
    default_sampling(model_folder(tmp_path / "m.gguf"))
    assert "not followed: suppress_tokens" in caplog.text


def test_every_architecture_has_a_file() -> None:
    assert {file.architecture for file in FILES.values()} | {"mistral"} == set(ARCHITECTURES)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "MXFP4", "BF16"])
def test_latents_in_blocks_are_put_together(kind: str, tmp_path: Path) -> None:
    sizes = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "qk_rope_head_dim": 8}
    keys = {
        **_LATENTS, "attention.kv_lora_rank": 32, "attention.key_length": 40, "attention.value_length": 32,
        "attention.key_length_mla": 40, "attention.value_length_mla": 32,
    }  # fmt: skip
    file = File(architecture="deepseek2", case="deepseek2", extra={**sizes, "moe_intermediate_size": 32}, keys=keys)
    file = replace(file, extra={**file.extra, "intermediate_size": 96})
    _, weights = write(file, tmp_path, kinds=[kind])
    checkpoint = Checkpoint(model_folder(tmp_path / "m.gguf"), dtype=None)
    place = "model.layers.1.self_attn."
    found = checkpoint.numbers(f"{place}kv_b_proj.weight", 4 * 64, 32)
    parts = [weights[f"{place}k_b_proj.weight"].transpose(1, 2), weights[f"{place}v_b_proj.weight"]]
    torch.testing.assert_close(found, torch.cat(parts, dim=1).flatten(0, 1), atol=2e-7, rtol=2**-20)


def test_layers_for_multi_token_prediction_stand_behind_the_decoder(tmp_path: Path) -> None:
    file = FILES["glm4moe"]
    case = CASES[file.case]
    reference = build(replace(case, extra={**case.extra, **file.extra}), tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    last = {name: one for name, one in tensors.items() if "layers.2." in name}
    extra = {name.replace("layers.2", "layers.3"): one.clone() for name, one in last.items()}
    place = "model.layers.3."
    extra |= {f"{place}{name}.weight": torch.randn(64) for name in ("enorm", "hnorm", "shared_head.norm")}
    extra[f"{place}eh_proj.weight"] = torch.randn(64, 128)
    save_file({**tensors, **extra}, tmp_path / "model" / "model.safetensors")
    keys = {f"glm4moe.{key}": value for key, value in file.keys.items()}
    keys |= {"glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 1}
    gguf_files.write_gguf(tmp_path / "model", tmp_path / "m.gguf", architecture="glm4moe", keys=keys)
    made = model_folder(tmp_path / "m.gguf")
    tokens, found = logits(made)
    with torch.inference_mode():
        torch.testing.assert_close(found, reference(tokens[None]).logits[0], atol=1e-4, rtol=0)
    head = find_head_names(tensor_names(made))
    assert head is not None
    assert head.layers == ("model.layers.3",)
    assert ModelConfig.from_folder(made).num_mtp_layers == 1


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "MXFP4", "F16", "BF16"])
def test_experts_stay_in_their_blocks(kind: str, tmp_path: Path) -> None:
    file = File(architecture="qwen3moe", case="qwen3-moe", extra={**_MOE, **_SIZES})
    _, weights = write(file, tmp_path, kinds=[kind])
    checkpoint = Checkpoint(model_folder(tmp_path / "m.gguf"), dtype=None)
    for expert in range(_SIZES["num_experts"]):
        for projection, shape in (("gate_proj", (32, 64)), ("up_proj", (32, 64)), ("down_proj", (64, 32))):
            name = f"model.layers.1.mlp.experts.{expert}.{projection}.weight"
            [form] = checkpoint.forms([(name, shape[0])], shape[1])
            assert type(form).__name__ == _FORMS[kind]
            torch.testing.assert_close(torch.from_numpy(form.dequantised()), weights[name], atol=2e-7, rtol=2**-20)
    tokens, whole = logits(model_folder(tmp_path / "m.gguf"))
    changes = [partial(divided_by_expert, num_ranks=2)] * 2
    found = ranks_logits(model_folder(tmp_path / "m.gguf"), tokens, 2, changes=changes)[1]
    torch.testing.assert_close(found, whole, atol=1e-4, rtol=0)


_SIZES = {"num_experts": 4, "moe_intermediate_size": 32, "intermediate_size": 96}
_FORMS = {
    "Q8_0": "Int8Group",
    "Q4_0": "Int4",
    "Q4_1": "Int4",
    "MXFP4": "Float4",
    "F16": "Float16",
    "BF16": "BFloat16",
}


_OF_SEVERAL: dict[str, str] = {"llama": "mixtral", "mistral3": "mistral3 with a temperature"}
"""The file that is changed, of architectures with several."""
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a factor of experts": ("qwen3moe", {"expert_weights_scale": 2.5}, r"weights_scale must be absent or 1, got 2"),
    "sigmoid": ("qwen3moe", {"expert_gating_func": 2}, r"expert_gating_func must be absent or 1, got 2"),
    "dense layers": ("qwen3moe", {"leading_dense_block_count": 1}, r"dense_block_count must be absent or 0, got 1"),
    "groups": ("qwen3moe", {"expert_group_count": 2}, r"expert_group_count must be absent or 1, got 2"),
    "shared": ("qwen3moe", {"expert_shared_count": 1}, r"expert_shared_count must be absent or 0, got 1"),
    "another count": ("qwen3moe", {"expert_count": 5}, r"ffn_\w+_exps.weight must hold one part for each of 5 experts"),
    "nobody": ("qwen3moe", {"expert_count": 0}, r"qwen3moe.expert_count must be in \[1, 65536\], got 0"),
    "norm of Mixtral": ("llama", {"expert_weights_norm": False}, r"norm_topk_prob must be absent or .*, got False"),
    "softmax": ("glm4moe", {"expert_gating_func": 1}, r"expert_gating_func must be absent or 2, got 1"),
    "no groups chosen": ("glm4moe", {"expert_group_used_count": 0}, r"used_count must be in \[1, 268435456\], got 0"),
    "only extra layers": ("glm4moe", {"nextn_predict_layers": 3}, r"nextn_predict_layers must be in \[0, 2\], got 3"),
    "a step without experts": ("ernie4_5-moe", {"interleave_moe_layer_step": 0}, r"layer_step must be in .*, got 0"),
    "keys of another size": ("deepseek2", {"attention.key_length": 33}, r"must be 32, that of a latent, got 33"),
    "keys that are all rotated": ("deepseek2", {"attention.key_length_mla": 8}, r"must have more than 8 elements, .*8"),
    "a temperature": ("deepseek2", {"attention.temperature_scale": 0.1}, r"temperature_scale must be absent or 0"),
    "yarn that keeps the scale": ("deepseek2", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
                                  r"deepseek2.rope.scaling.yarn_log_multiplier is missing"),
    "windows": ("olmoe", {"attention.sliding_window": 8}, r"sliding_window must be absent or 0, got 8"),
    "a temperature without yarn": ("mistral3", {"rope.scaling.factor": 1.0},
                                   r"mistral3.rope.scaling.type must be yarn beside mistral3.attention.temperature"),
    "values of another size": ("gemma4", {"attention.value_length_swa": 8}, r"value_length_swa must be 16, .* got 8"),
    "sizes that are not twice": ("gemma4", {"feed_forward_length": [80, 80, 80, 160, 160, 80]},
                                 r"feed_forward_length must be one number, or twice it in the last 3 layers"),
    "too few sizes": ("gemma4", {"attention.head_count_kv": [1, 1]}, r"head_count_kv must be a number >= 1 for each"),
    "no rope": ("granite", {"rope.scaling.finetuned": False}, r"scaling.finetuned must be true, got False"),
    "a long pattern": ("gemma3", {"attention.sliding_window_pattern": [True, False]},
                       r"sliding_window_pattern must be a number or have 3 items, got 2"),
    "a wrong pattern": ("gemma3", {"attention.sliding_window_pattern": "all"}, "must be whole numbers, got 'all'"),
    "too few parameters": ("apertus", {"xielu.beta": [0.5, 0.5]}, r"xielu.beta must be a number for each of 3 layers"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_keys_that_change_the_computation(name: str, tmp_path: Path) -> None:
    architecture, keys, message = REFUSED[name]
    file = FILES[_OF_SEVERAL.get(architecture, architecture)]
    own = {**file.keys, **keys}
    named = {key if key.startswith("xielu") else f"{architecture}.{key}": value for key, value in own.items()}
    case = CASES[file.case]
    build(replace(case, extra={**case.extra, **file.extra}), tmp_path / "model")
    made = tmp_path / "m.gguf"
    gguf_files.write_gguf(tmp_path / "model", made, architecture=architecture, keys=named, tensors=file.tensors)
    with pytest.raises(ValueError, match=message):
        load_model(model_folder(made), TorchOps())


@pytest.mark.parametrize("factors", [[1.0] * 16 + [1e30], [1.0] * 8 + [2.0] * 8, [1e30] * 16, []])
def test_factors_that_do_not_say_what_is_rotated(factors: list[float], tmp_path: Path) -> None:
    write(replace(FILES["gemma4"], tensors={"rope_freqs.weight": factors} if factors else {}), tmp_path)
    with pytest.raises(ValueError, match=r"rope_freqs.weight must have 16 numbers, 1 and then at least 1e\+20"):
        load_model(model_folder(tmp_path / "m.gguf"), TorchOps())
