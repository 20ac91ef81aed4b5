"""A server whose model is computed in two stages, the second of which is killed under load."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from lost_requests import LONG, SHORT, Reader, text_of
from pagewood.server.metrics.rank_processes import rank_processes
from profiles import recorded
from serving import Server, is_alive, until

STAGES = ("--pipeline-parallel-size", "2", "--threads", "2", "--max-running-requests", "4")
NAME = "rank-1-stage-1"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    server = Server(tmp_path_factory.mktemp("stages"), *STAGES)
    yield server
    pids = processes_of(server)
    server.close()
    until(lambda: not any(map(is_alive, pids.values())))


def processes_of(server: Server) -> dict[str, int]:
    children = server.children()
    return children | rank_processes(children.get("engine_process"))


@pytest.mark.slow
def test_metrics_and_dashboard_name_the_stages(server: Server) -> None:
    shown = server.admin.get("/dashboard/events").json()["processes"]
    assert {"engine", NAME} <= {one["name"] for one in shown}
    assert f'process="{NAME}"' in server.http.get("/metrics").text
    assert set(processes_of(server)) >= {"engine_process", NAME}


@pytest.mark.slow
def test_a_profile_has_all_stages_in_one_trace(server: Server) -> None:
    names = recorded(server)
    assert "send_rows" in names["device"] - names["device, rank 1"]
    assert {"receive_rows", "draw"} <= names["device, rank 1"] - names["device"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number"), [(NAME, signal.SIGKILL), (NAME, signal.SIGSTOP), ("engine_process", signal.SIGKILL)]
)
def test_requests_go_on_when_a_stage_is_lost(server: Server, name: str, number: signal.Signals) -> None:
    expected = text_of(server.http.post("/v1/completions", json=SHORT).text)
    server.admin.post("/pause", json={}).raise_for_status()
    streams = [Reader(server, LONG) for _ in range(4)]  # all rows
    until(lambda: server.ready()["engine"]["num_waiting"] == 4)
    waiting = [Reader(server, SHORT) for _ in range(4)]
    until(lambda: server.ready()["engine"]["num_waiting"] == 8)
    server.admin.post("/resume", json={}).raise_for_status()
    until(lambda: all(len(stream.lines) > 3 for stream in streams))
    pids = processes_of(server)
    both = pids["engine_process"], pids[NAME]
    os.kill(pids[name], number)
    for stream in streams:
        assert stream.end() == "data: [DONE]"
    for one in waiting:
        assert (text_of(one.end()), one.status) == (expected, 200)
    until(lambda: not any(map(is_alive, both)))
    assert server.http.get("/health/generate").json()["status"] == "ok"
    counters = server.until_idle()
    assert counters["num_free_pages"] + counters["num_cached_pages"] == counters["num_pages"]
    assert not [one for one in Path("/dev/shm").iterdir() if "pagewood" in one.name]
