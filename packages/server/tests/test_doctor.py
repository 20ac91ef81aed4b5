"""`pagewood doctor`."""

from __future__ import annotations

import json

import pytest

from pagewood.server.cli import main


def test_a_machine_and_the_embedded_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for part in ("processor  ", "physical cores", "pagewood-demo with --weights", "  int4 ", " tokens/s "):
        assert part in text
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["form"] for one in found["rooflines"]] == ["float32", "bfloat16", "int8", "int4"]
    assert {"software", "memory", "cache"} <= {one["subject"] for one in found["findings"]}


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "/nowhere"]) == 2
    shown = capsys.readouterr()
    assert "physical cores" in shown.out
    assert "model must be a folder" in shown.err
