"""The soak's verdict on memory, and a small run of it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "tools" / "soak_server.py"


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak_server", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def samples(rss_mb: list[float]) -> list[dict[str, Any]]:
    return [{"requests": 100 * number, "rss_mb": {"http": mb}} for number, mb in enumerate(rss_mb)]


def test_growth_is_that_after_the_warm_up(soak: ModuleType) -> None:
    noise = [0.5, -0.5, 0.2, -0.2] * 20
    flat = [min(50.0 + 10 * number, 200.0) + noise[number] for number in range(80)]
    assert abs(soak.grown_mb(samples(flat), "http", warm_up=0.3)) < 1
    leaking = [value + 0.25 * number for number, value in enumerate(flat)]
    assert soak.grown_mb(samples(leaking), "http", warm_up=0.3) == pytest.approx(0.25 * 55, rel=0.1)
    with pytest.raises(ValueError, match="at least 3"):
        soak.grown_mb(samples(flat[:3]), "http", warm_up=0.9)


@pytest.mark.slow
def test_a_small_run(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    arguments = ["--requests", "300", "--tolerance", "100", "--json", str(record)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(record.read_text())
    assert sum(found["kinds"].values()) == 300
    assert set(found["grown_mb"]) == {"http", "engine_process", "detokenizer_process", "tokenizer_process"}
