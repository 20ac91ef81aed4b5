"""Logging of the server's processes: one line per record on standard error, for a person or as JSON."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal

from pagewood.server.http.current import current_exchange

LogFormat = Literal["text", "json"]
LEVELS = ("debug", "info", "warning", "error")
FORMATS: tuple[LogFormat, ...] = ("text", "json")
HANDLER_NAME = "pagewood"


def configure(level: str, process_name: str, *, form: LogFormat = "text") -> None:
    """Show the log of this process on standard error; a later call replaces the settings of an earlier one.

    Loggers below `pagewood` show records from `level` on, those of other libraries from `warning` on.

    Args:
        level: one of `LEVELS`.
        process_name: name of this process in every line, such as `http` or `engine`.
        form: one of `FORMATS`.

    Raises:
        ValueError: the level or the format is unknown.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}, got {level!r}")
    if form not in FORMATS:
        raise ValueError(f"form must be one of {', '.join(FORMATS)}, got {form!r}")
    handler = logging.StreamHandler(sys.stderr)
    handler.set_name(HANDLER_NAME)
    formatter = JsonLines(process_name) if form == "json" else _text_lines(process_name)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    for old in [old for old in root.handlers if old.name == HANDLER_NAME]:
        root.removeHandler(old)
    root.addHandler(handler)
    logging.getLogger("pagewood").setLevel(level.upper())


def announce(text: str) -> None:
    """Write a message that the operator must see at any level: a plain line, or a record if the log is JSON."""
    handlers = [handler for handler in logging.getLogger().handlers if handler.name == HANDLER_NAME]
    if handlers and isinstance(handlers[0].formatter, JsonLines):
        handlers[0].handle(logging.LogRecord("pagewood", logging.WARNING, "", 0, text, (), None))
    else:
        print(f"pagewood: {text}", file=sys.stderr, flush=True)


def request_fields(request_id: str) -> dict[str, object]:
    """Return the `extra` of a record that concerns a request of the engine."""
    return {"fields": {"request_id": request_id}}


class JsonLines(logging.Formatter):
    """Writes records as JSON objects in one line each.

    Every object has `time`, `level`, `process`, `logger` and `message`; `request_id` if the record belongs to an HTTP
    request; `exception` with the traceback; and the `fields` that the record was given as `extra`.
    """

    def __init__(self, process_name: str) -> None:
        """Write `process_name` into every line."""
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process_name,
            "logger": record.name,
            "message": record.getMessage(),
        }
        exchange = current_exchange.get()
        if exchange is not None:
            line["request_id"] = exchange.request_id
        fields = getattr(record, "fields", None)
        if isinstance(fields, Mapping):
            line.update(fields)  # pyright: ignore[reportUnknownArgumentType]
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def _text_lines(process_name: str) -> logging.Formatter:
    formatter = logging.Formatter(
        f"%(asctime)s.%(msecs)03dZ %(levelname)-7s {process_name} %(name)s: %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime  # not ours
    return formatter
