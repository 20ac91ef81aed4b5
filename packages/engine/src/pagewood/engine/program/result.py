"""A run of a program: its variables, its text and its tokens, while it runs and afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from pagewood.engine.program.backend import Answer, Backend, Usage
from pagewood.engine.program.execution import Execution
from pagewood.engine.program.state import State
from pagewood.engine.program.variable import DeadlineExceededError

T = TypeVar("T")


class Result(Generic[T]):
    """A run of a program. Invariant: once it is done, each variable has an answer or an error.

    Reading waits for what is read. Programs make results; they are not made otherwise.

    Args:
        function: the program, with its arguments.
        backend: answers.
        priority: of all its requests; higher goes first.
        deadline_s: seconds from now in which it should be complete; None: no deadline.
        is_streaming: whether texts are read in pieces.
    """

    __slots__ = (
        *("_deadline_s", "_error", "_execution", "_function", "_is_done", "_listeners", "_lock", "_made_s", "_state"),
        "_value",
    )

    def __init__(
        self,
        function: Callable[[State], T],
        *,
        backend: Backend,
        priority: int = 0,
        deadline_s: float | None = None,
        is_streaming: bool = False,
    ) -> None:
        self._function = function
        self._made_s = time.monotonic()
        self._deadline_s = deadline_s
        self._execution = Execution(backend, priority, is_streaming=is_streaming)
        self._state = State(self._execution)
        self._value: list[T] = []
        """The result of the program, once it has returned."""  # contents written by: execute
        self._error: BaseException | None = None  # written by: execute
        self._is_done = False  # written by: execute
        self._lock = threading.Lock()
        """Held while the end is announced, and while listeners are added."""
        self._listeners: list[Callable[[], None]] = []
        """Called at the end."""  # contents written by: wait_async, execute

    @property
    def is_done(self) -> bool:
        """Whether the program has ended, and all that it asked for is computed."""
        return self._is_done

    @property
    def error(self) -> BaseException | None:
        """What ended the program, or the first error of a variable that it did not read; waits for the end."""
        self._execution.wait_for(lambda: self._is_done)
        return self._error

    @property
    def value(self) -> T:
        """The result of the program; waits for its end. Raises `error`."""
        self.wait()
        return self._value[0]

    @property
    def text(self) -> str:
        """The whole text of the program's state; waits for its end. Raises `error`."""
        self.wait()
        return self._state.text

    @property
    def usage(self) -> Usage:
        """Tokens of all answers so far, of all branches."""
        return self._execution.usage

    def wait(self) -> None:
        """Wait for the end of the program. Raises `error`."""
        error = self.error
        if error is not None:
            raise error

    def __getitem__(self, name: str) -> str:
        """Return the text of a variable; waits for it. Raises what `answer` raises."""
        return self.answer(name).text

    def answer(self, name: str) -> Answer:
        """Return the text of a variable with why it ended, its tokens, and its scores; waits for it.

        The variables are those of the program's state. Those of its branches are read in the program, which may return
        them as its value.

        Raises:
            KeyError: the program has ended, and its state has no such variable.
            VariableError: the variable has no value.
            Exception: what ended the program before it came to the variable.
        """
        self._await_variable(name)
        return self._state.answer(name)

    def stream(self, name: str) -> Iterator[str]:
        """Yield the text of a variable in pieces as it is computed; in one piece if the program was not started.

        Raises what `answer` raises.
        """
        self._await_variable(name)
        return self._state.variable(name).stream()

    def cancel(self) -> None:
        """End the requests of the program; it ends with a `ProgramCancelledError` where it goes on. Does not wait."""
        self._execution.cancel()

    def execute(self) -> None:
        """Run the program in this thread, to its end; errors are kept. A KeyboardInterrupt cancels it and is raised."""
        timer = self._timer()
        try:
            self._execution.check()
            value = self._function(self._state)
            self._execution.finish()
            self._value.append(value)
        except BaseException as error:
            self._error = error
            if isinstance(error, Exception) and isinstance(self._execution.ended_by, DeadlineExceededError):
                self._error = self._execution.ended_by
            self._execution.cancel()
            if not isinstance(error, Exception):
                raise
        finally:
            if timer is not None:
                timer.cancel()
            with self._lock:
                self._is_done = True
            self._execution.notify()
            for listener in self._listeners:
                listener()

    async def wait_async(self) -> None:
        """Wait for the end of the program in a coroutine; cancelling that cancels the program. Raises `error`."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def listen() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(ended.set)

        with self._lock:
            self._listeners.append(listen)
            if self._is_done:
                ended.set()
        try:
            await ended.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        self.wait()

    def _timer(self) -> threading.Timer | None:
        """Start what ends the program at its deadline: its requests, wherever they are computed, and new ones."""
        if self._deadline_s is None:
            return None
        error = DeadlineExceededError(f"the program was not complete at its deadline, after {self._deadline_s} s")
        left_s = self._made_s + self._deadline_s - time.monotonic()
        timer = threading.Timer(left_s, self._execution.cancel, (error,))
        timer.daemon = True  # not ours
        timer.start()
        return timer

    def _await_variable(self, name: str) -> None:
        self._execution.wait_for(lambda: self._is_done or name in self._state)
        if name not in self._state and self._error is not None:
            raise self._error
