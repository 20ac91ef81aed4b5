"""A stuck device, a stuck loop, frozen admission, silence and idleness are told apart, by faults in a real engine."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from leaving_client import Client
from memory_server import MemoryServer
from pagewood.engine.core.steps.plan import Planner
from pagewood.engine.text import Tokenizer
from pagewood.server.messages import wire
from pagewood.server.observe.incidents import Incidents
from pagewood.server.processes.watchdog import CHECK_S, RELAY_GRACE_S, Stuck, Watchdog, trouble_of
from pagewood.server.requests.status import EngineState, EngineStatus

pytestmark = pytest.mark.anyio

LIMIT_S = 0.3
BODY = {"model": "echo", "prompt": "Hi", "max_tokens": 3}


async def until_stuck(server: MemoryServer, stuck: Stuck) -> None:
    """Wait until that is stuck, by its status; if this process stood still, the engine may seem to be silent first."""

    def is_stuck() -> bool:
        trouble = trouble_of(server.engine_status, limit_s=LIMIT_S)
        assert trouble is None or trouble.seconds > LIMIT_S
        assert trouble is None or trouble.stuck in (stuck, Stuck.SILENT)
        return trouble is not None and trouble.stuck is stuck

    await server.until(is_stuck)


async def test_a_stuck_device_and_a_stuck_loop_and_an_idle_engine(
    model_folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = MemoryServer(model_folder, tokenizer, limit=8, pulse_interval_s=0.02)
    await server.start()
    server.gate.close()  # of the runner
    client = Client(server, BODY, path="/v1/completions")
    await until_stuck(server, Stuck.DEVICE)
    server.gate.open()
    await client.served
    await server.until(lambda: not server.engine_status.step_s)
    await server.until_idle()
    go_on = threading.Event()
    plan = Planner.plan

    def stuck_plan(*arguments: Any) -> Any:
        assert go_on.wait(60)
        return plan(*arguments)

    monkeypatch.setattr(Planner, "plan", stuck_plan)
    client = Client(server, BODY, path="/v1/completions")
    await until_stuck(server, Stuck.LOOP)
    go_on.set()
    await client.served
    await server.until(lambda: not server.engine_status.step_s)
    await server.until_idle()
    await asyncio.sleep(3 * LIMIT_S)  # idle: its pulses are those of the engine's thread, which waits for commands
    status = server.engine_status
    await server.until(lambda: trouble_of(status, limit_s=1.5) is None)  # an idle engine sends one per second
    assert status.state is EngineState.READY
    await server.stop()
    await server.until(lambda: trouble_of(status, limit_s=1.0) is not None)
    assert str(trouble_of(status, limit_s=1.0)).startswith("the engine is silent")


class Engine:
    """What the HTTP process hears of an engine; a test says when."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.status = EngineStatus(clock=lambda: self.now_s)
        self.killed: list[str] = []
        self.num_dumps = 0
        self.incidents = Incidents()

    def pulse(self, **facts: Any) -> None:
        model = wire.Model(max_length=9, vocab_size=9)
        status = self.status
        status.take(wire.Pulse(incarnation=status.incarnation, relay=status.relay, model=model, counters={}, **facts))

    def watchdog(self, limit_s: float | None) -> Watchdog:
        async def dump() -> None:
            self.num_dumps += 1

        return Watchdog(self.status, limit_s=limit_s, incidents=self.incidents, dump=dump, kill=self.killed.append)


async def test_a_trouble_is_reported_once_and_ended_only_if_that_is_wanted() -> None:
    engine = Engine()
    watchdog = engine.watchdog(None)
    assert await watchdog.check() is None  # it is starting
    engine.pulse(step_s=100.0)
    assert await watchdog.check() is None
    for facts in ({"step_s": 901.0, "is_in_device": True}, {"step_s": 901.0}, {"frozen_s": 61.0}):
        engine.pulse(**facts)
        assert await watchdog.check() is not None
        assert await watchdog.check() is None
        assert engine.status.state is EngineState.STALLED
        engine.pulse()
        assert await watchdog.check() is None
    engine.now_s += 61
    assert await watchdog.check() is not None
    assert engine.incidents.stuck == {"device": 1, "loop": 1, "admission": 1, "silent": 1}
    assert (engine.num_dumps, engine.killed, engine.incidents.num_kills) == (4, [], 0)


