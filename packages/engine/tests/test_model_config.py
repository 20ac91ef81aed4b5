"""config.json and generation_config.json, in the styles of transformers 4 and 5."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewood.engine.model_folder.folder import default_sampling
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.parts.layer import FrameConfig, LayerConfig
from pagewood.engine.models.parts.norm import NormConfig
from pagewood.engine.models.parts.output import OutputConfig
from pagewood.engine.models.parts.rope import DynamicScaling, LinearScaling, Llama3Scaling, Scaling, YarnScaling
from pagewood.engine.models.rope import Rope

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


def feed_forward(layer: LayerConfig) -> Any:
    """The numbers of a layer's feed-forward, whichever it has."""
    return layer.feed_forward


def test_sizes_and_defaults(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA)
    assert (config.architecture, config.vocab_size, config.num_layers) == ("LlamaForCausalLM", 100, 4)
    [layer], [attention] = set(config.layers), set(config.attentions)
    assert (attention.head_dim, attention.q_size, attention.kv_size) == (8, 64, 16)
    assert (attention.scale, feed_forward(layer).size) == (8**-0.5, 96)
    assert config.windows == (None,) * 4
    assert (attention.qkv_bias, attention.output_bias, feed_forward(layer).has_bias) == (False,) * 3
    assert attention.qk_norm is None
    assert config.ropes[0].theta == 10000.0
    assert config.ropes[0].scaling is None
    assert config.eos_token_ids == ()


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "linear", "factor": 2}, LinearScaling(factor=2.0, original_length=512)),
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
    assert old.ropes == new.ropes
    assert old.ropes[0].theta == 5e5
    assert old.ropes[0].scaling == expected


