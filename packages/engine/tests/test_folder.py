"""Model folders: where they are, and the sampling that they recommend."""

import json
from pathlib import Path
from typing import Any

import pytest

from pagewood.engine.api import SamplingParams
from pagewood.engine.model_folder.folder import default_sampling, model_folder, model_name


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


def test_recommendations_that_are_not_followed_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"top_k": 5, "num_beams": 1, "suppress_tokens": None, "bad_words_ids": []}))
    assert default_sampling(tmp_path) == SamplingParams(top_k=5)
    assert caplog.messages == []
    file.write_text(json.dumps({"num_beams": 4, "bad_words_ids": [[1]], "transformers_version": "5"}))
    assert default_sampling(tmp_path) == SamplingParams()
    assert caplog.messages == [f"{file}: not followed: bad_words_ids, num_beams"]


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


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("hub/models--org--Some-Model/snapshots/0123abc", "org/Some-Model"),
        ("hub/models--plain/snapshots/0123abc", "plain"),
        ("models/Some-Model", "Some-Model"),
        ("snapshots/0123abc", "0123abc"),
    ],
)
def test_the_name_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, name: str) -> None:
    (tmp_path / path).mkdir(parents=True)
    assert model_name(tmp_path / path) == name
    (tmp_path / "link").symlink_to(tmp_path / path)
    assert model_name(tmp_path / "link") == name
    monkeypatch.chdir(tmp_path / path)
    assert model_name(".") == name


def test_the_name_of_a_file_in_a_snapshot(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--files" / "snapshots" / "0123abc"
    blob = tmp_path / "models--org--files" / "blobs" / "99ff"
    snapshot.mkdir(parents=True)
    blob.parent.mkdir()
    blob.write_bytes(b"GGUF")
    (snapshot / "some-model-q4.gguf").symlink_to(blob)
    assert model_name(snapshot / "some-model-q4.gguf") == "some-model-q4"
