"""Snapshots of the engine for viewers of the dashboard, made in the engine's thread between two steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pagewood.server.messages import wire
from pagewood.server.messages.links import Sender

if TYPE_CHECKING:
    from pagewood.engine.core.loop import Engine

INTERVAL_S = 0.25
"""Seconds between two snapshots."""
TREE_INTERVAL_S = 1.0
"""Seconds between two snapshots with the prefix cache."""
SHARE = 0.004
"""Largest share of its time that the engine spends on snapshots; it may spend as much on those with the cache."""


class Snapshots:
    """Sends snapshots while a `Watch` lasts. Invariant: nothing is recorded, computed or sent otherwise.

    A snapshot that took long is followed by a longer break, so that a large engine is not slowed down.

    Args:
        engine: is used in its own thread only.
        outbox: may be used by several threads.
        incarnation: of this engine process.
        replica: number of this engine among those of the server.
        clock: seconds.
    """

    __slots__ = (
        "_clock", "_engine", "_incarnation", "_next_s", "_next_tree_s", "_outbox", "_replica", "_shows_tokens",
        "_until_s", "_wanted",
    )  # fmt: skip

    def __init__(
        self,
        engine: Engine,
        outbox: Sender,
        *,
        incarnation: int = 0,
        replica: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._outbox = outbox
        self._incarnation = incarnation
        self._replica = replica
        self._clock = clock
        self._until_s: float | None = None
        """When the last `Watch` ends; None while the engine is not watched."""  # written by: watch, turn
        self._shows_tokens = False  # written by: watch
        self._wanted: tuple[str, ...] = ()  # written by: watch
        self._next_s = 0.0  # written by: turn
        self._next_tree_s = 0.0  # written by: watch, turn

    @property
    def is_watched(self) -> bool:
        """Whether `turn` must be called."""
        return self._until_s is not None

    def watch(self, message: wire.Watch) -> None:
        """Begin to send snapshots, or go on for longer."""
        if self._until_s is None:
            self._next_tree_s = 0.0  # the first snapshot shows the whole state
            self._engine.watch(is_on=True)
        self._until_s = self._clock() + message.for_s
        self._shows_tokens, self._wanted = message.shows_tokens, message.wanted

    def turn(self) -> None:
        """Send a snapshot if it is time for one; the engine calls this between two steps, and while it waits."""
        began_s = self._clock()
        if self._until_s is None or began_s < self._next_s:
            return
        if began_s >= self._until_s:
            self._until_s = None
            self._engine.watch(is_on=False)
            return
        shows_tree = began_s >= self._next_tree_s
        view = self._engine.view(wanted=self._wanted, shows_tree=shows_tree, shows_tokens=self._shows_tokens)
        self._outbox.send(wire.encode(wire.Snapshot(incarnation=self._incarnation, replica=self._replica, view=view)))
        ended_s = self._clock()
        took_s = ended_s - began_s
        if shows_tree:
            self._next_tree_s = began_s + max(TREE_INTERVAL_S, took_s / SHARE)
            self._next_s = began_s + INTERVAL_S
        else:
            self._next_s = began_s + max(INTERVAL_S, took_s / SHARE)
