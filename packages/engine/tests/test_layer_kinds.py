"""Fields of models whose kinds of layers have attentions of their own, and the memory that they need (Gemma 4)."""

# pyright: basic
# torch and safetensors are typed in part only.

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from families.case import build
from families.registry import CASES
from pagewood.engine.assembly.model_check import check_model
from pagewood.engine.model_folder.load import check_weights
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.parts.experts_beside import ExpertsBesideConfig
from pagewood.engine.models.parts.feed_forward import FeedForwardConfig
from pagewood.engine.models.parts.rope import ProportionalScaling
from pagewood.engine.quantise import Calibration, Scheme, quantise_model
from pagewood.kvpool import MultiHeadLayout

SMALL: dict[str, Any] = {
    "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "num_attention_heads": 8,
    "num_key_value_heads": 1, "num_kv_shared_layers": 20, "use_double_wide_mlp": True, "sliding_window": 512,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7, "hidden_size_per_layer_input": 256,
    "final_logit_softcapping": 30.0, "use_bidirectional_attention": None, "enable_moe_block": False,
}  # fmt: skip
"""A small model as it is published: with the size of heads that see all positions in a field of its own."""
LARGE: dict[str, Any] = {
    "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16,
    "num_key_value_heads": 8, "num_global_key_value_heads": 2, "global_head_dim": 512, "attention_k_eq_v": True,
    "sliding_window": 1024, "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 128,
    "top_k_experts": 8, "moe_intermediate_size": 704, "use_bidirectional_attention": "vision",
}  # fmt: skip


def read(folder: Path, text: dict[str, Any]) -> ModelConfig:
    """Read the decoder of a checkpoint that reads images too."""
    values = {"architectures": ["Gemma4ForConditionalGeneration"], "vision_config": {}, "text_config": text}
    (folder / "config.json").write_text(json.dumps(values))
    return ModelConfig.from_folder(folder)


def test_the_last_layers_read_what_the_last_earlier_one_of_their_kind_keeps(tmp_path: Path) -> None:
    config = read(tmp_path, SMALL)
    own, shared = config.attentions[:15], config.attentions[15:]
    assert {layer.source for layer in own} == {None}
    assert [layer.source for layer in shared] == [13, 13, 13, 13, 14] * 4
    assert [(layer.head_dim, layer.window) for layer in own[3:5]] == [(256, 512), (512, None)]
    assert {layer.scale for layer in config.attentions} == {1.0}
    assert own[4].rope is not None
    assert own[4].rope.scaling == ProportionalScaling(num_pairs=64)
    sizes = [layer.feed_forward.size for layer in config.layers]
    assert sizes == [6144] * 15 + [12288] * 20
    assert config.inputs is not None
    assert (config.inputs.size, config.inputs.vocab_size, config.output.soft_cap) == (256, 262144, 30.0)


def test_two_small_layers_share_the_place_of_a_large_one(tmp_path: Path) -> None:
    config = read(tmp_path, SMALL)
    groups = config.groups(max_length=4096)
    assert (groups.windows, groups.num_layers) == ((None, 512, 512), 3)
    layout = config.memory_layout(page_size=16, groups=groups)
    assert isinstance(layout, MultiHeadLayout)
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim) == (3, 2, 256)
    owned = [(*place, start) for place, start in zip(groups.places[:15], groups.starts[:15], strict=True)]
    assert len(set(owned)) == 15
    assert groups.places[15:] == (*[groups.places[13]] * 4, groups.places[14]) * 4
    whole = config.memory_layout(page_size=1)
    assert whole.bytes_per_page == 4 * 2 * (12 * 256 + 3 * 512)  # nothing is left empty


def test_layers_with_fewer_key_heads_share_the_place_of_one_with_many(tmp_path: Path) -> None:
    config = read(tmp_path, LARGE)
    groups = config.groups(max_length=1 << 16)
    layout = config.memory_layout(page_size=16, groups=groups)
    assert isinstance(layout, MultiHeadLayout)
    assert (layout.num_kv_heads, layout.head_dim) == (8, 256)
    whole = [place for place, window in zip(groups.places, config.windows, strict=True) if window is None]
    assert len(whole) == 5
    assert len(set(whole)) == 3  # two layers of 1,024 elements in a place of 2,048
    attention = config.attentions[5]
    assert (attention.num_kv_heads, attention.head_dim, attention.values_are_keys) == (2, 512, True)
    assert not config.attentions[4].values_are_keys


