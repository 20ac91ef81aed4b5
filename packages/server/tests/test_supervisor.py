"""Crash loops: later and later restarts, and an end; a death during the start; and errors in the supervision itself."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import msgspec
import pytest

from pagewood.engine.api import EngineConfig
from pagewood.server.observe.incidents import Incidents
from pagewood.server.processes import supervisor as supervisor_module
from pagewood.server.processes.child import Settings
from pagewood.server.processes.supervisor import Stage, Supervisor
from pagewood.server.replicas.division import VISIBLE_DEVICES

pytestmark = pytest.mark.anyio

STAGE = Stage(name="brief", module="this", computes=False)
"""A module that ends at once."""


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The event loop of the server."""
    return "asyncio", {"use_uvloop": True}


def settings(stage: Stage, incarnation: int) -> Settings:
    return Settings(
        folder="/nowhere",
        stage=stage.name,
        listen=stage.name,
        send_to="nothing",
        model_folder="/nowhere",
        incarnation=incarnation,
        engine=EngineConfig(model=str(Path("/nowhere"))),
    )


@pytest.mark.parametrize("is_useful", [False, True])
async def test_a_process_that_keeps_dying_is_started_again_more_slowly_and_at_last_not(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], is_useful: bool
) -> None:
    """A process that was useful for long before each death is no crash loop."""
    monkeypatch.setattr(supervisor_module, "FIRST_DELAY_S", 0.02)
    deaths_s: list[float] = []
    ends: list[str] = []
    incidents = Incidents()
    supervisor = Supervisor(
        [STAGE],
        settings=settings,
        was_ready=lambda: True,
        on_death=lambda stage, incarnation: deaths_s.append(time.monotonic()),
        on_failure=ends.append,
        on_crash_loop=ends.append,
        useful_s=lambda stage: 1e6 if is_useful else None,
        max_quick_deaths=4,
        incidents=incidents,
    )
    supervisor.start()
    end_s = time.monotonic() + 120
    while len(deaths_s) < 4 + is_useful:
        assert time.monotonic() < end_s
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    await supervisor.stop()
    if is_useful:
        assert ends == []
        assert incidents.restarts["brief"] >= 5
    else:
        (why,) = ends
        assert why == (
            "the brief process died 4 times in a row within 10 s, at last with code 0; it is not restarted again"
        )
        assert (len(deaths_s), incidents.restarts) == (4, {"brief": 3})
        assert deaths_s[3] - deaths_s[2] >= 0.16  # 0.04, 0.08 and 0.16 s
    capfd.readouterr()


async def test_a_process_that_is_just_being_started_is_ended_and_waited_for() -> None:
    """Otherwise it would be left to the event loop, which may be closed before it ends."""
    supervisor = Supervisor(
        [STAGE],
        settings=settings,
        was_ready=lambda: True,
        on_death=lambda stage, incarnation: None,
        on_failure=lambda why: None,
        on_crash_loop=lambda why: None,
    )
    supervisor.start()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert supervisor.pids() == {}
    await supervisor.stop()
    (pid,) = supervisor.pids().values()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("was_ready", [False, True])
async def test_a_process_that_dies_before_its_settings_are_sent_has_died_like_any_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str], was_ready: bool
) -> None:
    """uvloop has closed the pipe to it by then, and a write to a closed pipe raises an error."""
    pid_file = tmp_path / "pid"
    (tmp_path / "dies_early.py").write_text(
        f"import os\nwith open({str(pid_file)!r}, 'w') as file:\n    print(os.getpid(), file=file)\nos._exit(7)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(supervisor_module, "FIRST_DELAY_S", 0.02)
    deaths: list[int] = []
    ends: list[str] = []
    supervisor = Supervisor(
        [Stage(name="early", module="dies_early", computes=False)],
        settings=settings,
        was_ready=lambda: was_ready,
        on_death=lambda stage, incarnation: deaths.append(incarnation),
        on_failure=ends.append,
        on_crash_loop=ends.append,
        max_quick_deaths=2,
    )
    supervisor.start()
    end_s = time.monotonic() + 120
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # the supervisor starts the process, and waits for its pipe
    # The loop is kept from running until the process is dead: it sees the death and the pipe together, as under load.
    while not pid_file.exists() or not (pid := pid_file.read_text()).endswith("\n"):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    os.waitid(os.P_PID, int(pid), os.WEXITED | os.WNOWAIT)
    while not ends:
        assert time.monotonic() < end_s
        await asyncio.sleep(0.01)
    await supervisor.stop()
    if was_ready:
        assert deaths == [1, 2]
        assert ends == [
            "the early process died 2 times in a row within 10 s, at last with code 7; it is not restarted again"
        ]
    else:
        assert ends == ["the early process ended with code 7 before the server was ready"]
    capfd.readouterr()


async def test_an_error_in_the_supervision_ends_the_server(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the process would never be started again, and nothing would say why."""
    ends: list[str] = []

    def fail(stage: Stage, incarnation: int) -> None:
        raise KeyError("req-1")

    supervisor = Supervisor(
        [STAGE],
        settings=settings,
        was_ready=lambda: True,
        on_death=fail,
        on_failure=ends.append,
        on_crash_loop=ends.append,
    )
    supervisor.start()
    end_s = time.monotonic() + 120
    while not ends:
        assert time.monotonic() < end_s
        await asyncio.sleep(0.01)
    await supervisor.stop()
    assert ends == ["the brief process is no longer watched: KeyError('req-1')"]
    assert "in fail" in caplog.text
    capfd.readouterr()


async def test_a_process_sees_the_devices_of_its_settings_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    source = (
        f"import os\nwith open({str(seen)!r}, 'w') as file:\n    print(os.environ[{VISIBLE_DEVICES!r}], file=file)\n"
    )
    (tmp_path / "sees_devices.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv(VISIBLE_DEVICES, "1,4,7")
    ends: list[str] = []
    supervisor = Supervisor(
        [Stage(name="sees", module="sees_devices", computes=True)],
        settings=lambda stage, incarnation: msgspec.structs.replace(settings(stage, incarnation), devices=("4", "7")),
        was_ready=lambda: False,
        on_death=lambda stage, incarnation: None,
        on_failure=ends.append,
        on_crash_loop=ends.append,
    )
    supervisor.start()
    end_s = time.monotonic() + 120
    while not ends:
        assert time.monotonic() < end_s
        await asyncio.sleep(0.01)
    await supervisor.stop()
    assert seen.read_text() == "4,7\n"
