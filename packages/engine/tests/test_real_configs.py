"""Files like the config.json of published checkpoints give the parts and the memory that these models should have.

Most were compared with a copy of the published file in a public repository; `source` of an entry names both. From
memory are those of Mistral Nemo, Gemma 1 2B, Gemma 3 4B, Phi 3 mini 4k, Phi 4 mini, SmolLM3 3B, EXAONE 4 1.2B,
Granite 4 Micro, ERNIE 4.5 0.3B, Pythia 1B, Bamba 9B, Codestral Mamba 7B, Nemotron 3 Nano 30B-A3B, OLMo Hybrid 7B,
LFM2 8B-A1B and Kimi Linear 48B-A3B.
"""

# pyright: basic
from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pagewood.engine.core.memory.page_groups import PageGroups
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.memory import layer_groups
from pagewood.kvpool import PageAllocator
from real_configs import REAL


def read(folder: Path, values: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(values))
    return ModelConfig.from_folder(folder)


def value_at(config: object, place: str) -> Any:
    for name in place.split("."):
        config = config[int(name)] if name.isdigit() else getattr(config, name)  # pyright: ignore[reportIndexIssue]
    return config


@pytest.mark.parametrize("name", REAL)
def test_a_file_of_a_published_shape_is_read(name: str, tmp_path: Path) -> None:
    real = REAL[name]
    config = read(tmp_path, real.values)
    layout = config.memory_layout(page_size=16, dtype="bfloat16")
    assert layout.bytes_per_page == 16 * real.token_bytes
    assert {place: value_at(config, place) for place in real.parts} == real.parts


