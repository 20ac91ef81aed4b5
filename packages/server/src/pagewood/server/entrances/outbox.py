"""Sends the messages of one turn of the event loop as one frame."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """Messages that wait for the end of a turn. Invariant: they are sent in their order.

    Args:
        send: sends messages, at least one.
    """

    __slots__ = ("_send", "_waiting")

    def __init__(self, send: Callable[[Sequence[T]], None]) -> None:
        self._send = send
        self._waiting: list[T] = []  # written by: put, clear, _flush

    def put(self, message: T) -> None:
        """Send a message, with those that come in the same turn."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(message)

    def clear(self) -> None:
        """Drop what waits."""
        self._waiting = []

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._send(waiting)
