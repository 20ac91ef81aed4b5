"""Logging of a process: levels, the shape of a line, and that configuring twice does not print twice."""

from __future__ import annotations

import logging
import re
from collections.abc import Generator

import pytest

from pagewood.server import logs


@pytest.fixture(autouse=True)
def restored() -> Generator[None]:
    """Undo what a test configures."""
    root, ours = logging.getLogger(), logging.getLogger("pagewood")
    level = ours.level
    yield
    ours.setLevel(level)
    for handler in [handler for handler in root.handlers if handler.name == logs.HANDLER_NAME]:
        root.removeHandler(handler)


def test_one_line_per_record_with_time_level_process_and_logger(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("debug", "engine")
    logs.configure("info", "engine")
    logging.getLogger("pagewood.server.x").info("ready after %d s", 3)
    logging.getLogger("pagewood.server.x").debug("hidden")
    logging.getLogger("another.library").info("hidden")
    logging.getLogger("another.library").warning("shown")
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO    engine pagewood\.server\.x: .*", first)
    assert first.endswith(": ready after 3 s")
    assert second.endswith("WARNING engine another.library: shown")


def test_the_level_decides_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("warning", "http")
    logging.getLogger("pagewood.engine").info("hidden")
    logging.getLogger("pagewood.engine").warning("shown")
    assert capsys.readouterr().err.count("\n") == 1


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="level must be one of debug, info, warning, error, got 'loud'"):
        logs.configure("loud", "http")
