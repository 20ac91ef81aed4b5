"""The end-to-end benchmark runs, compares every system, and records what it found."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "cpu_end_to_end.py"
SYSTEMS = {
    "pagewood",
    "transformers, static batch",
    "transformers, continuous batching",
}


def run_script(*arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--repeat", "1", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
        check=False,
    )


@pytest.fixture(scope="module")
def record_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("record")
    done = run_script("--record", str(folder))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def record(record_folder: Path) -> Any:
    (path,) = record_folder.glob("*.json")
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_every_system_runs_every_case_and_gives_the_same_tokens(record: Any) -> None:
    assert {sample["system"] for sample in record["samples"]} == SYSTEMS
    assert len(record["samples"]) == len(SYSTEMS) * len(record["cases"]) > len(SYSTEMS)
    for sample in record["samples"]:
        assert sample["error"] is None
        assert len(sample["tokens_per_s"]) == 1
        assert sample["num_answers"] > 0
        assert sample["num_differing"] == 0 or sample["largest_gap"] < 1e-4, f"{sample} is no rounding"


@pytest.mark.slow
def test_the_roofline_adds_up(record: Any) -> None:
    # computed by hand: bytes of a decode step of the first case's one request, weights and KV so far
    model, case = record["model"], record["cases"][0]
    hidden, inner = model["hidden_size"], model["intermediate_size"]
    kv_size = hidden // model["num_heads"] * model["num_kv_heads"]
    layer = hidden * (2 * hidden + 2 * kv_size + 3 * inner)
    weights = model["num_layers"] * layer + model["vocab_size"] * hidden
    positions = sum(case["num_own"] + step for step in range(1, case["num_output"]))
    num_bytes = 4 * (weights * (case["num_output"] - 1) + 2 * model["num_layers"] * kv_size * positions)
    rates = sorted(record["machine_samples"]["stream_bytes_per_s"])
    median = (rates[(len(rates) - 1) // 2] + rates[len(rates) // 2]) / 2
    roof = record["roofs"][case["name"]]
    assert roof["decode_bytes_s"] == pytest.approx(num_bytes / median)
    assert roof["decode_s"] >= roof["decode_bytes_s"]


@pytest.mark.slow
def test_the_text_names_every_system_and_what_was_not_measured_here(record_folder: Path, record: Any) -> None:
    (path,) = record_folder.glob("*.md")
    text = path.read_text(encoding="utf-8")
    assert all(f"| {system} |" in text for system in SYSTEMS)
    assert record["machine"]["processor"] in text
    assert "**not measured in this run**" in text


def test_an_unknown_case_is_refused_with_the_known_ones() -> None:
    done = run_script("--only", "concurrency 5")
    assert done.returncode != 0
    assert "concurrency 4" in done.stderr
