"""Starts the child processes, restarts them when they die, and ends them."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from pagewood.server.observe.incidents import Incidents
from pagewood.server.observe.logs import announce
from pagewood.server.processes.child import DUMP_SIGNAL, Settings, last_words
from pagewood.server.replicas.division import VISIBLE_DEVICES

_log = logging.getLogger(__name__)

QUICK_DEATH_S = 10.0
"""A process that dies sooner than this after it became useful has died quickly."""
MAX_QUICK_DEATHS = 10
"""Quick deaths of one process in a row after which the server ends."""
FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 10.0
POLL_S = 0.02
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Running:
    """A process that was started."""

    process: Process
    incarnation: int
    settings: Settings
    started_s: float
    is_promoted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it has replaced the process before it."""


class ReplacementError(Exception):
    """A process was not replaced, and goes on as before."""


class Supervisor:
    """Keeps one process per stage alive, and replaces a process by its next one on request.

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
        title: name of the model in messages; empty: it is the only one.
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
        title: str = "",
    ) -> None:
        self._stages = stages
        self._of = f" of {title}" if title else ""
        self._settings = settings
        self._was_ready = was_ready
        self._on_death = on_death
        self._on_failure = on_failure
        self._on_crash_loop = on_crash_loop
        self._useful_s = useful_s
        self._max_quick_deaths = max_quick_deaths
        self._incidents = Incidents() if incidents is None else incidents
        self._running: dict[str, _Running] = {}  # written by: _begin, _start, _keep, promote
        """The newest process of each stage that works, or is to work next."""
        self._successors: dict[str, _Running] = {}  # written by: replace, promote, _keep
        """Processes that load beside those which they are to replace."""
        self._num_started: dict[str, int] = {}  # written by: _launch
        self._planned: set[str] = set()  # written by: replace, _keep
        """Stages whose process is ended on purpose, to be started again."""
        self._keepers: list[asyncio.Task[None]] = []  # written by: start
        self._unlaunched = {stage.name for stage in stages}  # written by: _keep
        self._launched = asyncio.Event()
        """Set when every stage was started once, or failed to start."""
        self._stopping = False  # written by: stop, kill_all
        self._endings: set[asyncio.Task[None]] = set()  # contents written by: promote, stop

    def start(self) -> None:
        """Start all processes."""
        self._keepers = [asyncio.create_task(self._watch_over(stage)) for stage in self._stages]

    def pids(self) -> dict[str, int]:
        """Return the process id of the last process of each stage."""
        return {name: running.process.pid for name, running in self._running.items()}

    async def launched(self) -> None:
        """Wait until every process was started once, or failed to start."""
        await self._launched.wait()

    async def stop(self) -> None:
        """End all processes: close their standard input, and kill those that do not end in time."""
        self._stopping = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, *self._endings, return_exceptions=True)
        await asyncio.gather(*[_end(running) for running in (*self._running.values(), *self._successors.values())])

    def kill(self, name: str) -> None:
        """Kill the process of a stage; it is started again like any that dies."""
        _kill(self._running[name])

    def kill_all(self) -> None:
        """Kill all processes without waiting for them, and start none again; safe in a signal handler."""
        self._stopping = True
        for running in (*self._running.values(), *self._successors.values()):
            _kill(running)

    async def replace(self, stage: Stage, *, is_beside: bool, on_end: Callable[[], None] = lambda: None) -> None:
        """Replace the process of a stage. Return when the new one has been promoted, or was started.

        Args:
            stage: whose process is replaced.
            is_beside: whether the new process loads while the old one works, until `promote` is called; otherwise the
                old one ends first.
            on_end: called before a process is ended that the new one does not wait for.

        Raises:
            ReplacementError: it is being replaced already, or the new process ended before it was promoted.
        """
        name = stage.name
        if name in self._successors or name in self._planned or self._stopping:
            raise ReplacementError(f"the {name} process is being replaced, restarted or stopped already")
        if not is_beside:
            self._planned.add(name)
            running = self._running[name]
            on_end()
            await _end(running, is_alone=True)
            while self._running[name] is running and not self._stopping:
                await asyncio.sleep(POLL_S)
            return
        successor = self._successors[name] = await self._launch(stage)
        ended = asyncio.create_task(successor.process.wait())
        promoted = asyncio.create_task(successor.is_promoted.wait())
        await asyncio.wait((ended, promoted), return_when=asyncio.FIRST_COMPLETED)
        promoted.cancel()
        if not successor.is_promoted.is_set():
            self._successors.pop(name, None)
            raise ReplacementError(f"the new {name} process ended with code {ended.result()}")
        ended.cancel()

    def successor_settings(self, name: str) -> Settings | None:
        """Return the settings of the process that loads beside that of a stage; None: none does."""
        successor = self._successors.get(name)
        return None if successor is None else successor.settings

    def promote(self, name: str) -> None:
        """Make the process that loads beside that of a stage its process, and end the old one."""
        old = self._running[name]
        successor = self._running[name] = self._successors.pop(name)
        successor.is_promoted.set()
        ending = asyncio.create_task(_end(old, is_alone=True))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    def give_up_successor(self, name: str) -> None:
        """End the process that loads beside that of a stage, if there is one."""
        if name in self._successors:
            _kill(self._successors[name])

    async def dump_stacks(self) -> None:
        """Write the stacks of all threads of all processes to standard error, one process after the other."""
        print(f"pagewood: stacks of the http process (pid {os.getpid()}):", file=sys.stderr, flush=True)
        faulthandler.dump_traceback()
        for name, running in tuple(self._running.items()):
            process = running.process
            if process.returncode is None:
                print(f"pagewood: stacks of the {name} process (pid {process.pid}):", file=sys.stderr, flush=True)
                process.send_signal(DUMP_SIGNAL)
                await asyncio.sleep(DUMP_WAIT_S)

    async def _watch_over(self, stage: Stage) -> None:
        try:
            await self._keep(stage)
        except Exception as error:  # otherwise the server would be down without any message
            _log.exception("the %s process is no longer watched", stage.name)
            self._on_failure(f"the {stage.name} process{self._of} is no longer watched: {error!r}")

    async def _keep(self, stage: Stage) -> None:
        delay_s, num_quick = FIRST_DELAY_S, 0
        successor: _Running | None = None
        while True:
            if successor is None and not await self._begin(stage):
                return
            running, code = await self._ended(stage.name)
            if self._stopping:
                return
            if not self._was_ready():
                self._on_failure(
                    f"the {stage.name} process{self._of} ended with code {code} before the server was ready"
                    f"{_reason(running.settings)}"
                )
                return
            successor = self._successors.pop(stage.name, None)
            next_incarnation = self._num_started[stage.name] if successor is None else successor.incarnation
            if stage.name in self._planned:
                self._planned.discard(stage.name)
                self._on_death(stage, next_incarnation)
                continue
            useful_s = self._useful_s(stage)
            if useful_s is None:
                useful_s = asyncio.get_running_loop().time() - running.started_s
            is_quick = useful_s < QUICK_DEATH_S
            num_quick = num_quick + 1 if is_quick else 0
            if num_quick >= self._max_quick_deaths:
                self._on_death(stage, next_incarnation)
                self._on_crash_loop(
                    f"the {stage.name} process{self._of} died {num_quick} times in a row within {QUICK_DEATH_S:g} s, "
                    f"at last with code {code}; it is not restarted again{_reason(running.settings)}"
                )
                return
            why = _reason(running.settings)
            announce(f"the {stage.name} process{self._of} ended with code {code} and is being restarted{why}")
            self._incidents.restarts[stage.name] += 1
            self._on_death(stage, next_incarnation)
            if successor is not None:  # it was to follow in any case
                self._running[stage.name] = successor
                successor.is_promoted.set()
            else:
                delay_s = min(2 * delay_s, LONGEST_DELAY_S) if is_quick else FIRST_DELAY_S
                await asyncio.sleep(delay_s)

    async def _begin(self, stage: Stage) -> bool:
        """Start the process of a stage; return whether that is possible."""
        try:
            self._running[stage.name] = await self._start(stage)
        except OSError as error:
            self._on_failure(f"the {stage.name} process{self._of} cannot be started: {error}")
            return False
        finally:
            self._unlaunched.discard(stage.name)
            if not self._unlaunched:
                self._launched.set()
        return True

    async def _ended(self, name: str) -> tuple[_Running, int]:
        """Wait until a stage has no process any more; return the last one, with its exit code."""
        while True:
            running = self._running[name]
            code = await running.process.wait()
            if running is self._running[name] or self._stopping:
                return running, code

    async def _start(self, stage: Stage) -> _Running:
        launch = asyncio.create_task(self._launch(stage))
        try:
            return await asyncio.shield(launch)
        except asyncio.CancelledError:
            self._running[stage.name] = await launch  # it exists already: `stop` ends it, and waits for it
            raise

    async def _launch(self, stage: Stage) -> _Running:
        incarnation = self._num_started.get(stage.name, 0)
        self._num_started[stage.name] = incarnation + 1
        settings = self._settings(stage, incarnation)
        devices = {VISIBLE_DEVICES: ",".join(settings.devices)} if settings.devices else {}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            stage.module,
            stdin=PIPE,
            env={**os.environ, **_ENVIRONMENT, **devices, **({} if stage.computes else _ONE_THREAD)},
            start_new_session=True,  # the terminal's Ctrl-C is for the parent
        )
        assert process.stdin is not None
        if not process.stdin.is_closing():  # it is closed if the process has already died: uvloop refuses to write
            process.stdin.write(msgspec.json.encode(settings) + b"\n")
        return _Running(
            process=process,
            incarnation=incarnation,
            settings=settings,
            started_s=asyncio.get_running_loop().time(),
        )


def _reason(settings: Settings) -> str:
    """Return what a process has said of its end, behind a colon, and forget it; empty: nothing."""
    file = last_words(settings.folder, settings.stage)
    try:
        return f": {file.read_text(encoding='utf-8')}"
    except (OSError, UnicodeDecodeError):
        return ""
    finally:
        file.unlink(missing_ok=True)


def _kill(running: _Running) -> None:
    if running.process.returncode is None:
        running.process.kill()


async def _end(running: _Running, *, is_alone: bool = False) -> None:
    """End a process; `is_alone`: the server goes on."""
    process = running.process
    assert process.stdin is not None
    if is_alone and not process.stdin.is_closing():
        process.stdin.write(b"\n")
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), running.settings.stop_grace_s + 2)
    except TimeoutError:
        if process.returncode is None:  # uvloop refuses to kill a process that has just ended
            process.kill()
        await process.wait()
