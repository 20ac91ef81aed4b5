import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pagewood.schedpolicy.simulate import main
from pagewood.schedpolicy.simulation.machine import FORMAT

LINE = {"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]}


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    lines = ({**LINE, "timestamp": 200 * number, "hash_ids": [1, 2 + number % 5]} for number in range(40))
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return str(path)


def test_a_table(trace: str, capsys: pytest.CaptureFixture[str]):
    assert main([trace, "--policy", "lpm,fcfs,fair", "--replicas", "2", "--router", "prefix-aware"]) == 0
    title, head, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("trace.jsonl: 40 requests in 8 s on 2 x h100-8b behind prefix-aware")
    assert head.split()[:3] == ["policy", "ttft", "p50"]
    assert [row.split()[0] for row in rows] == ["lpm", "fcfs", "fair"]


def test_the_same_seed_gives_the_same_bytes_in_any_process():
    command = [
        *(sys.executable, "-m", "pagewood.schedpolicy.simulate", "--workload", "noisy-tenant", "--requests", "150"),
        *("--rate", "30", "--policy", "random,fair,lpm,dfs-weight", "--replicas", "3", "--router", "power-of-two"),
        *("--json", "--seed"),
    ]

    def run(seed: str, hash_seed: str) -> bytes:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.run([*command, seed], env=environment, capture_output=True, check=True).stdout

    one = run("7", "1")
    assert one == run("7", "2")
    assert one != run("8", "1")
    report = json.loads(one)
    assert list(report["policies"]) == ["random", "fair", "lpm", "dfs-weight"]
    assert report["policies"]["fair"]["num_requests"] == 150


def test_a_measured_machine(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = tmp_path / "mine.json"
    coefficients = {"base_s": 1.0, "prefill_s": 1e-6, "decode_s": 0.0, "kv_s": 0.0}
    model.write_text(json.dumps({"format": FORMAT, **coefficients}))
    assert main([trace, "--step-model", str(model), "--cache-pages", "100", "--requests", "1", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)["policies"]["lpm"]
    assert summary["e2e"]["p50"] == pytest.approx(9.0, abs=0.01)
    assert main([trace, "--step-model", str(model)]) == 2
    assert "--cache-pages must be given, since mine has no kv_tokens" in capsys.readouterr().err


def test_a_generated_trace_can_be_saved_and_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "saved.jsonl"
    options = ["--policy", "fcfs", "--json"]
    assert main(["--workload", "bursty", "--requests", "60", "--save-trace", str(path), *options]) == 0
    first = json.loads(capsys.readouterr().out)["policies"]
    assert main([str(path), "--block-size", "64", *options]) == 0
    second = json.loads(capsys.readouterr().out)["policies"]
    assert second["fcfs"]["hit_rate"] == first["fcfs"]["hit_rate"]
    assert second["fcfs"]["ttft"]["p99"] == pytest.approx(first["fcfs"]["ttft"]["p99"])


def test_more_policy_options(capsys: pytest.CaptureFixture[str]):
    options = ["--prefill-first", "--victim", "least-output", "--max-running-per-tenant", "4", "--refuse-late"]
    assert main(["--workload", "deadlines", "--requests", "80", "--rate", "50", "--policy", "edf+age", *options]) == 0
    assert "edf+age" in capsys.readouterr().out
    load = ["--workload", "heavy-tailed", "--requests", "80", "--rate", "50", "--policy", "fcfs", "--json"]
    tables: set[str] = set()
    for preset in ("decode-first", "stall-free", "prefill-first"):
        assert main([*load, "--schedule-preset", preset, "--step-tokens", "256"]) == 0
        tables.add(capsys.readouterr().out)
    assert len(tables) == 3


def test_plots_are_the_same_each_time(trace: str, tmp_path: Path):
    pytest.importorskip("matplotlib")
    for folder in ("one", "other"):
        assert main([trace, "--plot", str(tmp_path / folder), "--policy", "lpm,fcfs"]) == 0
    for name in ("cdf.png", "timeline.png"):
        image = (tmp_path / "one" / name).read_bytes()
        assert image.startswith(b"\x89PNG")
        assert image == (tmp_path / "other" / name).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either a TRACE file or --workload"),
        (["/nowhere.jsonl"], "No such file"),
        (["--workload", "poisson", "--policy", "lpm,best"], "policy must be one of fcfs, .*, got 'best'"),
        (["--workload", "poisson", "--replicas", "2000"], r"num_replicas must be in \[1, 1000\], got 2000"),
        (["--workload", "poisson", "--cache-pages", "0"], "num_pages must be >= 1, got 0"),
        (["--workload", "poisson", "--page-size", "48"], "page_size must divide block_size"),
        (["--workload", "poisson", "--step-model", "gpu"], "--step-model must be a file or one of h100-8b, h100-70b"),
        (["--workload", "poisson", "--max-running", "9999"], "max_step_tokens must be >= max_running"),
        (["--workload", "poisson", "--requests", "0"], "--requests must be >= 1, got 0"),
        (["--workload", "poisson", "--schedule-preset", "stall-free", "--prefill-first"], "must be given without"),
        (["--workload", "poisson", "--slo-ttft", "0"], "first_token_s must be > 0"),
    ],
)
def test_wrong_input_is_one_line_on_stderr(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert re.search(message, err)


def test_the_error_for_a_malformed_line_has_its_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(LINE) + "\n{}\n")
    assert main([str(path)]) == 2
    assert "bad.jsonl:2: a request must have hash_ids" in capsys.readouterr().err


def test_plots_without_matplotlib_are_an_error_before_anything_runs(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def not_installed(name: str) -> None: ...

    monkeypatch.setattr("pagewood.schedpolicy.simulate.find_spec", not_installed)
    assert main([trace, "--plot", str(tmp_path / "plots")]) == 2
    assert "pip install pagewood-schedpolicy[sim]" in capsys.readouterr().err
    assert not (tmp_path / "plots").exists()


def test_help_names_the_policies(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "dfs-weight" in capsys.readouterr().out


def test_a_fleet_behind_the_router(capsys: pytest.CaptureFixture[str]):
    common = ["--workload", "bursty", "--requests", "60", "--rate", "30", "--policy", "fcfs", "--router", "fleet"]
    many = ["--replicas", "3", "--prefill-replicas", "1", "--mean-life", "8", "--restart-after", "1", "--places", "8"]
    assert main([*common, *many, "--max-running-per-tenant", "9"]) == 0
    assert "fcfs: num_deaths" in capsys.readouterr().out
    assert main([*common, "--autoscale", "0", "4", "--startup", "1", "--json"]) == 0
    fleets = json.loads(capsys.readouterr().out)["run"]["fleets"]
    assert fleets["fcfs"]["most_replicas"] >= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--places", "4"], "--router must be fleet with --places, got round-robin"),
        (["--router", "fleet", "--restart-after", "4"], "--mean-life must be given with --restart-after"),
        (["--router", "fleet", "--startup", "4"], "--autoscale must be given with --startup"),
        (["--router", "fleet", "--autoscale", "4", "2"], "max_replicas must be >= 4, got 2"),
    ],
)
def test_options_of_the_fleet_are_checked(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["--workload", "poisson", "--requests", "2", *arguments]) == 2
    assert message in capsys.readouterr().err
