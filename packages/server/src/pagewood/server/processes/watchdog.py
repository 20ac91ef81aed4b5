"""Finds an engine that lives but makes no progress, reports what is stuck, and ends it if configured."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum

from pagewood.server.observe.incidents import Incidents
from pagewood.server.processes.standstill import stood_still
from pagewood.server.requests.status import EngineStatus

CHECK_S = 0.5
"""Time between two checks."""
RELAY_GRACE_S = 10.0
"""Time in which a pulse must come through a new detokenizer process; otherwise the engine itself is silent."""

_log = logging.getLogger(__name__)


class Stuck(Enum):
    """The part that is stuck. An idle engine is not stuck: its pulses come, and it is in no step."""

    DEVICE = "device"
    """The engine's thread waits for the runner."""
    LOOP = "loop"
    """The engine's thread is in one pass of its loop, outside the runner."""
    ADMISSION = "admission"
    """The loop runs, requests wait, memory is free, but no request is admitted."""
    SILENT = "silent"
    """No pulse comes: the process of the engine or of the detokenizer is stopped, or holds its interpreter's lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """The stuck part, and for how long it has been stuck."""

    stuck: Stuck
    seconds: float

    def __str__(self) -> str:
        match self.stuck:
            case Stuck.DEVICE:
                return f"the device is stuck: the engine has waited for one step for {self.seconds:.1f} s"
            case Stuck.LOOP:
                return f"the engine's loop is stuck: one pass has taken {self.seconds:.1f} s outside the device"
            case Stuck.ADMISSION:
                return f"admission is frozen: requests have waited for {self.seconds:.1f} s with free memory"
            case Stuck.SILENT:
                return f"the engine is silent: no pulse has come for {self.seconds:.1f} s"


def trouble_of(status: EngineStatus, *, limit_s: float | None = None) -> Trouble | None:
    """Return the stuck part of the engine, or None if it works, is idle, or does not exist.

    Args:
        status: of the engine.
        limit_s: how long each may take, seconds; None: the limits after which `status` calls the engine stalled.
    """
    silent_s = status.seconds_since_pulse
    if silent_s is None or status.is_cut_off:
        return None
    if silent_s > (status.silent_limit_s if limit_s is None else limit_s):
        return Trouble(stuck=Stuck.SILENT, seconds=silent_s)
    if status.step_s > (status.step_limit_s if limit_s is None else limit_s):
        return Trouble(stuck=Stuck.DEVICE if status.is_in_device else Stuck.LOOP, seconds=status.step_s)
    if status.frozen_s > (status.frozen_limit_s if limit_s is None else limit_s):
        return Trouble(stuck=Stuck.ADMISSION, seconds=status.frozen_s)
    return None


class Watchdog:
    """Watches the engine's status; at each new trouble it writes the stacks of all processes, and may end the engine.

    If an engine is silent, the detokenizer, which passes its pulses on, may be stuck instead. That process restarts in
    a moment, so it is ended first. The engine follows if no pulse comes through the new process.

    Invariant: one trouble is reported once, until the engine has worked again or was replaced.

    Args:
        status: of the engine.
        limit_s: how long each part may be stuck before it is ended, seconds; None: nothing is ended.
        incidents: where troubles are counted.
        dump: writes the stacks of all processes.
        kill: ends the process of a stage, by name.
        engine: name of the engine's stage.
        relay_works: whether the detokenizer is known to work, so that a silent engine is stuck itself.
    """

    __slots__ = (
        *("_dump", "_ended_relay", "_engine", "_incidents", "_is_reported", "_kill", "_limit_s", "_relay_works"),
        "_status",
    )

    def __init__(
        self,
        status: EngineStatus,
        *,
        limit_s: float | None,
        incidents: Incidents,
        dump: Callable[[], Awaitable[None]],
        kill: Callable[[str], None],
        engine: str = "engine",
        relay_works: Callable[[], bool] = lambda: False,
    ) -> None:
        self._engine = engine
        self._relay_works = relay_works
        self._status = status
        self._limit_s = limit_s
        self._incidents = incidents
        self._dump = dump
        self._kill = kill
        self._is_reported = False  # written by: check
        self._ended_relay: tuple[int, float] | None = None  # written by: check, start_again
        """Incarnation of the detokenizer that was ended, and when, until a message has come through a later one."""

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            began_s = self._status.clock()
            await asyncio.sleep(CHECK_S)
            try:
                if stood_still(self._status.clock() - began_s, wanted_s=CHECK_S):
                    self.start_again()
                await self.check()
            except Exception:  # it goes on
                _log.exception("the watchdog failed")

    def start_again(self) -> None:
        """Start the time of every limit again, because this process stood still."""
        _log.info("this process stood still for some time; the clocks of the watchdog start again")
        self._status.start_again()
        if self._ended_relay is not None:
            self._ended_relay = (self._ended_relay[0], self._status.clock())

    async def check(self) -> Trouble | None:
        """Check once; return the trouble if it is a new one."""
        status = self._status
        if self._ended_relay is not None:
            relay, ended_s = self._ended_relay
            if status.relay > relay and not status.is_cut_off:
                self._ended_relay = None
            elif status.clock() - ended_s > RELAY_GRACE_S:
                self._ended_relay = None
                _log.error("nothing has come through the new detokenizer process either")
                self._end(self._engine)
            else:
                return None
        trouble = trouble_of(status, limit_s=self._limit_s)
        if trouble is None:
            self._is_reported = False
            return None
        if self._is_reported:
            return None
        self._is_reported = True
        self._incidents.stuck[trouble.stuck.value] += 1
        _log.error("%s; the stacks of all processes follow", trouble)
        await self._dump()
        again = trouble_of(status, limit_s=self._limit_s)
        if self._limit_s is not None and again is not None and again.stuck is trouble.stuck:
            if trouble.stuck is Stuck.SILENT and not self._relay_works():
                self._ended_relay = (status.relay, status.clock())
                self._end("detokenizer")
            else:
                self._end(self._engine)
        return trouble

    def _end(self, stage: str) -> None:
        self._incidents.num_kills += 1
        _log.error("the watchdog ends the %s process", stage)
        self._kill(stage)
