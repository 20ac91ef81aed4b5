"""Fields of config.json about rotations, temperatures and windows, in the styles of real checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.parts.attention import AttentionConfig
from pagewood.engine.models.parts.rope import LongScaling, TemperatureConfig, YarnScaling
from pagewood.engine.models.stored.head_order import head_order, in_heads

SIZES: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def read(folder: Path, architecture: str, **values: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**SIZES, "architectures": [architecture], **values}))
    return ModelConfig.from_folder(folder)


def attention(config: ModelConfig) -> AttentionConfig:
    """Return the attention of the first layer."""
    mixer = config.layers[0].mixer
    assert isinstance(mixer, AttentionConfig)
    return mixer


@pytest.mark.parametrize(
    "ropes",
    [
        {"rope_theta": 3e5, "rope_scaling": YARN},
        {
            "rope_parameters": {
                "full_attention": {"rope_theta": 3e5, **YARN},
                "sliding_attention": {"rope_theta": 3e5, "rope_type": "default"},
            }
        },
    ],
)
def test_olmo3_stretches_only_layers_that_see_all_positions(tmp_path: Path, ropes: dict[str, Any]) -> None:
    config = read(tmp_path, "Olmo3ForCausalLM", **ropes, sliding_window=32)
    assert config.windows == (32, 32, 32, None)
    scalings = [mixer.rope.scaling for mixer in config.paged if mixer.rope is not None]
    assert scalings[:3] == [None] * 3
    assert isinstance(scalings[3], YarnScaling)
    assert {rope.theta for rope in config.ropes} == {3e5}


@pytest.mark.parametrize(
    ("fields", "rotated"),
    [
        ({}, [True, True, True, False]),
        ({"no_rope_layers": None, "no_rope_layer_interval": 2}, [True, False, True, False]),
        ({"no_rope_layers": [0, 1, 1, 0, 1]}, [False, True, True, False]),
    ],
)
def test_smollm3_lists_the_layers_that_are_rotated(tmp_path: Path, fields: dict[str, Any], rotated: list[bool]) -> None:
    config = read(tmp_path, "SmolLM3ForCausalLM", **fields)
    assert [mixer.rope is not None for mixer in config.paged] == rotated
    assert config.tied_embeddings
    assert config.ropes[0].theta == 2e6


@pytest.mark.parametrize("listed", [[1, 0], [1, 2, 1, 0], "all"])
def test_a_wrong_list_of_rotated_layers_is_refused(tmp_path: Path, listed: object) -> None:
    with pytest.raises(ValueError, match=r"no_rope_layers must .*, got "):
        read(tmp_path, "SmolLM3ForCausalLM", no_rope_layers=listed)


@pytest.mark.parametrize(
    ("fields", "windows", "rotated"),
    [
        ({"sliding_window": 16}, (16, 16, 16, None), [True, True, True, False]),
        ({"sliding_window": 16, "sliding_window_pattern": "LG"}, (16, None) * 2, [True, False] * 2),
        ({"sliding_window": 16, "layer_types": ["full_attention"] * 4}, (None,) * 4, [False] * 4),
        ({"sliding_window": None, "sliding_window_pattern": None}, (None,) * 4, [True] * 4),
        ({"sliding_window": None, "layer_types": ["full_attention"] * 4}, (None,) * 4, [True] * 4),
    ],
)
def test_exaone4_rotates_layers_with_windows_or_all(
    tmp_path: Path, fields: dict[str, Any], windows: tuple[int | None, ...], rotated: list[bool]
) -> None:
    config = read(tmp_path, "Exaone4ForCausalLM", **fields)
    assert config.windows == windows
    assert [mixer.rope is not None for mixer in config.paged] == rotated


def test_a_pattern_of_other_letters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sliding_window_pattern must consist of L and G, or be a number, got 'LLX'"):
        read(tmp_path, "Exaone4ForCausalLM", sliding_window=16, sliding_window_pattern="LLX")


def test_ministral_has_a_temperature_and_no_window_unless_it_says_so(tmp_path: Path) -> None:
    rope = {**YARN, "rope_theta": 1e6, "llama_4_scaling_beta": 0.2, "max_position_embeddings": 512}
    config = read(tmp_path, "Ministral3ForCausalLM", rope_parameters=rope, head_dim=8)
    assert config.windows == (None,) * 4
    assert attention(config).temperature == TemperatureConfig(scale=0.2, length=128)
    assert len(config.position_configs) == 2
    plain = read(tmp_path, "Ministral3ForCausalLM", rope_parameters={"rope_theta": 1e6}, head_dim=8)
    assert attention(plain).temperature is None
    with pytest.raises(
        ValueError, match=r"max_position_embeddings and rope_parameters.max_position_embeddings must say"
    ):
        read(tmp_path, "Ministral3ForCausalLM", rope_parameters={**rope, "max_position_embeddings": 511}, head_dim=8)


def test_the_text_model_of_mistral3_is_that_of_its_type(tmp_path: Path) -> None:
    rope = {**YARN, "rope_theta": 1e6, "llama_4_scaling_beta": 0.2}
    text = {"rope_parameters": rope, "hidden_size": 64, "num_attention_heads": 8, "sliding_window": None}
    config = read(tmp_path, "Mistral3ForConditionalGeneration", text_config={**text, "model_type": "ministral3"})
    assert attention(config).temperature is not None
    assert (config.num_layers, attention(config).head_dim) == (34, 128)
    del rope["llama_4_scaling_beta"]
    config = read(tmp_path, "Mistral3ForConditionalGeneration", text_config={**text, "model_type": "mistral"})
    assert attention(config).temperature is None
    assert (config.num_layers, attention(config).head_dim, config.max_position) == (32, 8, 131_072)


def test_a_vision_checkpoint_may_have_all_fields_outside(tmp_path: Path) -> None:
    """As those of Qwen2.5-VL in the style of transformers 4, whose positions have three axes."""
    rope = {"type": "mrope", "mrope_section": [2, 1, 1]}
    config = read(
        tmp_path,
        "Qwen2_5_VLForConditionalGeneration",
        rope_scaling=rope,
        vision_config={"depth": 1},
        tie_word_embeddings=True,
    )
    assert (config.num_layers, config.ropes[0].theta, config.ropes[0].scaling) == (4, 1e6, None)
    assert config.tied_embeddings
    assert config.other_parts == ("visual.", "model.visual.")


def test_a_part_of_a_head_is_rotated(tmp_path: Path) -> None:
    inside = read(tmp_path, "Glm4ForCausalLM", rope_parameters={"partial_rotary_factor": 0.25}, head_dim=16)
    outside = read(tmp_path, "Glm4ForCausalLM", partial_rotary_factor=0.25, head_dim=16)
    assert inside.ropes == outside.ropes
    assert (inside.ropes[0].size, inside.ropes[0].rotated) == (4, 4)
    assert read(tmp_path, "Glm4ForCausalLM", head_dim=16).ropes[0].size == 8
    assert read(tmp_path, "Phi3ForCausalLM").ropes[0].rotated is None
    assert read(tmp_path, "Phi3ForCausalLM", rotary_dim=6).ropes[0].rotated == 6
    with pytest.raises(ValueError, match=r"partial_rotary_factor must leave an even number .* of the 16 elements"):
        read(tmp_path, "Glm4ForCausalLM", partial_rotary_factor=0.2, head_dim=16)


def test_hunyuan_has_one_base_for_all_positions(tmp_path: Path) -> None:
    rope = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
            "mscale_all_dim": 1.0}  # fmt: skip
    [own] = read(tmp_path, "HunYuanDenseV1ForCausalLM", rope_theta=1e4, rope_scaling=rope, head_dim=16).ropes
    assert own.scaling is None
    assert own.theta == pytest.approx(1e4 * 1000 ** (16 / 14))


def test_longrope_has_two_sets_of_factors_if_requests_may_be_long(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = read(
        tmp_path,
        "Phi3ForCausalLM",
        rope_scaling={"type": "su", **factors},
        original_max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    scaling = config.ropes[0].scaling
    assert isinstance(scaling, LongScaling)
    assert scaling.sets == ((1.0,) * 4, (2.0,) * 4)
    assert scaling.attention_factor == pytest.approx((1 + np.log(4) / np.log(128)) ** 0.5)
    assert (config.max_position, config.short_length) == (512, 128)
    short = config.for_length(128)
    assert short.short_length is None
    assert [one.scaling.sets for one in short.ropes if isinstance(one.scaling, LongScaling)] == [((1.0,) * 4,)]
    assert config.for_length(129) == config


def test_the_order_of_a_head_makes_halves_of_pairs() -> None:
    assert head_order(8, rotated=8, has_neighbours=False) is None
    for rotated, has_neighbours, pairs in (
        (8, True, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (4, True, [(0, 1), (2, 3)]),
        (4, False, [(0, 2), (1, 3)]),
    ):
        order = head_order(8, rotated=rotated, has_neighbours=has_neighbours)
        assert order is not None
        assert sorted(order.tolist()) == list(range(8))
        assert [(int(order[i]), int(order[i + 4])) for i in range(rotated // 2)] == pairs
        assert in_heads(order, range(2)).tolist() == [*order.tolist(), *(order + 8).tolist()]
