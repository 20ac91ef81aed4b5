"""Starts the child processes, restarts them when they die, and ends them."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from pagewood.server.observe.incidents import Incidents
from pagewood.server.observe.logs import announce
from pagewood.server.processes.child import DUMP_SIGNAL, Settings

_log = logging.getLogger(__name__)

QUICK_DEATH_S = 10.0
"""A process that dies sooner than this after it became useful has died quickly."""
MAX_QUICK_DEATHS = 10
"""Quick deaths of one process in a row after which the server ends."""
FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 10.0
DUMP_WAIT_S = 0.2
"""Time that a process gets to write its stacks, so that those of the next do not mix with them."""

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
    process is restarted, after a delay that doubles while it keeps dying quickly, up to `LONGEST_DELAY_S`; after
    `max_quick_deaths` quick deaths in a row, or an error in this code, the server ends. Children read their standard
    input, and stop when it ends.

    Args:
        stages: the processes, in the order of their start.
        settings: (stage, number of its earlier processes) -> settings of its next process.
        was_ready: whether the server has ever been ready.
        on_death: called with (stage, incarnation of the next process) as soon as a process has died.
        on_failure: called with the reason if the server cannot continue.
        on_crash_loop: called with the reason if a process has died too often; after that it is not started again.
        useful_s: stage -> how long its process has been useful, seconds; None: as long as it has run.
        max_quick_deaths: quick deaths of one process in a row after which it is not started again.
        incidents: where restarts are counted.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        settings: Callable[[Stage, int], Settings],
        was_ready: Callable[[], bool],
        on_death: Callable[[Stage, int], None],
        on_failure: Callable[[str], None],
        on_crash_loop: Callable[[str], None],
        useful_s: Callable[[Stage], float | None] = lambda stage: None,
        max_quick_deaths: int = MAX_QUICK_DEATHS,
        incidents: Incidents | None = None,
    ) -> None:
        self._stages = stages
        self._settings = settings
        self._was_ready = was_ready
        self._on_death = on_death
        self._on_failure = on_failure
        self._on_crash_loop = on_crash_loop
        self._useful_s = useful_s
        self._max_quick_deaths = max_quick_deaths
        self._incidents = Incidents() if incidents is None else incidents
        self._processes: dict[str, tuple[Process, float]] = {}
        """The process of each stage, and how long it may take to end, seconds."""  # written by: _launch
        self._keepers: list[asyncio.Task[None]] = []  # written by: start
        self._unlaunched = {stage.name for stage in stages}  # written by: _keep
        self._launched = asyncio.Event()
        """Set when every stage was started once, or failed to start."""
        self._stopping = False  # written by: stop, kill_all

    def start(self) -> None:
        """Start all processes."""
        self._keepers = [asyncio.create_task(self._watch_over(stage)) for stage in self._stages]

    def pids(self) -> dict[str, int]:
        """Return the process id of the last process of each stage."""
        return {name: process.pid for name, (process, _) in self._processes.items()}

    async def launched(self) -> None:
        """Wait until every process was started once, or failed to start."""
        await self._launched.wait()

    async def stop(self) -> None:
        """End all processes: close their standard input, and kill those that do not end in time."""
        self._stopping = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*[_end(process, grace_s) for process, grace_s in self._processes.values()])

    def kill(self, name: str) -> None:
        """Kill the process of a stage; it is started again like any that dies."""
        process, _ = self._processes[name]
        if process.returncode is None:
            process.kill()

    def kill_all(self) -> None:
        """Kill all processes without waiting for them, and start none again; safe in a signal handler."""
        self._stopping = True
        for name in self._processes:
            self.kill(name)

    async def dump_stacks(self) -> None:
        """Write the stacks of all threads of all processes to standard error, one process after the other."""
        print(f"pagewood: stacks of the http process (pid {os.getpid()}):", file=sys.stderr, flush=True)
        faulthandler.dump_traceback()
        for name, (process, _) in tuple(self._processes.items()):
            if process.returncode is None:
                print(f"pagewood: stacks of the {name} process (pid {process.pid}):", file=sys.stderr, flush=True)
                process.send_signal(DUMP_SIGNAL)
                await asyncio.sleep(DUMP_WAIT_S)

    async def _watch_over(self, stage: Stage) -> None:
        try:
            await self._keep(stage)
        except Exception as error:  # otherwise the server would be down without any message
            _log.exception("the %s process is no longer watched", stage.name)
            self._on_failure(f"the {stage.name} process is no longer watched: {error!r}")

    async def _keep(self, stage: Stage) -> None:
        loop = asyncio.get_running_loop()
        incarnation = 0
        delay_s = FIRST_DELAY_S
        num_quick = 0
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
            useful_s = self._useful_s(stage)
            is_quick = (loop.time() - started_s if useful_s is None else useful_s) < QUICK_DEATH_S
            num_quick = num_quick + 1 if is_quick else 0
            if num_quick >= self._max_quick_deaths:
                self._on_death(stage, incarnation)
                self._on_crash_loop(
                    f"the {stage.name} process died {num_quick} times in a row within {QUICK_DEATH_S:g} s, "
                    f"at last with code {code}; it is not restarted again"
                )
                return
            announce(f"the {stage.name} process ended with code {code} and is being restarted")
            self._incidents.restarts[stage.name] += 1
            self._on_death(stage, incarnation)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S) if is_quick else FIRST_DELAY_S
            await asyncio.sleep(delay_s)

    async def _start(self, stage: Stage, incarnation: int) -> Process:
        launch = asyncio.create_task(self._launch(stage, incarnation))
        try:
            return await asyncio.shield(launch)
        except asyncio.CancelledError:
            await launch  # a process that exists already is ended, and waited for, by `stop`
            raise

    async def _launch(self, stage: Stage, incarnation: int) -> Process:
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
        if not process.stdin.is_closing():  # it is closed if the process has already died: uvloop refuses to write
            process.stdin.write(msgspec.json.encode(settings) + b"\n")
        return process


async def _end(process: Process, grace_s: float) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), grace_s + 2)
    except TimeoutError:
        if process.returncode is None:  # uvloop refuses to kill a process that has just ended
            process.kill()
        await process.wait()
