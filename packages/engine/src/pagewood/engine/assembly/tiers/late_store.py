"""A store of pages that is opened after the engine has started."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from threading import Lock, Thread

from pagewood.kvpool.tiers import PageStore
from pagewood.kvpool.tiers.pages.arrays import Bytes

_log = logging.getLogger(__name__)


class LateStore:
    """A `PageStore` that holds nothing until it is open.

    Invariant: pages are read and written only after `make` has returned a store. If it fails, or returns no store, this
    is logged, and the store stays empty.
    """

    __slots__ = ("_is_closed", "_lock", "_store", "_thread")

    def __init__(self, make: Callable[[], PageStore | None], *, name: str) -> None:
        """Begin to open it.

        Args:
            make: opens the store; called in a thread of its own.
            name: of the store, for the log.
        """
        self._lock = Lock()
        self._is_closed = False  # written by: close
        self._store: PageStore | None = None  # written by: _open
        self._thread = Thread(target=self._open, args=(make, name), name="late-store", daemon=True)
        self._thread.start()

    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> None:
        """Store pages if it is open."""
        if self._store is not None:
            self._store.put(keys, pages)

    def get(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bool]:
        """Fetch pages."""
        return [False] * len(keys) if self._store is None else self._store.get(keys, pages)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each page whether it is held."""
        return [False] * len(keys) if self._store is None else self._store.exists(keys)

    def close(self) -> None:
        """Close it, now or as soon as it is open."""
        with self._lock:
            self._is_closed = True
            if self._store is not None:
                self._store.close()

    def _open(self, make: Callable[[], PageStore | None], name: str) -> None:
        try:
            store = make()
        except (ValueError, OSError) as error:
            _log.error("%s is not used: %s", name, error)
            return
        with self._lock:
            if self._is_closed and store is not None:
                store.close()
            else:
                self._store = store
