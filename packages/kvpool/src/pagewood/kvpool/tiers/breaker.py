"""Stops calling a store that fails again and again, so that it costs neither time nor log lines."""

import logging
import time
from collections.abc import Callable, Sequence
from threading import Lock

from pagewood.kvpool.tiers.arrays import Bytes
from pagewood.kvpool.tiers.store import PageStore

_log = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Calls that may fail in a row before the store is left alone."""
FIRST_PAUSE_S = 1.0
"""Seconds for which it is left alone then; each further failure doubles them."""
MAX_PAUSE_S = 60.0


class _Circuit:
    """Whether calls of one kind are made. Invariant: a pause begins only after `MAX_FAILURES` failures in a row."""

    __slots__ = ("_clock", "_lock", "_name", "_num_failures", "_pause_s", "_retry_at_s")

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self._name = name
        self._clock = clock
        self._lock = Lock()
        self._num_failures = 0  # in a row; written by: failed, worked
        self._pause_s = 0.0  # written by: failed, worked
        self._retry_at_s = 0.0  # written by: failed, worked

    @property
    def is_open(self) -> bool:
        """Whether calls are not made at present."""
        return bool(self._pause_s) and self._clock() < self._retry_at_s

    def worked(self) -> None:
        """Record a call that succeeded."""
        if not self._num_failures:
            return
        with self._lock:
            if self._pause_s:
                _log.warning("%s works again, after %d failures", self._name, self._num_failures)
            self._num_failures, self._pause_s, self._retry_at_s = 0, 0.0, 0.0

    def failed(self, error: OSError) -> None:
        """Record a call that failed; log it, and begin a pause if it is one of several."""
        with self._lock:
            self._num_failures += 1
            if self._num_failures < MAX_FAILURES:
                _log.warning("%s failed: %s", self._name, error)
                return
            self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s or FIRST_PAUSE_S)
            self._retry_at_s = self._clock() + self._pause_s
            _log.error(
                "%s has failed %d times, and is not called for %g s: %s",
                self._name,
                self._num_failures,
                self._pause_s,
                error,
            )


class Breaker:
    """A `PageStore` that leaves another one alone for a while after it has failed several times in a row.

    Reads and writes are counted apart: a disk that is full can still be read. While it is left alone, it has no pages,
    and `put` fails at once. After the pause one call is tried; a failure doubles the pause, up to a minute, and a
    success ends it. Each failed call is logged, so at most one line per pause. Thread-safe.
    """

    __slots__ = ("_reads", "_store", "_writes")

    def __init__(self, store: PageStore, *, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Wrap a store.

        Args:
            store: The store.
            name: How log lines name it.
            clock: Monotonic clock, in seconds.
        """
        self._store = store
        self._reads = _Circuit(f"reading from {name}", clock)
        self._writes = _Circuit(f"writing to {name}", clock)

    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> None:
        """Store pages.

        Raises:
            OSError: The store failed, or is left alone at present.
        """
        if self._writes.is_open:
            raise OSError("the store has failed, and is left alone for a while")
        try:
            self._store.put(keys, pages)
        except OSError as error:
            self._writes.failed(error)
            raise
        self._writes.worked()

    def get(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bool]:
        """Fetch pages; none while the store is left alone.

        Raises:
            OSError: The store failed.
        """
        return self._read(lambda: self._store.get(keys, pages), len(keys))

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which pages the store has; none while it is left alone.

        Raises:
            OSError: The store failed.
        """
        return self._read(lambda: self._store.exists(keys), len(keys))

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def _read(self, call: Callable[[], list[bool]], num_pages: int) -> list[bool]:
        if self._reads.is_open:
            return [False] * num_pages
        try:
            answer = call()
        except OSError as error:
            self._reads.failed(error)
            raise
        self._reads.worked()
        return answer
