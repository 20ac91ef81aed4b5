"""The benchmark of mixed loads runs, and compares each preset in the engine and in the simulator."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagewood.schedpolicy import MIXINGS

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "mixed_load.py"


def run_script(*arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--rounds", "1", "--seconds", "0.1", *arguments],
        capture_output=True, text=True, env=environment, timeout=280, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_every_table_has_a_row_for_each_preset() -> None:
    done = run_script()
    assert done.returncode == 0, done.stderr
    for preset in MIXINGS:
        rows = [line for line in done.stdout.splitlines() if line.startswith(f"| {preset} |")]
        assert [line.count("|") for line in rows] == [11, 11, 11, 8, 4]


def test_a_wrong_load_is_refused_with_its_value() -> None:
    done = run_script("--load", "1.5")
    assert done.returncode == 2
    assert "--load must be in (0, 1), got 1.5" in done.stderr
