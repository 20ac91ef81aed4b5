"""The benchmarks run, have a row for everything that they measure, and refuse wrong options by name and value."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagewood.schedpolicy import MIXINGS

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
MIXED = ("mixed_load.py", "--quick", "--rounds", "1", "--seconds", "0.1")
SYSTEMS = {"pagewood", "transformers, static batch", "transformers, continuous batching"}
QUIET = "PAGEWOOD_QUIET_MACHINE"
"""Environment variable that is set where nothing else runs, so that times mean something."""


def run_script(name: str, *arguments: str, timeout_s: int = 1500) -> str:
    """Return what a benchmark prints."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *arguments],
        capture_output=True, text=True, env=environment, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows_of(text: str, *, end: str = "|") -> list[list[str]]:
    """Return the cells of the lines of tables that end so."""
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|") and line.endswith(end)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cpu_end_to_end.py", "--quick", "--only", "concurrency 5"), "concurrency 4"),
        ((*MIXED, "--load", "1.5"), "--load must be in (0, 1), got 1.5"),
        (("prefill_apart.py", "--rate", "0"), "--rate must be > 0, got 0.0"),
    ],
)
def test_a_wrong_option_is_refused(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = str(BENCHMARKS / arguments[0])
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    monkeypatch.setattr(sys, "argv", [script, *arguments[1:]])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(script, run_name="__main__")
    assert message in capsys.readouterr().err + str(end.value.code)


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        (["waiting_queue.py"], {f"| {order} | 128 |": 2 for order in ("fcfs", "lpm", "dfs-weight", "fair")}),
        (
            ["scheduler_overhead.py", "host"],
            {f"| {loop} | {page} | 8 |": 1 for loop in ("plain", "overlapped", "several") for page in (1, 16)},
        ),
        pytest.param(
            ["scheduler_overhead.py", "idle", "--with", "grammar"], {"| 16 | 1 | 2 |": 1, "| 16 | 8 | 2 |": 1},
            marks=pytest.mark.slow,
        ),
        pytest.param(["scheduler_overhead.py", "shortage"], {"| 1 |": 1, "| 8 |": 1}, marks=pytest.mark.slow),
        pytest.param(
            ["scheduler_overhead.py", "waiting"], {"| off | fcfs |": 1, "| on | lpm |": 1}, marks=pytest.mark.slow
        ),
        pytest.param(
            ["scheduler_overhead.py", "idle", "--with", "drafts", "--page-size", "1"], {"| 1 | 8 | 2 |": 1},
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_part_has_all_its_rows(arguments: list[str], rows: dict[str, int]) -> None:
    shown = run_script(*arguments, "--quick")
    assert {row: shown.count(row) for row in rows} == rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("weights_peers.py", "--quick", "--threads", "1"), "| pagewood int4 | "),
        (("models.py", "--quick", "--threads", "1", "--only", "experts"), "- pagewood: "),
        (("ranks.py", "--quick"), "rank 1: Rss: "),
        (("weight_updates.py", "--quick"), "lost: none"),
        (("weights_quality.py", "--count", "1", "--tokens", "200"), "| int4 by GPTQ (training) | "),
    ],
)
def test_a_benchmark_of_models_runs_without_other_engines(arguments: tuple[str, ...], shown: str) -> None:
    assert shown in run_script(*arguments)


def test_a_fleet_has_every_size_and_every_way_of_sending() -> None:
    shown = run_script("fleet.py", "all", "--smoke")
    for name in ("3", "100", "1000", "router", "round-robin", "random", "20 | 200"):
        assert shown.count(f"\n| {name} |") == 1
    # Prompts apart on two replicas, and on eight with up to four of them for prompts; the gaps become shorter.
    rows = [row for row in rows_of(shown) if row[0] in ("2", "8")]
    assert [(row[0], row[1]) for row in rows] == [("2", "0"), ("2", "1"), *(("8", str(number)) for number in range(5))]
    assert float(rows[1][3]) < float(rows[0][3])


@pytest.mark.slow
def test_real_replicas_and_simulated_ones_are_compared() -> None:
    rows = rows_of(run_script("fleet_real.py", "--smoke"), end="% |")
    assert len(rows) == 7
    assert all(float(real) > 0 and float(simulated) > 0 for _, real, simulated, _ in rows)


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize(
    "arguments",
    [
        ["--modelled"],  # engines that wait for each step as long as a model says, on any machine
        pytest.param([], marks=pytest.mark.skipif(QUIET not in os.environ, reason=f"{QUIET} is not set")),
    ],
)
def test_three_real_replicas_are_as_the_simulator_says(arguments: list[str]) -> None:
    """Throughput and percentiles within 15%, of engines that compute only where nothing else runs."""
    assert len(rows_of(run_script("fleet_real.py", *arguments, "--limit", "0.15"), end="% |")) == 7


