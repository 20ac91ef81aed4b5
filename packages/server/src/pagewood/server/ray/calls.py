"""Calls of engines through a handle of Ray Serve."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec

from pagewood.engine.api import EngineConfig
from pagewood.server import __version__
from pagewood.server.replicas.roster import Seat


def kind_of(config: EngineConfig) -> str:
    """Return what two engines have in common if one can go on where the other one was: version and configuration."""
    return f"{__version__} {msgspec.json.encode(config).decode()}"


class ReplicaLeftError(Exception):
    """A replica gets no further calls, because Ray Serve ends it or because it has died."""


class ReplicaWatch:
    """Passes on to the event loop that runs now which replicas there are; `ChosenReplicaRouter` calls it in its thread.

    It travels as an argument of a call that never leaves its process.
    """

    __slots__ = ("_changed", "_loop", "_names")

    def __init__(self, changed: Callable[[Sequence[str]], None]) -> None:
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._names: list[str] | None = None  # written by: publish

    def publish(self, names: Sequence[str]) -> None:
        """Pass names on, if they are others than the last ones."""
        if [*names] != self._names and not self._loop.is_closed():
            self._names = [*names]
            self._loop.call_soon_threadsafe(self._changed, self._names)


class IsWatchedError(Exception):
    """How a call with a `ReplicaWatch` ends."""


class EngineCalls:
    """Satisfies `joining.Engines`. `ChosenReplicaRouter` reads the arguments `replica` and `watch`.

    Args:
        handle: of `ServedEngine`.
    """

    __slots__ = ("_handle", "_name")

    def __init__(self, handle: Any) -> None:
        self._handle, self._name = handle, uuid.uuid4().hex

    async def watch(self, changed: Callable[[Sequence[str]], None]) -> None:
        """Follow which replicas there are."""
        with contextlib.suppress(IsWatchedError):
            await self._handle.watch.remote(watch=ReplicaWatch(changed))

    async def link(self, replica: str, seat: Seat) -> AsyncGenerator[Sequence[bytes]]:
        """Link an engine."""
        said = self._handle.options(stream=True).link.remote(replica=replica, name=self._name, seat=seat)
        try:
            async for frames in said:
                yield frames
        finally:
            said.cancel()

    async def tell(self, replica: str, number: int, frame: bytes) -> None:
        """Give an engine a command."""
        await self._handle.tell.remote(replica=replica, name=self._name, number=number, frame=frame)

    async def note_waiting(self, replica: str, num: int) -> None:
        """Tell an engine how many requests wait."""
        await self._handle.note_waiting.remote(replica=replica, name=self._name, num=num)

    async def wake(self) -> None:
        """Wait for an engine."""
        await self._handle.wake.remote()
