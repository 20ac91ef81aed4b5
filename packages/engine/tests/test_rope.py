"""Rotations against those of `transformers`, up to the end of the stretched context."""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.parts.rope import PositionNumbers
from pagewood.engine.models.rope import Rope, position_table
from pagewood.engine.models.torch_ops import TorchOps
from pagewood.engine.runner.cuda.ops import CUDAOps
from stand_ins import flashinfer_torch

SIZES = {
    "vocab_size": 10,
    "hidden_size": 128,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-own-factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.9, "truncate": False},
    "yarn-betas": {"rope_type": "yarn", "factor": 2.5, "beta_fast": 16, "beta_slow": 2, "mscale": 0.7},
    "yarn-scales": {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "llama3-step": {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
}


def both(folder: Path, rope: dict[str, Any]) -> tuple[ModelConfig, Rope, LlamaRotaryEmbedding]:
    values = {**SIZES, "rope_parameters": {"rope_theta": 10000.0, **rope}}
    (folder / "config.json").write_text(json.dumps({**values, "architectures": ["LlamaForCausalLM"]}))
    config = ModelConfig.from_folder(folder)
    reference = LlamaRotaryEmbedding(transformers.LlamaConfig(**values))
    return config, Rope(config.ropes[0], device=torch.device("cpu")), reference


@pytest.mark.parametrize("name", [name for name in ROPES if name != "dynamic"])
def test_every_position_is_rotated_as_in_transformers(tmp_path: Path, name: str) -> None:
    config, rope, reference = both(tmp_path, ROPES[name])
    factor = ROPES[name].get("factor", 1.0)
    assert config.max_position == (64 if name in ("default", "llama3", "llama3-step", "proportional") else 64 * factor)
    positions = torch.arange(256)
    expected = reference(torch.zeros(1), positions[None])
    for mine, theirs in zip(rope(positions), expected, strict=True):
        torch.testing.assert_close(torch.cat([mine, mine], -1), theirs[0], atol=2e-5, rtol=0)


def test_a_dynamic_rope_rotates_a_position_as_the_last_of_its_sequence(tmp_path: Path) -> None:
    config, rope, _ = both(tmp_path, ROPES["dynamic"])
    assert config.max_position == 256
    cosines, sines = rope(torch.arange(256))
    for last in (0, 1, 62, 63, 64, 65, 100, 255):
        _, _, reference = both(tmp_path, ROPES["dynamic"])
        expected = reference(torch.zeros(1), torch.arange(last + 1)[None])
        for mine, theirs in zip((cosines, sines), expected, strict=True):
            torch.testing.assert_close(torch.cat([mine[last]] * 2, -1), theirs[0, last], atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ROPES)
def test_the_rotation_of_a_position_depends_on_nothing_else(tmp_path: Path, name: str) -> None:
    _, rope, _ = both(tmp_path, ROPES[name])
    largest = rope(torch.arange(4096))
    for size in (1, 2, 64, 512):
        for mine, expected in zip(rope(torch.arange(size)), largest, strict=True):
            assert torch.equal(mine, expected[:size])


def test_positions_behind_the_last_embedding_are_that_one() -> None:
    numbers = position_table(PositionNumbers(length=32), device=torch.device("cpu"))
    bits, _ = numbers(torch.tensor([0, 1, 31, 32, 1000]))
    assert TorchOps().positions((bits, bits)).tolist() == [0, 1, 31, 31, 31]
    table = torch.cat(numbers(torch.arange(40)), -1)
    found = CUDAOps(flashinfer_torch).positions((torch.tensor([3, 39], dtype=torch.int32), table))
    assert (found.tolist(), found.dtype) == ([3, 31], torch.int32)