def test_yarn_takes_its_attention_factor_from_two_scales(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    scaling = read(tmp_path, {**LLAMA, "rope_scaling": yarn}).ropes[0].scaling
    assert isinstance(scaling, YarnScaling)
    assert scaling.attention_factor == 1.0


@pytest.mark.parametrize(
    ("max_position", "scaling", "longest"),
    [
        (32768, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (40960, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (131072, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        (1000, {"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 33}, 1000),
        (4096, {"type": "linear", "factor": 2.5}, 10240),
        (16384, {"type": "linear", "factor": 4, "original_max_position_embeddings": 4096}, 16384),
        (4096, {"type": "dynamic", "factor": 2.0}, 8192),
        (
            131072,
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            131072,
        ),
        (4096, None, 4096),
    ],
)
def test_scaled_rope_extends_the_longest_sequence(
    tmp_path: Path, max_position: int, scaling: dict[str, Any] | None, longest: int
) -> None:
    values = {**LLAMA, "max_position_embeddings": max_position}
    assert read(tmp_path, {**values, "rope_scaling": scaling}).max_position == longest
    assert read(tmp_path, {**values, "rope_parameters": {"rope_theta": 1e6, **(scaling or {})}}).max_position == longest


def test_the_original_length_may_stand_beside_the_scaling(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        {**LLAMA, "original_max_position_embeddings": 300, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    )
    assert isinstance(config.ropes[0].scaling, YarnScaling)
    assert config.ropes[0].scaling.original_length == 300
    assert config.max_position == 600


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
    qwen2 = read(tmp_path, QWEN2).attentions[0]
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, None)
    qwen3 = read(tmp_path, {**LLAMA, "architectures": ["Qwen3ForCausalLM"]})
    own = qwen3.attentions[0]
    assert (own.qkv_bias, own.output_bias, own.qk_norm, own.head_dim) == (False, False, qwen3.norm, 128)
    llama = read(tmp_path, {**LLAMA, "attention_bias": True, "mlp_bias": True})
    own = llama.attentions[0]
    assert (own.qkv_bias, own.output_bias, feed_forward(llama.layers[0]).has_bias) == (True, True, True)


GEMMA3_TEXT = {
    "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
}  # fmt: skip


def test_the_text_model_of_a_model_of_images(tmp_path: Path) -> None:
    """As Gemma 3 is published: most fields are absent, and ropes are in the style of transformers 4."""
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "vision_config": {}}
    config = read(tmp_path, {**outer, "text_config": GEMMA3_TEXT})
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (262208, 2560, 34)
    assert (config.eos_token_ids, config.tied_embeddings, config.max_position) == ((1, 106), True, 131072)
    assert config.embedding_multiplier == 2560**0.5
    assert config.norm == NormConfig(epsilon=1e-6, offset=1.0)
    assert config.windows == tuple(None if layer % 6 == 5 else 1024 for layer in range(34))
    local, full = config.ropes
    assert (local.theta, local.scaling) == (1e4, None)
    assert (full.theta, full.scaling) == (1e6, LinearScaling(factor=8.0, original_length=131072))
    layer, attention = config.layers[5], config.attentions[5]
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (8, 4, 256)
    assert (attention.scale, attention.rope) == (1 / 16, full)
    assert (feed_forward(layer).size, feed_forward(layer).activation) == (10240, "gelu_tanh")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_logit_softcapping": -1}, "text_config: attn_logit_softcapping must be in"),
        ({"logit_scale": 0.5}, "text_config: logit_scale must be absent or null or 1, got 0.5"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention must be"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be in"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters must hold an object for each of the layer types"),
        ({"hidden_activation": "relu"}, "hidden_activation must be silu or swish or gelu_pytorch_tanh, got 'relu'"),
    ],
)
def test_what_gemma_does_not_do_here_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(
            tmp_path,
            {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {**GEMMA3_TEXT, **change}},
        )


def layer_of(config: ModelConfig) -> Any:
    """Return the first layer, whose parts are of the kinds that a test expects."""
    return config.layers[0]


GRANITE = {
    **LLAMA,
    "architectures": ["GraniteForCausalLM"],
    "attention_multiplier": 0.125,
    "embedding_multiplier": 12.0,
    "logits_scaling": 8,
    "residual_multiplier": 0.25,
}
STARCODER = {
    **LLAMA, "architectures": ["Starcoder2ForCausalLM"], "activation_function": "gelu",
    "hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-4,
}  # fmt: skip
GEMMA = {**LLAMA, "architectures": ["GemmaForCausalLM"], "hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}
GEMMA2 = {**LLAMA, "architectures": ["Gemma2ForCausalLM"]}


def test_multipliers(tmp_path: Path) -> None:
    config = read(tmp_path, GRANITE)
    assert (config.embedding_multiplier, config.output) == (12.0, OutputConfig(multiplier=0.125))
    [layer] = set(config.layers)
    assert (layer.residual_multiplier, config.paged[0].scale) == (0.25, 0.125)
    config = read(tmp_path, {**LLAMA, "architectures": ["GraniteForCausalLM"]})
    assert (config.embedding_multiplier, config.output, config.paged[0].scale) == (1.0, OutputConfig(), 1.0)
    with pytest.raises(ValueError, match=r"residual_multiplier must be in .* got 0"):
        read(tmp_path, {**GRANITE, "residual_multiplier": 0})
    for name in ("embedding_multiplier", "logits_scaling", "attention_multiplier", "residual_multiplier"):
        with pytest.raises(ValueError, match=f"{name} must be absent or null"):
            read(tmp_path, {**LLAMA, name: 0.5})


def test_soft_caps_are_absent_or_null(tmp_path: Path) -> None:
    """Absent ones are those of the family, null ones are none."""
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    config = read(tmp_path, GEMMA2)
    assert (config.attentions[0].soft_cap, config.output.soft_cap) == (50.0, 30.0)
    assert config.windows == (4096, None, 4096, None)
    config = read(tmp_path, {**GEMMA2, **dict.fromkeys(names)})
    assert (config.attentions[0].soft_cap, config.output.soft_cap) == (None, None)


def test_names_of_fields_of_few_families(tmp_path: Path) -> None:
    """An error has the name that the file has."""
    config = read(tmp_path, STARCODER)
    assert config.norm == NormConfig(epsilon=1e-4, is_centred=True, has_bias=True)
    [layer], [attention] = set(config.layers), set(config.attentions)
    assert (attention.qkv_bias, attention.output_bias, feed_forward(layer).has_bias) == (True, True, True)
    assert feed_forward(layer).activation == "gelu_tanh"
    assert config.windows == (None,) * 4
    plain = read(tmp_path, {**STARCODER, "use_bias": False})
    own = plain.attentions[0]
    assert (own.qkv_bias, own.output_bias, feed_forward(plain.layers[0]).has_bias) == (False, False, False)
    for change, message in (
        ({"norm_epsilon": 0}, r"config.json: norm_epsilon must be in"),
        ({"use_bias": "no"}, "config.json: use_bias must be true or false, got 'no'"),
        ({"hidden_act": "silu"}, "config.json: hidden_act must be gelu or gelu_new or .* got 'silu'"),
    ):
        with pytest.raises(ValueError, match=message):
            read(tmp_path, {**STARCODER, **change})


MODERN_BERT = {
    **LLAMA, "architectures": ["ModernBertModel"], "num_key_value_heads": None, "hidden_activation": "gelu",
    "norm_eps": 1e-5, "layer_norm_eps": 1e-5, "local_attention": 16,
}  # fmt: skip


def test_names_of_fields_of_other_families(tmp_path: Path) -> None:
    """Files of ModernBERT have one beside their own, and PowerMoE one alone, with the value that counts anyway."""
    assert read(tmp_path, MODERN_BERT).norm.epsilon == 1e-5
    with pytest.raises(ValueError, match=r"norm_eps and layer_norm_eps|layer_norm_eps and norm_eps"):
        read(tmp_path, {**MODERN_BERT, "layer_norm_eps": 1e-6})
    with pytest.raises(ValueError, match="layer_norm_eps must be named rms_norm_eps"):
        read(tmp_path, {**MODERN_BERT, "norm_eps": None})
    mixture = {**LLAMA, "architectures": ["GraniteMoeForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
    assert read(tmp_path, {**mixture, "activation_function": "silu"}) == read(tmp_path, mixture)
    with pytest.raises(ValueError, match="activation_function must be named hidden_act"):
        read(tmp_path, {**mixture, "activation_function": "gelu"})


@pytest.mark.parametrize(("value", "is_tuned"), [(True, True), (4, True), (None, True), (False, False), (0, False)])
def test_the_temperature_of_llama4_is_a_flag_or_a_number(tmp_path: Path, value: object, is_tuned: bool) -> None:
    fields = {
        **LLAMA,
        "architectures": ["Llama4ForCausalLM"],
        "attention_chunk_size": 64,
        "no_rope_layers": [1, 1, 1, 0],
    }
    config = read(tmp_path, {**fields, "attn_temperature_tuning": value})
    assert [one.temperature is not None for one in config.attentions] == [False] * 3 + [is_tuned]
    with pytest.raises(ValueError, match="attn_temperature_tuning must be"):
        read(tmp_path, {**fields, "attn_temperature_tuning": "yes"})


GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "vocab_size": 100, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_ctx": 32,
    "n_positions": 32,
}  # fmt: skip


def test_the_fields_of_gpt2(tmp_path: Path) -> None:
    config = read(tmp_path, GPT2)
    assert (config.hidden_size, config.num_layers, config.max_position, config.tied_embeddings) == (64, 2, 32, True)
    assert config.has_learned_positions
    layer = layer_of(config)
    assert (feed_forward(layer).size, feed_forward(layer).activation, layer.mixer.rope) == (256, "gelu_tanh", None)
    assert layer_of(read(tmp_path, {**GPT2, "n_inner": 80})).feed_forward.size == 80
    for change, message in (
        ({"n_layer": None}, "config.json: n_layer is missing"),
        ({"n_embd": 0}, "config.json: n_embd must be in"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx must be absent or null or False"),
        ({"hidden_size": 65}, "hidden_size and n_embd must say the same, got 65 and 64"),
    ):
        with pytest.raises(ValueError, match=message):
            read(tmp_path, {**GPT2, **change})


NEOX = {
    **LLAMA, "architectures": ["GPTNeoXForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 4,
    "layer_norm_eps": 1e-4,
}  # fmt: skip


def test_the_fields_of_gpt_neox(tmp_path: Path) -> None:
    """A part of a head is rotated, and the parts of a layer are parallel, unless fields say otherwise."""
    layer = layer_of(read(tmp_path, NEOX))
    assert layer.norm == NormConfig(epsilon=1e-4, is_centred=True, has_bias=True)
    assert layer.frame == FrameConfig(is_parallel=True)
    assert (layer.mixer.qkv_bias, layer.mixer.output_bias, feed_forward(layer).has_bias) == (True, True, True)
    assert (layer.mixer.rope.size, layer.mixer.rope.theta) == (4, 1e4)
    old = layer_of(read(tmp_path, {**NEOX, "rotary_pct": 0.5, "rotary_emb_base": 5e4, "use_parallel_residual": False}))
    new = {"rope_parameters": {"rope_theta": 5e4, "partial_rotary_factor": 0.5}, "attention_bias": False}
    assert (old.frame, old.mixer.rope.size, old.mixer.rope.theta) == (FrameConfig(), 8, 5e4)
    plain = layer_of(read(tmp_path, {**NEOX, **new}))
    assert (plain.mixer.rope, plain.mixer.qkv_bias, plain.mixer.output_bias) == (old.mixer.rope, False, False)
    with pytest.raises(ValueError, match="use_parallel_residual must be true or false, got 1"):
        read(tmp_path, {**NEOX, "use_parallel_residual": 1})
    with pytest.raises(ValueError, match="use_parallel_residual must be absent or null or False, got True"):
        read(tmp_path, {**LLAMA, "use_parallel_residual": True})


def test_command_r_rotates_layers_with_a_window(tmp_path: Path) -> None:
    config = read(tmp_path, {**LLAMA, "architectures": ["Cohere2ForCausalLM"], "sliding_window": 16})
    every: Any = config.layers
    assert [(layer.mixer.window, layer.mixer.rope is None) for layer in every] == [(16, False)] * 3 + [(None, True)]
    assert config.output == OutputConfig(multiplier=0.0625)
    assert layer_of(config).frame == FrameConfig(before_feed_forward=None, is_parallel=True)
    with pytest.raises(ValueError, match="use_qk_norm must be absent or null or False, got True"):
        read(tmp_path, {**LLAMA, "architectures": ["CohereForCausalLM"], "use_qk_norm": True})


def test_the_first_gemma_means_the_approximation_by_gelu(tmp_path: Path) -> None:
    for change in ({}, {"hidden_activation": None}, {"hidden_act": "gelu_pytorch_tanh"}, {"hidden_act": None}):
        assert feed_forward(read(tmp_path, {**GEMMA, **change}).layers[0]).activation == "gelu_tanh"


def test_parts_that_do_not_fit_their_frame() -> None:
    with pytest.raises(ValueError, match="parallel parts must have norms before them and none behind them"):
        FrameConfig(is_parallel=True, behind_mixer="norm", behind_feed_forward="norm")
    with pytest.raises(ValueError, match="has_bias must be False in a norm without is_centred"):
        NormConfig(epsilon=1e-5, has_bias=True)
    with pytest.raises(ValueError, match="the soft cap of logits must be in"):
        OutputConfig(soft_cap=-1.0)


def test_generation_config(tmp_path: Path) -> None:
    config = read(tmp_path, {**LLAMA, "eos_token_id": 1}, {"eos_token_id": [7, 8]})
    assert config.eos_token_ids == (7, 8)


def test_eos_of_config_json(tmp_path: Path) -> None:
    assert read(tmp_path, {**LLAMA, "eos_token_id": 1}, {}).eos_token_ids == (1,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "one of Llama, Mistral, .*Qwen2.*Qwen3.* with ForCausalLM, got Mamba",
        ),
        ({"architectures": None}, "got no architecture"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu or swish or gelu_pytorch_tanh, got 'gelu'"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": "many"}, "vocab_size must be a whole number, got 'many'"),
        ({"num_key_value_heads": 3}, "num_heads must be a multiple of num_kv_heads 3, got 8"),
        ({"head_dim": 7}, "head_dim must be a multiple of 4"),
        ({"rope_scaling": {"rope_type": "axial"}}, "rope_type must be .* got 'axial'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "short_factor is missing"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}},
            r"short_factor must be a list of 4 numbers, got \[1.0\]",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1, 1, 1, "x"]}},
            "short_factor must be a list of numbers in .* got 'x'",
        ),
        ({"rope_scaling": {"llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta must be absent or null, got 0.1"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, got 0.5"),
        ({"quantization_config": {"bits": 4}}, "quant_method must be one of gptq, awq, .* got 'none'"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quant_method must be one of gptq, awq, .* got 'aqlm'"),
        ({"rope_scaling": 3}, "rope_scaling must be an object"),
    ],
)
def test_unsupported_values_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, {**LLAMA, **change})


YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**12}, r"num_hidden_layers must be in \[1, 4096\], got 1000000000000"),
        ({"num_hidden_layers": 10**8}, "num_hidden_layers must be in"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be in"),
        ({"vocab_size": 2**40}, r"vocab_size must be in \[1, 16777216\], got 1099511627776"),
        ({"hidden_size": -64}, "hidden_size must be in"),
        ({"head_dim": 2**20}, r"head_dim must be in \[1, 512\]"),
        ({"num_attention_heads": 10**300}, r"num_attention_heads must be in .* got 10{79}\.\.\."),
        ({"max_position_embeddings": 10**15}, "max_position_embeddings must be in"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be in .* got nan"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be in"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps must be in"),
        ({"rope_theta": 0}, r"rope_theta must be in \[2, .*\], got 0"),
        ({"rope_theta": 1}, "rope_theta must be in"),
        ({"rope_theta": float("nan")}, "rope_theta must be in .* got nan"),
        ({"rope_scaling": {**YARN, "factor": 0.5}}, "factor must be in"),
        ({"rope_scaling": {**YARN, "factor": float("inf")}}, "factor must be in"),
        ({"rope_scaling": {**YARN, "beta_slow": 64.0}}, "beta_slow must be at most beta_fast 32.0, got 64.0"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 0}}, "original_max_position_embeddings must be"),
        ({"rope_scaling": {**YARN, "attention_factor": float("nan")}}, "attention_factor must be in"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.5}}, "low_freq_factor must be at most high_freq_factor 4.0"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 4096}, "max_position_embeddings": 2**20},
            "factor times the original length must be at most",
        ),
        ({"eos_token_id": 10**30}, r"eos_token_id must be in \[0, 99\], got 10{30}"),
        ({"eos_token_id": [1, -1]}, "eos_token_id must be in .* got -1"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -3}, "sliding_window must be in"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["full_attention"],
            },
            "layer_types must have 4 entries, got 1",
        ),
    ],
)
def test_numbers_out_of_range_are_named_with_their_file(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read(tmp_path, {**LLAMA, **change})
    assert str(tmp_path / "config.json") in str(caught.value)


def test_an_end_token_of_the_generation_config_must_be_in_the_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"generation_config.json: eos_token_id must be in \[0, 99\], got 100"):
        read(tmp_path, LLAMA, {"eos_token_id": [2, 100]})


