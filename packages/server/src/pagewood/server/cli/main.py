"""`pagewood`: serve a model, chat with a server, generate without one, and look at or quantise weights."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pagewood.server import __version__
from pagewood.server.cli import chat, generate, inspect, quantize, serve


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code of the process."""
    parser = argparse.ArgumentParser(
        prog="pagewood",
        description="Serve a model, chat with a server, generate without one, and look at or quantise weights.",
    )
    parser.add_argument("--version", action="version", version=f"pagewood {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (serve, chat, generate, inspect, quantize):
        command.add_parser(commands)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except (ValueError, FileNotFoundError) as error:
        print(f"pagewood: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
