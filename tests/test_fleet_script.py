"""The benchmark of the fleet runs, and has a number for every size and every way of sending."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "fleet.py"


def test_it_measures_every_size_and_compares_every_way() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--smoke"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name in ("3", "100", "1000", "router", "round-robin", "random"):
        assert done.stdout.count(f"| {name} |") == 1
