"""A server whose model is computed by two processes, either of which is killed or stopped under load.

They divide attention by heads, and by request.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Generator
from pathlib import Path

import pytest

from lost_requests import SHORT, check_requests_go_on, processes_of, server_until_all_end
from pagewood.server.keys.run_key import FOLDER_VARIABLE
from serving import Server, command, until

RANKS = ("--tensor-parallel-size", "2", "--threads", "2", "--max-running-requests", "4", "--max-total-tokens", "16384")


@pytest.fixture(scope="module", params=[(), pytest.param(("--enable-dp-attention",), marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    yield from server_until_all_end(tmp_path_factory.mktemp("ranks"), *RANKS, *request.param)


def test_metrics_and_dashboard_name_the_ranks(server: Server) -> None:
    shown = server.admin.get("/dashboard/events").json()["processes"]
    assert {"engine", "rank-1"} <= {one["name"] for one in shown}
    text = server.http.get("/metrics").text
    assert 'process="rank-1"' in text
    assert set(processes_of(server)) >= {"engine_process", "rank-1"}


def profile(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as the user of the server, who has the key of its run."""
    url = () if "--url" in arguments else ("--url", server.url)
    return command("profile", *url, *arguments, **{FOLDER_VARIABLE: str(server.folder / "runtime")})


def test_the_command_records_all_ranks_in_one_file(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    stopping = threading.Event()

    def load() -> None:
        while not stopping.is_set():
            server.http.post("/v1/completions", json=SHORT).raise_for_status()

    thread = threading.Thread(target=load)
    thread.start()
    try:
        first = profile(server, "--out", str(out), "--seconds", "0.2")
        refused = profile(server, "--out", str(out))
        found = profile(server, "--out", str(out), "--steps", "10", "--overwrite")
    finally:
        stopping.set()
        thread.join()
    assert (first.returncode, found.returncode) == (0, 0), first.stderr + found.stderr
    assert found.stdout.endswith("of pagewood, rank 0; pagewood, rank 1\n")
    assert refused.returncode == 2
    assert f"--out must not exist without --overwrite, got {out}" in refused.stderr
    events = json.loads(out.read_bytes())["traceEvents"]
    processes = {one["args"]["name"]: one["pid"] for one in events if one["name"] == "process_name"}
    spans = {name: {one["name"] for one in events if one["pid"] == pid} for name, pid in processes.items()}
    assert set(spans) == {"pagewood, rank 0", "pagewood, rank 1"}
    assert all({"step", "gather_ranks"} <= names for names in spans.values())
    assert {"plan", "launch"} <= spans["pagewood, rank 0"] - spans["pagewood, rank 1"]
    own, other = (
        [(one["ts"], one["ts"] + one["dur"]) for one in events if (one["name"], one["pid"]) == ("step", pid)]
        for pid in processes.values()
    )
    assert sum(any(begin < end_2 and begin_2 < end for begin_2, end_2 in other) for begin, end in own) >= 5


def test_the_command_says_why_it_has_no_profile(server: Server, tmp_path: Path) -> None:
    out = str(tmp_path / "trace.json")
    for arguments, message in (
        (("--api-key", "wrong", "--out", out), f"the server at {server.url} wants an admin key"),
        (("--url", "http://127.0.0.1:9", "--out", out), "no server answers at http://127.0.0.1:9"),
        (("--out", out, "--seconds", "61"), "takes no profile (status 400)"),
        (("--out", str(tmp_path / "none" / "x")), "--out must be in a folder that exists"),
    ):
        found = profile(server, *arguments)
        assert found.returncode == 2, found.stderr
        assert message in found.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("rank-1", signal.SIGKILL),
        pytest.param("rank-1", signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param("engine_process", signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_requests_go_on_when_a_rank_is_lost(server: Server, name: str, number: signal.Signals) -> None:
    check_requests_go_on(server, "rank-1", name, number)


@pytest.mark.slow
def test_the_group_starts_again_when_a_rank_is_lost_while_idle(server: Server) -> None:
    server.until_idle()
    before = processes_of(server)
    os.kill(before["rank-1"], signal.SIGKILL)
    until(lambda: processes_of(server).get("rank-1") not in (None, before["rank-1"]))
    until(lambda: server.ready()["status"] == "ready")
    assert server.http.get("/health/generate").json()["status"] == "ok"
    assert "the process of rank 1 has ended with code -9" in server.stderr()
    assert not [one for one in Path("/dev/shm").iterdir() if "pagewood" in one.name]
