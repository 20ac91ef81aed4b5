"""Logging of a process: levels, the shape of a line, and that configuring twice does not print twice."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Generator
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest

from pagewood.server.http.current import current_exchange
from pagewood.server.observe import logs


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


def test_json_has_one_object_per_record_with_the_ids_of_requests(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", "engine", form="json")
    log = logging.getLogger("pagewood.server.x")
    log.info('said "%s"\nand more: ü', "so")
    log.warning("request %s failed", "req-1", extra=logs.request_fields("req-1"))
    exchange: Any = SimpleNamespace(request_id="of the client")
    token = current_exchange.set(exchange)
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        log.exception("broken")
    finally:
        current_exchange.reset(token)
    logs.announce("importing torch")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    first, second, third, last = lines
    assert (first["level"], first["process"], first["logger"]) == ("info", "engine", "pagewood.server.x")
    assert first["message"] == 'said "so"\nand more: ü'
    assert datetime.fromisoformat(first["time"]).tzinfo is not None
    assert "request_id" not in first
    assert second["request_id"] == "req-1"
    assert third["request_id"] == "of the client"
    assert "ZeroDivisionError" in third["exception"]
    assert last["message"] == "importing torch"


def test_without_json_an_announcement_is_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    logs.announce("before")
    logs.configure("error", "http")
    logs.announce("importing torch")
    assert capsys.readouterr().err == "pagewood: before\npagewood: importing torch\n"


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="form must be one of text, json, got 'xml'"):
        logs.configure("info", "http", form="xml")  # type: ignore[arg-type]
