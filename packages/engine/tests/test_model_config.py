"""config.json and generation_config.json, in the styles of transformers 4 and 5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.rope_config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    Scaling,
    YarnScaling,
)

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 32}


def read(folder: Path, values: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_folder(folder)


def test_sizes_and_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA)
    assert (config.architecture, config.vocab_size, config.num_layers) == ("LlamaForCausalLM", 100, 4)
    assert (config.head_dim, config.q_size, config.kv_size) == (8, 64, 16)
    assert config.windows == (None,) * 4
    assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm) == (False,) * 4
    assert config.rope.theta == 10000.0
    assert config.rope.scaling is None
    assert config.eos_token_ids == ()


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "linear", "factor": 2}, LinearScaling(factor=2.0)),
        ({"rope_type": "dynamic", "factor": 4.0}, DynamicScaling(factor=4.0, original_length=512)),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
            Llama3Scaling(factor=8.0, original_length=128, low_frequency_factor=1.0, high_frequency_factor=4.0),
        ),
        (
            {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 64},
            YarnScaling(
                factor=1.0, original_length=64, beta_fast=32.0, beta_slow=1.0, truncate=True, attention_factor=1.0
            ),
        ),
    ],
)
def test_rope_of_both_styles(tmp_path: Path, scaling: dict[str, Any], expected: Scaling) -> None:
    old = read(tmp_path, {**LLAMA, "rope_theta": 5e5, "rope_scaling": scaling})
    new = read(tmp_path, {**LLAMA, "rope_parameters": {"rope_theta": 5e5, **scaling}})
    assert old.rope == new.rope
    assert old.rope.theta == 5e5
    assert old.rope.scaling == expected


def test_yarn_takes_its_attention_factor_from_two_scales(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    scaling = read(tmp_path, {**LLAMA, "rope_scaling": yarn}).rope.scaling
    assert isinstance(scaling, YarnScaling)
    assert scaling.attention_factor == 1.0


def test_windows(tmp_path: Path) -> None:
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 16}
    assert read(tmp_path, mistral).windows == (16,) * 4
    assert read(tmp_path, {**mistral, "sliding_window": None}).windows == (None,) * 4
    assert read(tmp_path, QWEN2).windows == (None,) * 4
    used = {**QWEN2, "use_sliding_window": True}
    assert read(tmp_path, {**used, "max_window_layers": 3}).windows == (None, None, None, 32)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert read(tmp_path, {**used, "layer_types": kinds}).windows == (32, None, 32, None)


def test_biases_and_norms_of_each_architecture(tmp_path: Path) -> None:
    qwen2 = read(tmp_path, QWEN2)
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = read(tmp_path, {**LLAMA, "architectures": ["Qwen3ForCausalLM"]})
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 128)
    llama = read(tmp_path, {**LLAMA, "attention_bias": True, "mlp_bias": True})
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias) == (True, True, True)


def test_generation_config(tmp_path: Path) -> None:
    config = read(tmp_path, {**LLAMA, "eos_token_id": 1}, {"eos_token_id": [7, 8]})
    assert config.eos_token_ids == (7, 8)


def test_eos_of_config_json(tmp_path: Path) -> None:
    assert read(tmp_path, {**LLAMA, "eos_token_id": 1}, {}).eos_token_ids == (1,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "LlamaForCausalLM, MistralForCausalLM, Qwen2.*Qwen3.*got Mamba"),
        ({"architectures": None}, "got no architecture"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": "many"}, "vocab_size must be a whole number, got 'many'"),
        ({"num_key_value_heads": 3}, "num_heads must be a multiple of num_kv_heads 3, got 8"),
        ({"head_dim": 7}, "head_dim must be a multiple of 4"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type must be .* got 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, got 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config must be absent"),
        ({"rope_scaling": 3}, "rope_scaling must be an object"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, {**LLAMA, **change})


def test_a_file_that_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="must hold JSON"):
        ModelConfig.from_folder(tmp_path)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ModelConfig.from_folder(tmp_path)
