"""The benchmark of prompts that another engine computes runs, and has a row for each set-up."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "prefill_apart.py"


def run_script(*arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True, text=True, env=environment, timeout=200, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_the_table_has_a_row_for_each_set_up() -> None:
    done = run_script("--smoke")
    assert done.returncode == 0, done.stderr
    for set_up in ("apart", "mixed"):
        (row,) = [line for line in done.stdout.splitlines() if line.startswith(f"| {set_up} |")]
        assert row.count("|") == 11
        assert "nan" not in row
    assert not list(Path("/dev/shm").glob(f"pagewood-{os.geteuid()}-prefill-apart-*"))


def test_a_wrong_rate_is_refused_with_its_value() -> None:
    done = run_script("--rate", "0")
    assert done.returncode == 2
    assert "--rate must be > 0, got 0.0" in done.stderr
