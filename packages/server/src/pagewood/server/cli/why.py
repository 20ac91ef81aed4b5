"""`pagewood why`: explains the decisions about a request."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

from pagewood.server.cli.options.page import Commands


def add_parser(commands: Commands) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "why",
        help="say why a request waited, was cut, preempted or refused, or missed the cache",
        description="Say what was decided about a request, and why, one line for each thing that happened to it. The "
        "times are seconds since it arrived.",
    )
    parser.add_argument("log", metavar="LOG", type=Path, help="file of --decision-log")
    parser.add_argument(
        "request",
        metavar="REQUEST",
        help="id of the request: that of the answer, of the header x-request-id, or of the engine",
    )
    parser.add_argument("--json", action="store_true", help="write one JSON object for each line")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the lines."""
    from pagewood.engine.decision_log.why import why

    lines = why(options.log, options.request)
    if options.json:
        for line in lines:
            print(json.dumps(asdict(line)))
        return 0
    several = len({line.request_id for line in lines}) > 1
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(lines[0].unix_s))
    print(f"request {options.request}, arrived at {at}")
    for line in lines:
        print(f"{line.after_s:+10.3f} s  {f'{line.request_id}: ' if several else ''}{line.text}")
    return 0