async def test_a_stuck_engine_is_ended() -> None:
    engine = Engine()
    watchdog = engine.watchdog(5.0)
    engine.pulse(frozen_s=5.1)
    trouble = await watchdog.check()
    assert trouble is not None
    assert str(trouble) == "admission is frozen: requests have waited for 5.1 s with free memory"
    assert engine.killed == ["engine"]
    engine.status.lost(next_incarnation=1)
    assert await watchdog.check() is None
    engine.pulse(step_s=5.1)
    assert await watchdog.check() is not None
    assert engine.killed == ["engine", "engine"]


@pytest.mark.parametrize("is_detokenizer", [True, False])
async def test_of_a_silent_engine_the_detokenizer_is_ended_first(is_detokenizer: bool) -> None:
    engine = Engine()
    watchdog = engine.watchdog(5.0)
    engine.pulse()
    engine.now_s += 5.1
    assert await watchdog.check() is not None
    assert engine.killed == ["detokenizer"]
    assert await watchdog.check() is None
    engine.status.relay_lost(next_incarnation=1)
    engine.now_s += RELAY_GRACE_S - 1
    assert await watchdog.check() is None
    if is_detokenizer:
        engine.pulse()
    engine.now_s += 2
    assert await watchdog.check() is None
    assert engine.killed == (["detokenizer"] if is_detokenizer else ["detokenizer", "engine"])


async def test_the_clock_of_the_watchdog_runs() -> None:
    engine = Engine()
    engine.pulse(frozen_s=99.0)
    watching = asyncio.create_task(engine.watchdog(None).run())
    end_s = time.monotonic() + 20
    while not engine.num_dumps:
        assert time.monotonic() < end_s
        await asyncio.sleep(0.02)
    watching.cancel()


async def test_a_watchdog_that_stood_still_starts_its_clocks_again() -> None:
    engine = Engine()
    watchdog = engine.watchdog(3.0)
    engine.pulse(step_s=2.0, frozen_s=2.0)
    assert await watchdog.check() is None
    engine.now_s += 3600.0  # a suspended laptop
    watchdog.start_again()
    assert await watchdog.check() is None
    assert engine.status.state is EngineState.READY
    engine.now_s += 2.9
    assert await watchdog.check() is None
    engine.now_s += 0.2  # the engine has not come back
    trouble = await watchdog.check()
    assert (trouble is not None and trouble.stuck, engine.killed) == (Stuck.SILENT, ["detokenizer"])
    engine.status.relay_lost(next_incarnation=1)
    engine.now_s += 3600.0
    watchdog.start_again()
    assert await watchdog.check() is None
    engine.now_s += RELAY_GRACE_S + 0.1
    assert await watchdog.check() is None
    assert engine.killed == ["detokenizer", "engine"]


async def test_the_watchdog_notices_by_its_own_sleep_that_it_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    watchdog = engine.watchdog(3.0)
    engine.pulse()
    sleeps = [CHECK_S, 3600.0, CHECK_S, CHECK_S]

    async def sleep(wanted_s: float) -> None:
        assert wanted_s == CHECK_S
        if not sleeps:
            raise asyncio.CancelledError
        engine.now_s += sleeps.pop(0)

    monkeypatch.setattr("pagewood.server.processes.watchdog.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await watchdog.run()
    assert (engine.killed, engine.num_dumps) == ([], 0)


async def test_a_process_is_ended_only_if_the_same_trouble_is_still_there_after_the_dump() -> None:
    engine = Engine()
    pulses = [{"step_s": 9.0}, {"frozen_s": 9.0}, {}]

    async def dump() -> None:
        engine.pulse(**pulses[engine.num_dumps])
        engine.num_dumps += 1

    watchdog = Watchdog(engine.status, limit_s=5.0, incidents=engine.incidents, dump=dump, kill=engine.killed.append)
    for expected in (["engine"], ["engine"], ["engine"]):
        engine.pulse(step_s=9.0)
        assert await watchdog.check() is not None
        assert engine.killed == expected
        engine.pulse()
        assert await watchdog.check() is None
