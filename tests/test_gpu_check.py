"""The script that checks a GPU, run with its stand-ins, so that a typing error is found before it runs on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "tools" / "gpu_check.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)


@pytest.mark.slow
def test_its_checks_hold_on_the_stand_ins() -> None:
    names = ["operations", "attention", "repeats", "invariance", "echo", "fused"]
    done = run("--stand-in", "--here", "--only", *names)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [(result["name"], result["word"]) for result in results] == [(name, "ok") for name in names], done.stdout
    assert done.returncode == 0


@pytest.mark.slow
def test_the_longer_ones_hold_too() -> None:
    names = ["logits", "families", "images", "tiers", "answers", "waiting", "seeds", "ranks", "fp8"]
    assert run("--stand-in", "--here", "--only", *names).returncode == 0