HOSTILE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**40), 10**40),
    st.sampled_from([0, -1, 1, 2, 3, 4, 8, 2**31, 2**40, 10**12]),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(-2, 200), st.text(max_size=3), st.none()), max_size=4),
    st.dictionaries(
        st.sampled_from(["rope_type", "factor", "rope_theta"]), st.integers(-1, 5) | st.floats(), max_size=3
    ),
)
SCALING = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["default", "linear", "dynamic", "yarn", "llama3", "other"])},
    optional={
        name: st.one_of(HOSTILE, st.floats(0.5, 50))
        for name in (
            "factor", "rope_theta", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate",
            "attention_factor", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor",
            "partial_rotary_factor",
        )
    },
)  # fmt: skip
FIELDS = [
    *LLAMA, "head_dim", "rms_norm_eps", "rope_theta", "hidden_act", "attention_bias", "mlp_bias", "tie_word_embeddings",
    "eos_token_id", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "partial_rotary_factor",
    "rope_scaling", "rope_parameters", "quantization_config", "original_max_position_embeddings",
]  # fmt: skip


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    architecture=st.sampled_from(
        ["LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM", "Olmo2ForCausalLM", "Gemma3ForCausalLM"]
    ),
    changes=st.dictionaries(st.sampled_from(FIELDS), HOSTILE, max_size=4),
    scaling=st.none() | SCALING,
    eos=HOSTILE,
)
def test_any_configuration_is_read_or_refused(
    tmp_path: Path, architecture: str, changes: dict[str, Any], scaling: dict[str, Any] | None, eos: Any
) -> None:
    """A configuration that is accepted has finite rotations at its first and at its last position."""
    values = {**LLAMA, "architectures": [architecture], "rope_scaling": scaling, **changes}
    config, problem = None, ""
    try:
        config = read(tmp_path, values, {"eos_token_id": eos})
    except ValueError as error:
        problem = str(error)
    if config is None:
        assert str(tmp_path) in problem
        assert len(problem) < 1000
        return
    for own in config.ropes:
        for part in Rope(own, device=torch.device("cpu"))(torch.tensor([0, config.max_position - 1])):
            assert part.isfinite().all()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.dictionaries(
        st.sampled_from(["do_sample", "temperature", "top_k", "top_p", "min_p", "eos_token_id"]), HOSTILE, max_size=6
    )
)
def test_any_generation_config_is_read_or_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    try:
        sampling = default_sampling(tmp_path)
    except ValueError:
        return
    assert 0 <= sampling.top_k < 2**31
    assert math.isfinite(sampling.temperature)


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "[]", "1" * 5000, '{"a": \x00}', "null"])
def test_a_file_that_is_not_a_json_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="must hold"):
        ModelConfig.from_folder(tmp_path)


def test_a_configuration_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ValueError, match="must be a file"):
        ModelConfig.from_folder(tmp_path)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ModelConfig.from_folder(tmp_path)
