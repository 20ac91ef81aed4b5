"""One run of a program: its requests, and their ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from pagewood.engine.program.backend import Answer, Backend, OnText, Usage
from pagewood.engine.program.variable import ProgramCancelledError, Variable

Ask = Callable[[OnText | None], "Future[Answer]"]
"""Makes a request; gets the receiver of the pieces of the text, if they are wanted."""


class Execution:
    """The requests of one run, of all its branches. Invariant: each variable in it will be settled.

    Args:
        backend: answers.
        priority: of all requests; higher goes first.
        is_streaming: whether texts are wanted in pieces.
    """

    __slots__ = ("_changed", "_futures", "_is_streaming", "_lock", "_variables", "backend", "ended_by", "priority")

    def __init__(self, backend: Backend, priority: int, *, is_streaming: bool) -> None:
        self.backend = backend
        self.priority = priority
        self._is_streaming = is_streaming
        self._lock = threading.Lock()
        """Held while the two below are used, which every thread may do."""
        self._futures: set[Future[Answer]] = set()
        """Answers that are being computed."""  # contents written by: _launch, _settle
        self.ended_by: ProgramCancelledError | None = None
        """Why no more requests are made."""  # written by: cancel
        self._variables: list[Variable] = []  # contents written by: compute, in the program's thread
        self._changed = threading.Condition()
        """Notified after each new variable, and by `notify`."""

    @property
    def usage(self) -> Usage:
        """Tokens of all answers that are known."""
        answers = [variable.settled for variable in self._variables]
        return sum((answer.usage for answer in answers if answer is not None), Usage())

    def compute(self, variable: Variable, previous: Variable | None, ask: Ask) -> None:
        """Compute a variable as soon as the one before it in its text is known.

        Raises:
            ProgramCancelledError: the run was cancelled.
        """
        self.check()
        self._variables.append(variable)
        self.notify()
        launch = partial(self._launch, variable, ask)
        if previous is None:
            launch()
        else:
            previous.then(variable, launch)

    def notify(self) -> None:
        """Wake the callers of `wait_for`."""
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds that changes with a new variable or before `notify`."""
        with self._changed:
            self._changed.wait_for(holds)

    def finish(self) -> None:
        """Wait until every variable is settled.

        Raises:
            VariableError: one has an error that the program has not read.
        """
        for variable in self._variables:
            variable.wait()
        for variable in self._variables:
            if variable.has_unread_error:
                variable.answer()

    def check(self) -> None:
        """Raise the error of a run that was cancelled."""
        if self.ended_by is not None:
            raise self.ended_by

    def cancel(self, error: ProgramCancelledError | None = None) -> None:
        """End all requests; variables without an answer get the error of the first call."""
        with self._lock:
            self.ended_by = self.ended_by or error or ProgramCancelledError("the program was cancelled")
            futures = list(self._futures)
        for future in futures:
            future.cancel()

    def _launch(self, variable: Variable, ask: Ask) -> None:
        try:
            future = ask(variable.add if self._is_streaming else None)
        except Exception as error:  # any exception is raised where the variable is read
            variable.fail(error)
            return
        with self._lock:
            self._futures.add(future)
            is_cancelled = self.ended_by is not None
        future.add_done_callback(partial(self._settle, variable))
        if is_cancelled:
            future.cancel()

    def _settle(self, variable: Variable, future: Future[Answer]) -> None:
        with self._lock:
            self._futures.discard(future)
        if future.cancelled():
            variable.fail(self.ended_by or ProgramCancelledError("the request was cancelled"))
        elif (error := future.exception()) is not None:
            variable.fail(error)
        else:
            variable.settle(future.result())
