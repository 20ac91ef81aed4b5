"""The pages of help: their length, and that every option stands in them once."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from pathlib import Path

import pytest

from pagewood.engine.api import EngineConfig
from pagewood.server.cli import main, options
from pagewood.server.cli.generate import TAKEN
from pagewood.server.cli.options.page import Page
from pagewood.server.cli.serve import IN_SHORT_HELP, add_options

SOURCES = [path.read_text() for path in Path(options.__path__[0]).glob("*.py")]
NAMES = sorted(
    name for text in SOURCES for name in re.findall(r'^ +"(--[a-z-]+)",', re.sub(r"(add|setting)\(", "\n ", text), re.M)
)
README = Path(__file__).parents[1] / "README.md"
COMMANDS = ("serve", "chat", "top", "bench", "check", "generate", "inspect", "quantize", "merge", "replay", "why")


def page(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return a page of help in a terminal of 100 columns."""
    monkeypatch.setenv("COLUMNS", "100")
    if "serve" in words:
        assert main(words) == 0
    else:
        with pytest.raises(SystemExit, match="0"):
            main(words)
    return capsys.readouterr().out


def named(text: str) -> list[str]:
    """Return the names of the options that a page lists."""
    heads = [line.strip().split("  ")[0] for line in text.splitlines() if re.match(r"  -", line)]
    return [name for head in heads for name in re.findall(r"--[a-z][a-z-]*", head)]


def test_the_short_page_of_serve(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = page(monkeypatch, capsys, "serve", "--help")
    lines = text.splitlines()
    assert len(lines) <= 100
    assert max(map(len, lines)) <= 100
    assert lines[-1].startswith("--help-all shows the other options")
    found = named(text)
    assert len(found) == len(set(found))
    assert set(found) >= IN_SHORT_HELP - {"path"}
    assert page(monkeypatch, capsys, "serve", "-h", "--port", "1") == text


def test_an_option_takes_one_line_of_the_short_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = page(monkeypatch, capsys, "serve", "--help")
    wrapped = [line for line in text.splitlines() if line.startswith(" " * 30)]
    assert len(wrapped) <= 1, wrapped  # that of an option with two long names


def test_the_whole_page_of_serve(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = named(page(monkeypatch, capsys, "serve", "--help-all"))
    assert len(NAMES) > 80
    assert sorted(found) == sorted([*NAMES, "--help", "--help-all"])
    assert IN_SHORT_HELP - {"path"} <= {*NAMES}


def test_generate_has_no_option_of_a_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = named(page(monkeypatch, capsys, "generate", "--help"))
    assert len(found) == len(set(found))
    assert {*found} >= TAKEN
    assert not {*found} & {
        "--port",
        "--quota",
        "--schedule-policy",
        "--stream-interval",
        "--chunk-align",
        "--kv-events",
    }


def test_the_readme_names_options_that_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"--help-all", "--incremental-streaming-output"}  # the latter is SGLang's
    for command in COMMANDS:
        known |= {*named(page(monkeypatch, capsys, command, "--help"))}
    text = README.read_text()
    assert {*re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text)} - known - {*NAMES} == set()


def test_a_model_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "here", "--model", "there"]) == 2
    assert capsys.readouterr().err == (
        "pagewood: error: MODEL and --model must not be given together, got 'here' and 'there'\n"
    )
    for words in (["serve", "/nowhere"], ["serve", "--model-path", "/nowhere"]):
        assert main(words) == 2
        assert "/nowhere" in capsys.readouterr().err


def test_the_fields_of_the_engine_have_the_order_of_the_help() -> None:
    parser = argparse.ArgumentParser()
    add_options(Page(parser=parser))
    offered = [name for name in vars(parser.parse_args([])) if hasattr(EngineConfig(), name)]
    assert offered == [one.name for one in fields(EngineConfig) if one.name not in ("max_queued", "prefill_first")]
