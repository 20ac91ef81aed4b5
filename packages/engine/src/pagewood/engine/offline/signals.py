"""Signal handlers that wait for a safe point, so that Ctrl-C cannot leave a step of the engine half done."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
"""Signals whose handlers commonly raise: Ctrl-C, requests to terminate, and timeouts."""

_PATIENCE_S = 60.0
"""A handler that comes this long after the last safe point runs at once: the step probably hangs."""


class SignalHold:
    """Postpones the Python handlers of `SIGINT`, `SIGTERM` and `SIGALRM` to the next safe point of a `with` block.

    `check` and the end of the block are the safe points. A second signal of the same kind before a safe point, or a
    signal a minute after the last safe point, is handled at once, so that a hanging program can be ended. Outside the
    main thread this does nothing, because Python runs signal handlers in the main thread only.

    Invariant: after the block, the handlers are those from before it.
    """

    __slots__ = ("_handlers", "_held", "_is_active", "_replaced", "_since_s")

    def __init__(self) -> None:
        self._handlers: dict[int, Handler] = {}
        """The program's handlers, by signal."""  # written by: __enter__
        self._replaced: list[int] = []
        """Signals whose handler is replaced now."""  # written by: __enter__, _restore
        self._held: dict[int, FrameType | None] = {}
        """Signals whose handlers are postponed."""  # written by: _hold, check, __exit__
        self._is_active = False  # written by: __enter__, __exit__
        self._since_s = 0.0
        """Last safe point, monotonic."""  # written by: __enter__, check

    def __enter__(self) -> SignalHold:
        """Postpone handlers from now on."""
        if threading.current_thread() is not threading.main_thread():
            return self
        self._since_s = time.monotonic()
        self._is_active = True
        try:
            for signum in _SIGNALS:
                handler = signal.getsignal(signum)
                if callable(handler):
                    self._handlers[signum] = handler
                    self._replaced.append(signum)
                    signal.signal(signum, self._hold)
        except BaseException:  # a handler that is not replaced yet has raised
            self._leave()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the handlers, then run those that were postponed."""
        if self._is_active:
            self._leave()
            self._run_held()

    def check(self) -> None:
        """Run the handlers that were postponed; their exceptions are raised here."""
        self._since_s = time.monotonic()
        self._run_held()

    def _run_held(self) -> None:
        while self._held:
            signum, frame = self._held.popitem()
            self._handlers[signum](signum, frame)

    def _hold(self, signum: int, frame: FrameType | None) -> None:
        if not self._is_active or signum in self._held or time.monotonic() - self._since_s > _PATIENCE_S:
            self._held.pop(signum, None)
            self._handlers[signum](signum, frame)
        else:
            self._held[signum] = frame

    def _leave(self) -> None:
        # A handler that has just been restored may raise at any moment. The second call then restores the others.
        try:
            self._restore()
        finally:
            self._restore()
            self._is_active = False

    def _restore(self) -> None:
        while self._replaced:
            signal.signal(self._replaced[-1], self._handlers[self._replaced[-1]])
            self._replaced.pop()
