"""`pagewood doctor`: what this machine has, what will be used, and how fast a model can be on it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from pagewood.server.cli.options.page import Commands

if TYPE_CHECKING:
    from pagewood.engine.assembly.machine_report import Roofline

OBSTACLE = 1
"""The exit code if an engine cannot run here."""


def add_parser(commands: Commands) -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "doctor",
        help="show what this machine has and lacks, and how fast a model can be on it",
        description="Show what this machine has, which of it will be used, what would make it faster, and how many "
        "tokens per second a model can reach on its CPU. Takes a few seconds. Exits with 1 if no engine can run.",
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="folder, GGUF file or name on the hub (default: the embedded model)"
    )
    parser.add_argument("--json", action="store_true", help="write everything as one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the report; return 1 if an engine cannot run."""
    from pagewood.engine.assembly.available_memory import available_memory_bytes
    from pagewood.engine.assembly.machine_report import describe, examine, memory_rate, rooflines  # imports torch
    from pagewood.engine.model_folder.inspection import inspect_model
    from pagewood.engine.runner.ranks.cores import num_cores

    findings, threads = examine(), num_cores()
    if not options.json:
        print(describe(findings), flush=True)
    rate, model = memory_rate(threads), inspect_model(options.model)
    lines = rooflines(model, rate, memory_bytes=available_memory_bytes())
    if options.json:
        found = {
            "findings": [asdict(one) for one in findings],
            "memory_bytes_per_s": rate,
            "model": model.name,
            "rooflines": [asdict(one) for one in lines],
        }
        print(json.dumps(found, indent=2))
    else:
        print(
            f"\n{threads} threads read {rate / 1e9:.0f} GB/s, so one request gets at most (more if the weights fit the "
            "processor's caches):\n"
        )
        print(_described(model.name, lines))
    return OBSTACLE if any(one.is_obstacle for one in findings) else 0


def _described(name: str, lines: Sequence[Roofline]) -> str:
    """Return a table for a reader."""
    rows = [f"{name} with --weights"]
    for one in lines:
        much = "" if one.fits else "  more than there is memory for, with one text of full length"
        size = f"{one.weights_bytes / 1e6:,.0f} MB" if one.weights_bytes < 1e9 else f"{one.weights_bytes / 1e9:,.1f} GB"
        rows.append(f"  {one.form:<9} {one.tokens_per_s:>9,.0f} tokens/s  {size:>9}{much}")
    return "\n".join(rows)
