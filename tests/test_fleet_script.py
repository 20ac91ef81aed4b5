"""The benchmark of the fleet runs, and has a number for every size and every way of sending."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "fleet.py"


def test_it_measures_every_size_and_compares_every_way() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "all", "--smoke"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name in ("3", "100", "1000", "router", "round-robin", "random", "20 | 200"):
        assert done.stdout.count(f"\n| {name} |") == 1
    # Prompts apart on two replicas, and on eight with up to four of them for prompts; the gaps become shorter.
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith(("| 2 |", "| 8 |"))]
    assert [(row[0], row[1]) for row in rows] == [("2", "0"), ("2", "1"), *(("8", str(number)) for number in range(5))]
    assert float(rows[1][3]) < float(rows[0][3])
