"""The benchmark of models that are loaded on demand runs, and has a number for every case."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "models_on_demand.py"


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_it_measures_loads_and_what_is_loaded() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick"],
        capture_output=True, text=True, env=environment, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.endswith(") |")]
    assert [row[:2] for row in rows] == [
        ["in place of the other model", "2"],
        ["loaded", "2"],
        ["into a free place", "1"],
    ]
