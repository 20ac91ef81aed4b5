"""Inboxes and outboxes for an engine in the same process: in the caller's thread, or in a thread of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TypeVar

from pagewood.engine.api import Command, Delta

T = TypeVar("T")


class MemoryInbox:
    """Commands for an engine that its caller steps. Never waits: the caller is the only source of commands.

    Invariant: every command is received once, in order, even if `put` runs in another thread or in a finalizer.
    """

    __slots__ = ("_commands",)

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()  # written by: links

    def put(self, command: Command) -> None:
        """Add a command."""
        self._commands.append(command)

    def receive(self, *, timeout_s: float | None) -> Sequence[Command]:
        """Return the commands that were put since the last call."""
        return _drain(self._commands)


class MemoryOutbox:
    """Answers of an engine that its caller steps."""

    __slots__ = ("_deltas",)

    def __init__(self) -> None:
        self._deltas: list[Delta] = []  # written by: links

    def send(self, deltas: Sequence[Delta]) -> None:
        """Add answers."""
        self._deltas += deltas

    def take(self) -> Sequence[Delta]:
        """Return the answers that were sent since the last call."""
        deltas, self._deltas = self._deltas, []
        return deltas


class ThreadInbox:
    """Commands for an engine in another thread; a command wakes the engine if it is waiting.

    Invariant: every command is received once, in order. `put` and `wake` may be called from any thread, and from a
    finalizer.
    """

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue: SimpleQueue[Command | None] = SimpleQueue()

    def put(self, command: Command) -> None:
        """Add a command."""
        self._queue.put(command)

    def wake(self) -> None:
        """End the wait of the engine, so that it checks whether to stop."""
        self._queue.put(None)

    def receive(self, *, timeout_s: float | None) -> Sequence[Command]:
        """Return the commands that have arrived; if there are none, wait up to `timeout_s` (None: without limit)."""
        commands: list[Command] = []
        wait = timeout_s != 0
        while True:
            try:
                command = self._queue.get(wait, timeout_s)
            except Empty:
                return commands
            wait = False
            if command is not None:
                commands.append(command)


class ThreadOutbox:
    """Answers of an engine in another thread, passed to the thread of an event loop.

    The event loop is called once for everything that was sent since it last ran, not once for each Delta or step.

    Args:
        call_soon: runs a function in the event loop's thread, like `loop.call_soon_threadsafe`.
        deliver: gets the Deltas, in order, in the event loop's thread.
    """

    __slots__ = ("_call_soon", "_deliver", "_deltas", "_is_scheduled")

    def __init__(
        self, call_soon: Callable[[Callable[[], None]], object], deliver: Callable[[Sequence[Delta]], None]
    ) -> None:
        self._call_soon = call_soon
        self._deliver = deliver
        self._deltas: deque[Delta] = deque()  # written by: links
        self._is_scheduled = False  # written by: send, _flush

    def send(self, deltas: Sequence[Delta]) -> None:
        """Pass on the answers of one step; called in the engine's thread."""
        self._deltas.extend(deltas)
        # `_flush` clears the flag before it drains: if the flag is still set here, `_flush` will see these Deltas.
        if not self._is_scheduled:
            self._is_scheduled = True
            self._call_soon(self._flush)

    def _flush(self) -> None:
        self._is_scheduled = False
        self._deliver(_drain(self._deltas))


def _drain(items: deque[T]) -> list[T]:
    """Remove and return all items; others may append meanwhile."""
    drained: list[T] = []
    while items:
        drained.append(items.popleft())
    return drained