def inner(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the text model, which may stand inside."""
    return values.get("text_config", values)


def changed(name: str, **change: Any) -> dict[str, Any]:
    """Return a file with other fields of its text model; None: without a field."""
    values = json.loads(json.dumps(REAL[name].values))
    own = inner(values)
    own |= change
    for key in [key for key, value in change.items() if value is None]:
        del own[key]
    return values


def test_the_files_that_are_from_memory_are_named() -> None:
    assert __doc__ is not None
    words = " ".join(__doc__.split())
    listed = re.split(", | and ", words.partition("memory are those of ")[2].removesuffix("."))
    assert listed == [name for name, real in REAL.items() if not real.source]


OLD_ROPES = [
    name
    for name, real in REAL.items()
    if "rope_theta" in inner(real.values) and "rope_local_base_freq" not in inner(real.values) and name != "OLMo 3 7B"
]
"""Files with fields from before `rope_parameters`, of models with one rope for all layers that have any."""


@pytest.mark.parametrize("name", OLD_ROPES)
def test_new_names_of_fields_mean_the_same(name: str, tmp_path: Path) -> None:
    fields = inner(REAL[name].values)
    scaling = fields.get("rope_scaling") or {}
    ropes = {"rope_type": scaling.get("type", "default"), **scaling, "rope_theta": fields["rope_theta"]}
    new = changed(name, rope_theta=None, rope_scaling=None, rope_parameters=ropes, torch_dtype=None, dtype="bfloat16")
    assert read(tmp_path, new) == read(tmp_path, REAL[name].values)


@pytest.mark.parametrize("name", [name for name in REAL if "hidden_size" in inner(REAL[name].values)])
@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("num_hidden_layers", 0, r"num_hidden_layers must be .*got 0"),
        ("num_attention_heads", "many", r"num_attention_heads must be .*got 'many'"),
        ("hidden_size", 7.5, r"hidden_size must be .*got 7\.5"),
        ("vocab_size", -1, r"vocab_size must be .*got -1"),
    ],
)
def test_a_wrong_field_is_named(name: str, field: str, value: object, rule: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rule) as error:
        read(tmp_path, changed(name, **{field: value}))
    assert str(tmp_path / "config.json") in str(error.value)


@pytest.mark.parametrize(
    ("name", "change", "rule"),
    [
        ("EXAONE 4 32B", {"sliding_window_pattern": "LLXG", "layer_types": None}, "sliding_window_pattern"),
        ("EXAONE 4 32B", {"layer_types": ["full_attention"] * 63}, "layer_types must .*64"),
        ("OLMo 3 7B", {"layer_types": ["sliding"] * 32}, "layer_types must .*'sliding'"),
        ("SmolLM3 3B", {"no_rope_layers": [1, 1, 1, 0]}, "no_rope_layers must .*36"),
        ("Qwen 3 0.6B", {"head_dim": 127}, "head_dim must .*got 127"),
        ("Llama 3.1 8B", {"dtype": "float16"}, "dtype and torch_dtype|torch_dtype and dtype"),
        ("Llama 3.1 8B", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope"),
        ("MiniMax M2", {"use_qk_norm": False}, "use_qk_norm must be absent or null or True, got False"),
        ("Llama 4 Scout", {"rope_scaling": {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 2.0,
         "high_freq_factor": 1.0, "original_max_position_embeddings": 8192}}, "low_freq_factor must be at most"),
        ("Granite 4 Micro", {"layer_types": ["rwkv"] + ["attention"] * 39}, "layer_types must name .*'rwkv'"),
        ("Granite 4 Micro", {"layer_types": ["mamba"] * 39}, "layer_types must name .* each of 40 layers, got 39"),
        ("Nemotron 3 Nano 30B-A3B", {"hybrid_override_pattern": "E" * 52}, "layers must not all be without a mixer"),
        ("Nemotron 3 Nano 30B-A3B", {"hybrid_override_pattern": "M?" * 26}, "layer_types must name .*, mlp, moe .*"),
        ("Nemotron 3 Nano 30B-A3B", {"layer_types": ["mamba"] * 52}, "layer_types and hybrid_override_pattern must"),
        ("Bamba 9B", {"layer_types": ["hybrid"] * 32}, "layer_types must name one of .*'hybrid'"),
        ("Falcon-H1 0.5B", {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers must .*5"),
        ("Falcon-H1 0.5B", {"mamba_use_mlp": False}, "mamba_use_mlp must be absent or null or True"),
        (
            "Kimi Linear 48B-A3B",
            {"linear_attn_config": {**REAL["Kimi Linear 48B-A3B"].values["linear_attn_config"], "gate_lower_bound": 1}},
            "linear_attn_config must have no fields but .*'gate_lower_bound'",
        ),
        ("Kimi Linear 48B-A3B", {"linear_attn_config": {"full_attn_layers": [1], "kda_layers": [1]}},
         "full_attn_layers and kda_layers must have each of 1 to 27 once"),
        ("Kimi Linear 48B-A3B", {"mla_use_nope": False}, "mla_use_nope must be absent or null or True"),
        ("OLMo Hybrid 7B", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act must be absent or null or 'silu'"),
        ("Granite 4 Micro", {"num_local_experts": 64}, r"num_experts_per_tok must be in \[1, 64\], got 0"),
        (
            "Granite 4 Micro", {"layer_types": ["mamba", *["attention"] * 39], "mamba_n_heads": 150},
            "mamba_n_heads must divide .* 5120, got 150",
        ),
        (
            "Granite 4 Micro", {"layer_types": ["mamba", *["attention"] * 39], "mamba_d_head": 64},
            "mamba_d_head times mamba_n_heads 160 must be .* 5120, got 64",
        ),
        ("Granite 4 Micro", {"position_embedding_type": "absolute"}, "position_embedding_type must .*'absolute'"),
        ("Gemma 4 E2B", {"num_kv_shared_layers": 35}, r"num_kv_shared_layers must be in \[0, 34\], got 35"),
        ("DeepSeek V3.2", {"index_topk": 0}, "index_topk must be .*got 0"),
        ("Granite 3.3 8B", {"residual_multiplier": "a"}, "residual_multiplier must .*got 'a'"),
        ("DeepSeek V3", {"topk_group": 9}, "topk_group|num_chosen_groups"),
        ("gpt-oss 20B", {"num_experts_per_tok": 33}, "num_experts_per_tok"),
    ],
)  # fmt: skip
def test_what_contradicts_is_refused(name: str, change: dict[str, Any], rule: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rule):
        read(tmp_path, changed(name, **change))


def windows_of_docs() -> list[tuple[str, ...]]:
    """Return the rows of the table of memory with windows in the documentation."""
    text = (Path(__file__).parents[3] / "docs" / "engine" / "models.md").read_text()
    return re.findall(
        r"^\| (.+?) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", text.partition("windows given back")[2], re.MULTILINE
    )


@pytest.mark.parametrize("row", windows_of_docs(), ids=lambda row: row[0])
def test_the_documentation_has_the_memory_of_a_long_prompt(row: tuple[str, ...], tmp_path: Path) -> None:
    name, window, whole_gb, gb = row
    config, num_pages = read(tmp_path, REAL[name].values), 32_768 // 16
    windows = layer_groups([layer.mixer for layer in config.layers], max_length=32_768).windows
    frames, ids = PageAllocator(num_pages * len(windows)), PageAllocator(num_pages)
    groups = PageGroups(windows, frames=frames, ids=ids, page_size=16, num_ahead=2048)
    page_gb = 16 * REAL[name].token_bytes / 1e9
    assert windows[-1] == int(window)
    assert f"{page_gb * num_pages:.2f}" == whole_gb
    assert f"{page_gb * groups.num_needed(num_pages):.2f}" == gb
