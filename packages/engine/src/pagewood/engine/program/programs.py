"""Programs: Python functions over a state, and the ways to run them."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from pagewood.engine.program.backend import Backend
from pagewood.engine.program.result import Result
from pagewood.engine.program.state import State

P = ParamSpec("P")
T = TypeVar("T")


def program(function: Callable[Concatenate[State, P], T]) -> Program[P, T]:
    """Make a program of a function whose first parameter is a `State`.

    Raises:
        TypeError: it is no function with such a parameter, or a coroutine function.
    """
    return Program(function)


class Program(Generic[P, T]):
    """A function over a state. Invariant: it holds nothing of its runs, so any number may run at once.

    `essay("rivers").run(on=backend)` is checked by type checkers; `essay.run("rivers", on=backend)` is the same.

    Args:
        function: gets the state, then the arguments. Its result is that of the program.

    Raises:
        TypeError: as in `program`.
    """

    def __init__(self, function: Callable[Concatenate[State, P], T]) -> None:
        if not callable(function):
            raise TypeError(f"function must be a function over a State, got {function!r:.100}")
        if inspect.iscoroutinefunction(function):
            raise TypeError(f"function must be a plain function, got the coroutine function {function!r:.100}")
        self._signature = inspect.signature(function)
        if not self._signature.parameters:
            raise TypeError(f"function must have a State as its first parameter, got {function!r:.100}")
        self.function = function
        """The plain function: other programs call it with their own state."""
        functools.update_wrapper(self, function)

    def __call__(self, *arguments: P.args, **named: P.kwargs) -> Call[T]:
        """Return the program with its arguments, which can be run.

        Raises:
            TypeError: the arguments are not those of the function.
        """
        function = self.function
        try:
            self._signature.bind(None, *arguments, **named)
        except TypeError as error:
            raise TypeError(f"{function.__name__}: {error}") from None
        return Call(lambda state: function(state, *arguments, **named))

    def run(
        self, *arguments: Any, on: Backend, priority: int = 0, deadline_s: float | None = None, **named: Any
    ) -> Result[T]:
        """Run the program with these arguments; otherwise like `Call.run`."""
        call: Callable[..., Call[T]] = self.__call__
        return call(*arguments, **named).run(on=on, priority=priority, deadline_s=deadline_s)


class Call(Generic[T]):
    """A program with its arguments. Invariant: immutable; each run has a state of its own.

    Args:
        function: gets the state.
    """

    __slots__ = ("_function",)

    def __init__(self, function: Callable[[State], T]) -> None:
        self._function = function

    def run(self, *, on: Backend, priority: int = 0, deadline_s: float | None = None) -> Result[T]:
        """Run the program in this thread, to its end. Ctrl-C cancels it.

        Args:
            on: computes its texts.
            priority: of all its requests; higher goes first.
            deadline_s: seconds from now after which its requests are ended, and it may make no new ones; None: no
                deadline.

        Raises:
            RuntimeError: an event loop is running in this thread; use `run_async`.
            ValueError: the deadline is not above 0.
            DeadlineExceededError: the program was not complete at its deadline.
            VariableError: a variable has no value, and the program did not handle that.
            Exception: what the program raises.
        """
        _check_no_loop()
        result = self.prepare(on=on, priority=priority, deadline_s=deadline_s)
        result.execute()
        result.wait()
        return result

    def start(self, *, on: Backend, priority: int = 0, deadline_s: float | None = None) -> Result[T]:
        """Run the program in a thread of its own, and return at once: its texts can be read in pieces.

        Raises:
            ValueError: the deadline is not above 0.
        """
        return self._start(self.prepare(on=on, priority=priority, deadline_s=deadline_s, is_streaming=True))

    async def run_async(self, *, on: Backend, priority: int = 0, deadline_s: float | None = None) -> Result[T]:
        """Run the program in a thread of its own; cancelling cancels it. Raises what `run` raises."""
        result = self._start(self.prepare(on=on, priority=priority, deadline_s=deadline_s))
        await result.wait_async()
        return result

    def prepare(
        self, *, on: Backend, priority: int = 0, deadline_s: float | None = None, is_streaming: bool = False
    ) -> Result[T]:
        """Return a run that has not begun; `Result.execute` runs it.

        Raises:
            TypeError: the priority is not an integer.
            ValueError: the deadline is not above 0.
        """
        if type(priority) is not int:
            raise TypeError(f"priority must be an int, got {priority!r}")
        if deadline_s is not None and not 0 < deadline_s <= threading.TIMEOUT_MAX:
            raise ValueError(f"deadline_s must be > 0 and at most {threading.TIMEOUT_MAX:.0f}, got {deadline_s}")
        return Result(self._function, backend=on, priority=priority, deadline_s=deadline_s, is_streaming=is_streaming)

    @staticmethod
    def _start(result: Result[T]) -> Result[T]:
        # A daemon, so that Python can end although the program waits for an answer.
        threading.Thread(target=result.execute, name="pagewood-program", daemon=True).start()
        return result


def run_many(
    calls: Iterable[Call[T]],
    *,
    on: Backend,
    priority: int = 0,
    deadline_s: float | None = None,
    max_running: int = 16,
) -> list[Result[T]]:
    """Run programs, at most `max_running` at the same time, and return their results in order. Ctrl-C cancels all.

    A program that fails does not end the others: its `error` says why, and reading it raises that.

    Raises:
        RuntimeError: an event loop is running in this thread; use `run_many_async`.
        ValueError: `max_running` is below 1, or the deadline is not above 0.
    """
    _check_no_loop()
    work = run_many_async(calls, on=on, priority=priority, deadline_s=deadline_s, max_running=max_running)
    return asyncio.run(work)


async def run_many_async(
    calls: Iterable[Call[T]],
    *,
    on: Backend,
    priority: int = 0,
    deadline_s: float | None = None,
    max_running: int = 16,
) -> list[Result[T]]:
    """Run programs like `run_many`, in a coroutine; cancelling cancels all."""
    if max_running < 1:
        raise ValueError(f"max_running must be >= 1, got {max_running}")
    given = list(calls)
    for index, call in enumerate(given):
        if not isinstance(call, Call):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"calls[{index}] must be a program with its arguments, got {call!r:.100}")
    results = [call.prepare(on=on, priority=priority, deadline_s=deadline_s) for call in given]
    pool = ThreadPoolExecutor(max_running, "pagewood-program")
    try:
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(pool, result.execute) for result in results))
    except BaseException:
        for result in results:
            result.cancel()
        raise
    finally:
        pool.shutdown(wait=False)
    return results


def _check_no_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError("a program that is run in an event loop would stop it: use run_async or run_many_async")
