"""Logging of the server's processes: one line per record on standard error, readable by a person."""

from __future__ import annotations

import logging
import sys
import time

LEVELS = ("debug", "info", "warning", "error")
HANDLER_NAME = "pagewood"


def configure(level: str, process_name: str) -> None:
    """Show the log of this process on standard error; a later call replaces the settings of an earlier one.

    Loggers below `pagewood` show records from `level` on, those of other libraries from `warning` on.

    Args:
        level: one of `LEVELS`.
        process_name: name of this process in every line, such as `http` or `engine`.

    Raises:
        ValueError: the level is unknown.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}, got {level!r}")
    handler = logging.StreamHandler(sys.stderr)
    handler.set_name(HANDLER_NAME)
    formatter = logging.Formatter(
        f"%(asctime)s.%(msecs)03dZ %(levelname)-7s {process_name} %(name)s: %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime  # not ours
    handler.setFormatter(formatter)
    root = logging.getLogger()
    for old in [old for old in root.handlers if old.name == HANDLER_NAME]:
        root.removeHandler(old)
    root.addHandler(handler)
    logging.getLogger("pagewood").setLevel(level.upper())
