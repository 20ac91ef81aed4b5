"""The benchmark of weights runs, and prints a row for every form."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "weights.py"

pytestmark = pytest.mark.slow


def run_script(*arguments: str) -> list[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", *arguments],
        capture_output=True, text=True, env=environment, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("|")]


def test_forms_of_a_model() -> None:
    rows = run_script("--shape", "tiny", "--product", "512", "512", "--form", "float32", "--form", "int4")
    assert [row.split("|")[1].strip() for row in rows if "%" in row] == ["float32", "int4"] * 2
    assert all(row.count("%") == 3 for row in rows[2:4])
    assert all(row.count("%") == 4 for row in rows[6:8])  # prefill too


def test_four_bits_are_served_twice() -> None:
    rows = run_script("--seven-b")
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["first", "second, mapped"]
    assert all(row.count(" s |") == 5 and row.count(" GB |") == 2 for row in rows[2:])
