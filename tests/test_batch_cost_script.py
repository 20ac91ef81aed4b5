"""The benchmark of what batches cost runs, and its batches have answers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "batch_cost.py"


@pytest.mark.slow
def test_every_percentile_has_a_row() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    settings = ["--rate", "4", "--seconds", "2", "--rounds", "2", "--lines", "500", "--", "--threads", "1"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *settings],
        capture_output=True, text=True, env=environment, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len([line for line in done.stdout.splitlines() if re.match(r"\| (first|whole) \| \d+ \|", line)]) == 6
    assert re.search(r"[1-9]\d* lines answered", done.stdout)
