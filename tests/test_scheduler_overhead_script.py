"""The benchmark of scheduling runs, and each of its parts prints a number for everything that it names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "scheduler_overhead.py"


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        (["host"], [f"| {loop} | {page} | 8 |" for loop in ("plain", "overlapped", "several") for page in (1, 16)]),
        (["idle", "--with", "grammar"], ["| 16 | 1 | 2 |", "| 16 | 8 | 2 |"]),
        pytest.param(["shortage"], ["| 1 |", "| 8 |"], marks=pytest.mark.slow),
        pytest.param(["waiting"], ["| off | fcfs |", "| on | lpm |"], marks=pytest.mark.slow),
        pytest.param(["idle", "--with", "drafts", "--page-size", "1"], ["| 1 | 8 | 2 |"], marks=pytest.mark.slow),
    ],
)
def test_a_part_has_all_its_rows(arguments: list[str], rows: list[str]) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments, "--quick"],
        capture_output=True, text=True, env=environment, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for row in rows:
        assert done.stdout.count(row) == 1
