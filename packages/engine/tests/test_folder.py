"""Model folders: where they are, and the sampling that they recommend."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagewood.engine.api import SamplingParams
from pagewood.engine.folder import default_sampling, model_folder


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"do_sample": False, "temperature": 0.7, "top_k": None}, SamplingParams(temperature=0.0)),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20},
            SamplingParams(temperature=0.6, top_p=0.95, top_k=20),
        ),
        ({"temperature": 0.0, "min_p": 0.1}, SamplingParams(temperature=0.0, min_p=0.1)),
        ({"typical_p": 0.4}, SamplingParams(typical_p=0.4)),
        ({}, SamplingParams()),
    ],
)
def test_recommended_sampling(tmp_path: Path, config: dict[str, Any], expected: SamplingParams) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert default_sampling(tmp_path) == expected


def test_defaults_without_a_recommendation(tmp_path: Path) -> None:
    assert default_sampling(tmp_path) == SamplingParams()


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        '{"temperature": "hot"}',
        '{"temperature": NaN}',
        '{"temperature": 1e400}',
        '{"do_sample": 1}',
        '{"top_p": 2}',
        '{"top_p": 0}',
        '{"top_k": 1e400}',
        '{"top_k": 2147483648}',
        '{"top_k": true}',
        "[" + "[" * 100000,
    ],
)
def test_a_broken_generation_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match="must hold a generation configuration"):
        default_sampling(tmp_path)


def test_folder(tmp_path: Path) -> None:
    assert model_folder(str(tmp_path)) == tmp_path
    with pytest.raises(FileNotFoundError, match=r"model must be a folder .*missing"):
        model_folder(str(tmp_path / "missing"))
