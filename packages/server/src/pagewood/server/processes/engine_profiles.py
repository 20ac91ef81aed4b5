"""Profiles in the engine process: begun by a command, ended by time or steps, written to a file, and answered."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from pagewood.engine.api import Delta, FinishReason, Outbox, Refusal
from pagewood.server.messages import wire

if TYPE_CHECKING:
    from pagewood.engine.observe.profiling import Profile, Recorded

_KEPT_S = 60.0
"""Seconds after which the next profile removes the file of a client that has left."""

_log = logging.getLogger(__name__)


def profile_file(folder: Path, request_id: str) -> Path:
    """Return the file of a profile."""
    return folder / f"{request_id}.trace.json"


class Profiles:
    """Takes profiles, one at a time. Invariant: each command is answered once, after its file is complete.

    Args:
        make: makes a profile of the engine.
        folder: of the files.
        outbox: gets the answers; any thread may use it.
        clock: seconds.
    """

    __slots__ = ("_clock", "_ends_s", "_folder", "_make", "_outbox", "_running", "_writer")

    def __init__(
        self,
        *,
        make: Callable[[], Profile],
        folder: Path,
        outbox: Outbox,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make = make
        self._folder = folder
        self._outbox = outbox
        self._clock = clock
        self._running: tuple[wire.Profile, Profile] | None = None
        """The command, and its profile."""  # written by: begin, turn
        self._ends_s = 0.0  # written by: begin
        self._writer: threading.Thread | None = None  # written by: turn

    @property
    def left_s(self) -> float:
        """How long the present profile takes at most; infinity if there is none."""
        return inf if self._running is None else max(0.0, self._ends_s - self._clock())

    def begin(self, command: wire.Profile) -> None:
        """Begin a profile, or refuse it; called in the engine's thread."""
        if self._running is not None or (self._writer is not None and self._writer.is_alive()):
            self._refuse(command.request_id, "a profile is being taken; wait for its end", "profile_running")
            return
        try:
            profile = self._make()
            profile.start()
        except Exception as error:
            _log.exception("a profile cannot be taken")
            self._refuse(command.request_id, f"a profile cannot be taken: {error}", "profile_failed")
            return
        self._running = (command, profile)
        self._ends_s = self._clock() + command.seconds

    def turn(self) -> None:
        """End the profile if its time or its steps are over; called in the engine's thread between two steps."""
        if self._running is None:
            return
        command, profile = self._running
        has_steps = command.steps is not None and profile.num_steps >= command.steps
        if not has_steps and self._clock() < self._ends_s:
            return
        self._running = None
        arguments = (command.request_id, profile.stop())
        self._writer = threading.Thread(target=self._write, args=arguments, name="profile", daemon=True)
        self._writer.start()

    def _write(self, request_id: str, recorded: Recorded) -> None:
        try:
            for old in self._folder.glob(profile_file(Path(), "*").name):  # files of clients that have left
                if time.time() - old.stat().st_mtime > _KEPT_S:
                    old.unlink(missing_ok=True)
            profile_file(self._folder, request_id).write_bytes(recorded.trace())
        except Exception as error:
            _log.exception("a profile cannot be written")
            self._refuse(request_id, f"a profile cannot be written: {error}", "profile_failed")
        else:
            self._outbox.send((Delta(request_id, finish=FinishReason.STOP, first=True),))

    def _refuse(self, request_id: str, message: str, code: str) -> None:
        refusal = Refusal(message=message, code=code)
        self._outbox.send((Delta(request_id, finish=FinishReason.REFUSED, refusal=refusal, first=True),))
