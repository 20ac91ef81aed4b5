"""Where commands come from, and where answers go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from pagewood.engine.api.answers import Delta
from pagewood.engine.api.commands import Command

Progress = Callable[[str, int, int], None]
"""Gets reports of a long start: what is being done, the parts that are done, and the parts in total."""


class Inbox(Protocol):
    """The source of an engine's commands."""

    def receive(self, *, timeout_s: float | None) -> Sequence[Command]:
        """Return the commands that have arrived, in order; wait up to `timeout_s` (0: do not wait, None: no limit)."""
        ...


class Outbox(Protocol):
    """The destination of an engine's answers."""

    def send(self, deltas: Sequence[Delta]) -> None:
        """Pass on the answers of one step, in order; must not block for long."""
        ...
