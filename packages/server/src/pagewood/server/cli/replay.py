"""`pagewood replay`: take the decisions of a log again, and compare them."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from pagewood.server.cli.options.page import Commands


def add_parser(commands: Commands) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "replay",
        help="take the decisions of a decision log again, and compare them",
        description="Run planner and policies on a file of `--decision-log` again, without a model, and compare their "
        "plans byte for byte. The exit code is 1 if there is a difference.",
    )
    parser.add_argument("log", metavar="LOG", type=Path, help="file of --decision-log")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the result."""
    from pagewood.engine.assemble import assemble
    from pagewood.engine.decision_log.replay import replay

    logging.disable(logging.ERROR)  # failures recorded in the log happen again
    try:
        found = replay(options.log, assemble=assemble)
    finally:
        logging.disable(logging.NOTSET)
    if found.difference is None:
        print(f"{found.num_plans} plans in {found.num_records} records: all decisions are the same")
        return 0
    print(f"after {found.num_plans} plans in {found.num_records} records: {found.difference}")
    return 1