@pytest.mark.slow
def test_what_batches_cost_has_a_row_for_every_percentile() -> None:
    settings = ["--rate", "4", "--seconds", "2", "--rounds", "2", "--lines", "500", "--", "--threads", "1"]
    shown = run_script("batch_cost.py", *settings)
    assert len([line for line in shown.splitlines() if re.match(r"\| (first|whole) \| \d+ \|", line)]) == 6
    assert re.search(r"[1-9]\d* lines answered", shown)


@pytest.mark.slow
def test_mixed_loads_have_a_row_for_each_preset_in_every_table() -> None:
    shown = run_script(*MIXED)
    for preset in MIXINGS:
        rows = [line for line in shown.splitlines() if line.startswith(f"| {preset} |")]
        assert [line.count("|") for line in rows] == [11, 11, 11, 8, 4]


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_models_on_demand_have_a_row_for_every_case() -> None:
    rows = rows_of(run_script("models_on_demand.py", "--quick"), end=") |")
    cases = [["in place of the other model", "2"], ["loaded", "2"], ["into a free place", "1"]]
    assert [row[:2] for row in rows] == cases


@pytest.mark.slow
def test_prompts_apart_have_a_row_for_each_set_up() -> None:
    shown = run_script("prefill_apart.py", "--smoke")
    for set_up in ("apart", "mixed"):
        (row,) = [line for line in shown.splitlines() if line.startswith(f"| {set_up} |")]
        assert row.count("|") == 11
        assert "nan" not in row
    assert not list(Path("/dev/shm").glob(f"pagewood-{os.geteuid()}-prefill-apart-*"))


@pytest.mark.slow
def test_every_watcher_has_a_row() -> None:
    rows = rows_of(run_script("watching_alone.py", "--quick"), end="% |")
    assert [row[0] for row in rows] == [
        "metrics of requests", "metrics of the engine's steps", "metrics, both", "a scrape every second",
        "a scrape every second, with the names of vLLM and SGLang", "traces, with their export, beside metrics",
        "log", "log as JSON",
    ]  # fmt: skip


@pytest.mark.slow
def test_forms_of_weights_of_a_model() -> None:
    options = ["--quick", "--shape", "tiny", "--product", "512", "512", "--form", "float32", "--form", "int4"]
    rows = [line for line in run_script("weights.py", *options).splitlines() if line.startswith("|")]
    assert [row.split("|")[1].strip() for row in rows if "%" in row] == ["float32", "int4"] * 2
    assert all(row.count("%") == 3 for row in rows[2:4])
    assert all(row.count("%") == 4 for row in rows[6:8])  # prefill too


@pytest.mark.slow
def test_weights_of_four_bits_are_served_twice() -> None:
    shown = run_script("weights.py", "--quick", "--seven-b")
    rows = [line for line in shown.splitlines() if line.startswith("|")]
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["first", "second, mapped"]
    assert all(row.count(" s |") == 5 and row.count(" GB |") == 2 for row in rows[2:])


@pytest.mark.slow
def test_the_end_to_end_benchmark_compares_and_records_every_system(tmp_path: Path) -> None:
    run_script("cpu_end_to_end.py", "--quick", "--repeat", "1", "--record", str(tmp_path), timeout_s=280)
    [path], [page] = tmp_path.glob("*.json"), tmp_path.glob("*.md")
    record = json.loads(path.read_text(encoding="utf-8"))
    assert {sample["system"] for sample in record["samples"]} == SYSTEMS
    assert len(record["samples"]) == len(SYSTEMS) * len(record["cases"]) > len(SYSTEMS)
    for sample in record["samples"]:
        assert sample["error"] is None
        assert len(sample["tokens_per_s"]) == 1
        assert sample["num_answers"] > 0
        assert sample["num_differing"] == 0 or sample["largest_gap"] < 1e-4, f"{sample} is no rounding"
    check_roofline(record)
    text = page.read_text(encoding="utf-8")
    assert all(f"| {system} |" in text for system in SYSTEMS)
    assert record["machine"]["processor"] in text
    assert "**not measured in this run**" in text


def check_roofline(record: Any) -> None:
    """Compute the bytes of a decode step by hand, for the first case's one request: weights and KV so far."""
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
