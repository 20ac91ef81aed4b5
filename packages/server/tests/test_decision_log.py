"""`pagewood replay` and `pagewood why` on a log of the command line's own engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagewood.engine.decision_log.frames import Record
from pagewood.engine.decision_log.log_file import Log
from pagewood.server.cli import main


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "decisions"
    assert main(["generate", "Hello", "--max-tokens", "4", "--decision-log", str(path)]) == 0
    return path


def test_replay(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(log)]) == 0
    assert capsys.readouterr().out.endswith("records: all decisions are the same\n")


def test_why(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = [command for frame in Log.at(log).frames() if isinstance(frame, Record) for command in frame.commands]
    ((_, values),) = commands
    assert main(["why", str(log), values["request_id"]]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"request {values['request_id']}, arrived at ")
    assert lines[0].startswith("    +0.000 s  arrived with a prompt of ")
    assert "ended" in lines[-1]
    assert main(["why", str(log), values["request_id"], "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["kind"] for line in found] == ["arrived", "admitted", "cache", "prompt", "first_token", "ended"]
    assert found[-1]["numbers"]["output_tokens"] == 4


def test_what_is_wrong_is_said(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", str(log), "nobody"]) == 2
    assert main(["replay", str(log.with_name("none"))]) == 2
    assert main(["replay", __file__]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors[0] == "pagewood: error: request must be one that arrived in the log, got 'nobody'"
    assert "No such file" in errors[1]
    assert errors[2].startswith("pagewood: error: log must be a decision log of pagewood, got ")
