"""Reports of a replica's prefix cache to the router in the HTTP process, over the links that exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import msgspec

from pagewood.server.messages import wire
from pagewood.server.messages.links import Sender


class Changes(Protocol):
    """Reads the changes of a cache, as `pagewood.engine.observe.cache_events.CacheEvents` does."""

    def read(self) -> list[object]:
        """Return the events since the last read, as maps; the first time those of the whole cache."""
        ...

    def begin_anew(self) -> None:
        """Let the next read return those of the whole cache."""
        ...


class CacheReports:
    """Sends the changes of a cache between two steps of the engine.

    Invariant: the messages are numbered without gaps. A message with `is_whole` and those after it tell all that the
    cache holds.

    Args:
        follow: begins to follow the cache.
        outbox: may be used by several threads.
        replica: number of this engine.
        incarnation: of this engine process.
    """

    __slots__ = ("_changes", "_follow", "_incarnation", "_is_whole", "_number", "_outbox", "_replica")

    def __init__(self, follow: Callable[[], Changes], outbox: Sender, *, replica: int, incarnation: int) -> None:
        self._follow = follow
        self._outbox = outbox
        self._replica = replica
        self._incarnation = incarnation
        self._number = 0  # written by: turn
        self._changes: Changes | None = None  # written by: begin_anew
        """None: nothing has asked for reports yet."""
        self._is_whole = False  # written by: begin_anew, turn

    def begin_anew(self) -> None:
        """Send the whole cache at the next turn."""
        if self._changes is None:
            self._changes = self._follow()
        self._changes.begin_anew()
        self._is_whole = True

    def turn(self) -> None:
        """Send the latest changes; the engine's thread calls this between two steps and before it waits."""
        if self._changes is None:
            return
        events = self._changes.read()
        if not events and not self._is_whole:
            return
        for event in events:  # tokens are most of their bytes, and a router needs none
            cast("dict[str, Any]", event).pop("token_ids", None)
        self._outbox.send(
            wire.encode(
                wire.CacheChanges(
                    replica=self._replica,
                    incarnation=self._incarnation,
                    number=self._number,
                    events=msgspec.msgpack.encode(events),
                    is_whole=self._is_whole,
                )
            )
        )
        self._number += 1
        self._is_whole = False
