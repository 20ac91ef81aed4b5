"""A server whose model is computed in two stages, the second of which is killed under load."""

from __future__ import annotations

import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from lost_requests import check_requests_go_on, processes_of, server_until_all_end
from profiles import recorded
from serving import Server

STAGES = ("--pipeline-parallel-size", "2", "--threads", "2", "--max-running-requests", "4")
NAME = "rank-1-stage-1"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    yield from server_until_all_end(tmp_path_factory.mktemp("stages"), *STAGES)


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
    check_requests_go_on(server, NAME, name, number)
    assert not [one for one in Path("/dev/shm").iterdir() if "pagewood" in one.name]
