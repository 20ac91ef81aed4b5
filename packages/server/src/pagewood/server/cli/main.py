"""`pagewood`: serve a model, watch it, chat with it or measure it, generate without one, explain its decisions."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from pagewood.server import __version__
from pagewood.server.cli import (
    batch,
    bench,
    chat,
    check,
    doctor,
    generate,
    inspect,
    merge,
    profile,
    quantize,
    replay,
    serve,
    top,
    why,
)

COMMANDS: tuple[ModuleType, ...] = (
    serve, chat, top, profile, bench, generate, batch, doctor, inspect, check, quantize, merge, replay, why,
)  # fmt: skip


_BROKEN_PIPE = 141
"""What shells report for a program that SIGPIPE has ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code of the process."""
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output, such as `head`, has enough
        with suppress(OSError), Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # what is left is flushed at exit
        return _BROKEN_PIPE


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="pagewood",
        description="Serve a model, watch, measure or chat with a server, generate without one, look at a machine or a "
        "model, quantise weights, and explain what a server decided.",
    )
    parser.add_argument("--version", action="version", version=f"pagewood {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    options = parser.parse_args(arguments)
    output: object = sys.stdout
    if isinstance(output, io.TextIOWrapper) and output.errors == "strict":
        output.reconfigure(errors="backslashreplace")  # an answer or a name need not fit the terminal's encoding
    try:
        return options.run(options)
    except (ValueError, FileNotFoundError) as error:
        print(f"pagewood: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
