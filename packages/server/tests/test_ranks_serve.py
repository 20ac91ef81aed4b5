"""A server whose model is computed by two processes, either of which is killed or stopped under load."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from lost_requests import LONG, SHORT, Reader, text_of
from pagewood.server.metrics.rank_processes import rank_processes
from serving import Server, is_alive, until

RANKS = ("--tensor-parallel-size", "2", "--threads", "2", "--max-running-requests", "4", "--max-total-tokens", "16384")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    server = Server(tmp_path_factory.mktemp("ranks"), *RANKS)
    yield server
    pids = processes_of(server)
    server.close()
    until(lambda: not any(map(is_alive, pids.values())))


def processes_of(server: Server) -> dict[str, int]:
    children = server.children()
    return children | rank_processes(children.get("engine_process"))


def test_metrics_and_dashboard_name_the_ranks(server: Server) -> None:
    shown = server.admin.get("/dashboard/events").json()["processes"]
    assert {"engine", "rank-1"} <= {one["name"] for one in shown}
    text = server.http.get("/metrics").text
    assert 'process="rank-1"' in text
    assert set(processes_of(server)) >= {"engine_process", "rank-1"}


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("rank-1", signal.SIGKILL),
        pytest.param("rank-1", signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param("engine_process", signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_requests_go_on_when_a_rank_is_lost(server: Server, name: str, number: signal.Signals) -> None:
    expected = text_of(server.http.post("/v1/completions", json=SHORT).text)
    server.admin.post("/pause", json={}).raise_for_status()
    streams = [Reader(server, LONG) for _ in range(4)]  # all rows
    until(lambda: server.ready()["engine"]["num_waiting"] == 4)
    waiting = [Reader(server, SHORT) for _ in range(4)]
    until(lambda: server.ready()["engine"]["num_waiting"] == 8)
    server.admin.post("/resume", json={}).raise_for_status()
    until(lambda: all(len(stream.lines) > 3 for stream in streams))
    pids = processes_of(server)
    both = pids["engine_process"], pids["rank-1"]
    os.kill(pids[name], number)
    for stream in streams:
        assert stream.end() == "data: [DONE]"
    for one in waiting:
        assert (text_of(one.end()), one.status) == (expected, 200)
    until(lambda: not any(map(is_alive, both)))
    assert server.http.get("/health/generate").json()["status"] == "ok"
    counters = server.until_idle()
    assert counters["num_free_pages"] + counters["num_cached_pages"] == counters["num_pages"]


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
