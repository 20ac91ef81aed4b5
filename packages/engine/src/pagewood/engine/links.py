"""Inbox and Outbox of an engine that lives in the same thread as its user."""

from __future__ import annotations

from collections.abc import Sequence

from pagewood.engine.api import Command, Delta


class MemoryInbox:
    """Commands in a list; never waits, because whoever could add one is the caller."""

    __slots__ = ("_commands",)

    def __init__(self) -> None:
        self._commands: list[Command] = []  # written by: links

    def put(self, command: Command) -> None:
        """Add a command."""
        self._commands.append(command)

    def receive(self, *, timeout_s: float | None) -> Sequence[Command]:
        """Return what was put since the last call."""
        commands, self._commands = self._commands, []
        return commands


class MemoryOutbox:
    """Answers in a list."""

    __slots__ = ("_deltas",)

    def __init__(self) -> None:
        self._deltas: list[Delta] = []  # written by: links

    def send(self, deltas: Sequence[Delta]) -> None:
        """Add answers."""
        self._deltas += deltas

    def take(self) -> Sequence[Delta]:
        """Return what was sent since the last call."""
        deltas, self._deltas = self._deltas, []
        return deltas