def test_experts_stand_beside_a_feed_forward(tmp_path: Path) -> None:
    config = read(tmp_path, LARGE)
    part = config.layers[0].feed_forward
    assert isinstance(part, ExpertsBesideConfig)
    assert part.dense == FeedForwardConfig(size=2112, activation="gelu_tanh")
    router = part.experts.router
    assert (router.num_experts, router.num_chosen, router.renormalises, router.has_factors) == (128, 8, True, True)
    assert config.num_idle_parameters == 30 * 120 * 3 * 704 * 2816


def test_heads_may_be_listed_by_layer(tmp_path: Path) -> None:
    heads = {"head_dim": 512, "num_key_value_heads": 2}
    listed = {str(layer): heads for layer in range(5, 30, 6)}
    plain = {name: value for name, value in LARGE.items() if not name.startswith(("global", "num_global"))}
    assert read(tmp_path, {**plain, "per_layer_config": listed}) == read(tmp_path, LARGE)


def test_the_last_layer_sees_all_positions(tmp_path: Path) -> None:
    config = read(tmp_path, {**LARGE, "num_hidden_layers": 8})
    assert config.windows == (1024,) * 5 + (None, 1024, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention must be absent or null or 'vision'"),
        ({"num_kv_shared_layers": 35}, r"num_kv_shared_layers must be in \[0, 34\], got 35"),
        ({"num_kv_shared_layers": 31}, "num_kv_shared_layers must leave a layer of full_attention .* got 31"),
        ({"per_layer_config": {"40": {}}}, "per_layer_config must have objects for numbers of layers below 35"),
        (
            {"per_layer_config": {"4": {"sliding_window": 9}}},
            "must have no fields but head_dim and num_key_value_heads",
        ),
        ({"per_layer_config": {"34": {"head_dim": 512}}}, "layers 14 and 34"),
        ({"vocab_size_per_layer_input": 262143}, "vocab_size_per_layer_input must be at least vocab_size 262144"),
        ({"enable_moe_block": True}, "num_experts is missing"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, {**SMALL, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"num_kv_shared_layers": 2},
        {"hidden_size_per_layer_input": 8},
        {"attention_k_eq_v": True},
        {"enable_moe_block": True},
        {"use_double_wide_mlp": True},
    ],
)
def test_other_families_do_not_have_these_fields(tmp_path: Path, change: dict[str, Any]) -> None:
    values = {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 6, **change}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=f"{next(iter(change))} must be absent or null or"):
        ModelConfig.from_folder(tmp_path)


def test_keys_and_values_that_no_layer_reads_are_left_out(tmp_path: Path) -> None:
    """Published checkpoints have them."""
    build(CASES["gemma4-small"], tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
        weights[f"model.layers.4.self_attn.{name}"] = torch.zeros(16, 64)
    save_file(weights, tmp_path / "model.safetensors")
    config = ModelConfig.from_folder(tmp_path)
    check_weights(tmp_path, config)
    weights["model.layers.2.self_attn.k_proj.bias"] = torch.zeros(32)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"1 unexpected tensors, the first is model\.layers\.2\.self_attn\.k_proj\.b"):
        check_weights(tmp_path, config)


def test_calibration_is_refused_where_layers_read_more_than_the_residual_stream(tmp_path: Path) -> None:
    build(CASES["gemma4-small"], tmp_path)
    texts = Calibration(tokens=torch.ones(1, 8, dtype=torch.int64), source="a test")
    with pytest.raises(ValueError, match="calibration must be None for a model whose layers read more"):
        quantise_model(tmp_path, tmp_path / "out", Scheme(format="int8"), calibration=texts)
    summary = quantise_model(tmp_path, tmp_path / "out", Scheme(format="int8"))
    assert summary.num_bytes_after < summary.num_bytes_before
    check_weights(tmp_path / "out", ModelConfig.from_folder(tmp_path / "out"))


@pytest.mark.parametrize("name", ["gemma4-small", "gemma4-large", "gemma4-experts"])
def test_the_state_after_each_layer_is_that_of_transformers(tmp_path: Path, name: str) -> None:
    build(CASES[name], tmp_path)
    found = check_model(tmp_path)
    assert found.first is None, found.first
    assert len(found.states) == len(ModelConfig.from_folder(tmp_path).layers) + 1
