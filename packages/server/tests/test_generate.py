"""Options of `pagewood generate` that choose tokens reach the engine."""

from __future__ import annotations

import pytest

from pagewood.server.cli import main


def answer(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["generate", "Hello", "--raw", "--max-tokens", "12", *options]) == 0
    return capsys.readouterr().out


def test_a_narrow_filter_leaves_the_greedy_answer(capsys: pytest.CaptureFixture[str]) -> None:
    hot = ("--temperature", "5", "--seed", "1")
    greedy = answer(capsys, "--temperature", "0")
    assert answer(capsys, *hot) != greedy
    assert answer(capsys, *hot, "--top-n-sigma", "0.0001") == greedy
