"""Options of `pagewood generate` that choose tokens reach the engine."""

from __future__ import annotations

import pytest

from pagewood.engine.model_folder.folder import model_folder
from pagewood.server.cli import main


def answer(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["generate", "Hello", "--raw", "--max-tokens", "12", *options]) == 0
    return capsys.readouterr().out


def test_a_narrow_filter_leaves_the_greedy_answer(capsys: pytest.CaptureFixture[str]) -> None:
    hot = ("--temperature", "5", "--seed", "1")
    greedy = answer(capsys, "--temperature", "0")
    assert answer(capsys, *hot) != greedy
    assert answer(capsys, *hot, "--top-n-sigma", "0.0001") == greedy


def test_the_model_is_given_once(capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(model_folder(None))
    assert answer(capsys, "--temperature", "0", "--model", folder) == answer(capsys, "--temperature", "0")
    assert main(["generate", "Hello", "--model", folder, "--model", "other"]) == 2
    assert f"--model must be given once, got {folder}, other" in capsys.readouterr().err
