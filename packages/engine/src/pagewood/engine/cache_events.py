"""The changes of an engine's prefix cache, as batches of events for routers."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from pagewood.radixcache.events import AllBlocksCleared, Event, EventLog, Position, Snapshot, router_events
from pagewood.radixcache.events.log import ObservableCache
from pagewood.radixcache.events.router import Form, Medium


class CacheEvents:
    """Reads what has changed in a prefix cache since the last read; used in the engine's thread.

    Invariant: a reader that applies all batches in order knows what was cached at the last read. A batch that starts
    anew begins with `AllBlocksCleared`.

    Args:
        cache: returns the prefix cache of this moment; an engine may replace it.
        form: of the events, see `router_events`.
        medium: of the events.

    Raises:
        ValueError: the cache does not report its changes.
    """

    __slots__ = ("_cache", "_followed", "_form", "_log", "_medium", "_position")

    def __init__(self, cache: Callable[[], object], *, form: Form = "map", medium: Medium = "GPU") -> None:
        self._cache = cache
        self._form: Form = form
        self._medium: Medium = medium
        self._follow(cache())

    def read(self) -> list[object]:
        """Return the events since the last read, plain; the first time those of everything that is cached."""
        cache = self._cache()
        if cache is not self._followed:
            self._follow(cache)
        position = self._position
        if position is not None and position == self._log.position:
            return []
        update = self._log.read(position)
        self._position = update.end
        events: list[Event] = [*update.events]
        if isinstance(update, Snapshot):
            events.insert(0, AllBlocksCleared())
        return router_events(events, form=self._form, medium=self._medium)

    def _follow(self, cache: object) -> None:
        if not hasattr(cache, "observe"):
            raise ValueError(f"cache must report its changes to be followed, got {type(cache).__name__}")
        self._followed = cache  # written by: _follow
        self._log = EventLog(cast("ObservableCache", cache))  # written by: _follow
        self._position: Position | None = None  # written by: _follow, read
