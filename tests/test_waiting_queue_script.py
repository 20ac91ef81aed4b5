"""The benchmark of the waiting queue runs, and both of its tables have a number for every order."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "waiting_queue.py"


def test_it_measures_every_order_alone_and_in_the_engine() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for order in ("fcfs", "lpm", "dfs-weight", "fair"):
        assert done.stdout.count(f"| {order} | 128 |") == 2
