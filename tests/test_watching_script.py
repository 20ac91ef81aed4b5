"""The benchmark of watchers runs each of them alone, and prints what it takes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "watching_alone.py"


@pytest.mark.slow
def test_every_watcher_has_a_row() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick"],
        capture_output=True, text=True, env=environment, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.endswith("% |")]
    assert [row.split(" | ")[0] for row in rows] == [
        "| metrics of requests",
        "| metrics of the engine's steps",
        "| metrics, both",
        "| a scrape every second",
        "| a scrape every second, with the names of vLLM and SGLang",
        "| traces, with their export, beside metrics",
        "| log",
        "| log as JSON",
    ]
