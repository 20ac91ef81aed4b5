"""Starts the child processes, restarts them when they die, and ends them."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from pagewood.server.child import Settings

QUICK_DEATH_S = 10.0
FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 10.0

# Threads that spin while they wait would take the cores that other processes need.
_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One process of the pipeline."""

    name: str
    """Also the name of its socket."""
    module: str
    """Module for `python -m`."""
    computes: bool
    """Whether it may use more than one compute thread."""


class Supervisor:
    """Keeps one process per stage alive.

    A process that cannot be started, or that dies before the server was first ready, ends the server. Later, a dead
    process is restarted, after a delay that grows while it keeps dying. Children read their standard input, and stop
    when it ends.

    Args:
        stages: the processes, in the order of their start.
        settings: (stage, number of its earlier processes) -> settings of its next process.
        was_ready: whether the server has ever been ready.
        on_death: called with (stage, incarnation of the next process) as soon as a process has died.
        on_failure: called with the reason if the server cannot continue.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        settings: Callable[[Stage, int], Settings],
        was_ready: Callable[[], bool],
        on_death: Callable[[Stage, int], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self._stages = stages
        self._settings = settings
        self._was_ready = was_ready
        self._on_death = on_death
        self._on_failure = on_failure
        self._processes: dict[str, tuple[Process, float]] = {}
        """The process of each stage, and how long it may take to end, seconds."""  # written by: _start
        self._keepers: list[asyncio.Task[None]] = []  # written by: start
        self._unlaunched = {stage.name for stage in stages}  # written by: _keep
        self._launched = asyncio.Event()
        """Set when every stage was started once, or could not be."""
        self._stopping = False  # written by: stop

    def start(self) -> None:
        """Start all processes."""
        self._keepers = [asyncio.create_task(self._keep(stage)) for stage in self._stages]

    async def launched(self) -> None:
        """Wait until every process was started once, or could not be."""
        await self._launched.wait()

    async def stop(self) -> None:
        """End all processes: close their standard input, and kill those that do not end in time."""
        self._stopping = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*[_end(process, grace_s) for process, grace_s in self._processes.values()])

    async def _keep(self, stage: Stage) -> None:
        loop = asyncio.get_running_loop()
        incarnation = 0
        delay_s = FIRST_DELAY_S
        while True:
            started_s = loop.time()
            try:
                process = await self._start(stage, incarnation)
            except OSError as error:
                self._on_failure(f"the {stage.name} process cannot be started: {error}")
                return
            finally:
                self._unlaunched.discard(stage.name)
                if not self._unlaunched:
                    self._launched.set()
            code = await process.wait()
            if self._stopping:
                return
            if not self._was_ready():
                self._on_failure(f"the {stage.name} process ended with code {code} before the server was ready")
                return
            incarnation += 1
            print(f"pagewood: the {stage.name} process ended with code {code} and is being restarted", file=sys.stderr)
            self._on_death(stage, incarnation)
            lived_s = loop.time() - started_s
            delay_s = min(2 * delay_s, LONGEST_DELAY_S) if lived_s < QUICK_DEATH_S else FIRST_DELAY_S
            await asyncio.sleep(delay_s)

    async def _start(self, stage: Stage, incarnation: int) -> Process:
        settings = self._settings(stage, incarnation)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            stage.module,
            stdin=PIPE,
            env={**os.environ, **_ENVIRONMENT, **({} if stage.computes else _ONE_THREAD)},
            start_new_session=True,  # the terminal's Ctrl-C is for the parent
        )
        self._processes[stage.name] = (process, settings.stop_grace_s)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(settings) + b"\n")
        return process


async def _end(process: Process, grace_s: float) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), grace_s + 2)
    except TimeoutError:
        process.kill()
        await process.wait()
