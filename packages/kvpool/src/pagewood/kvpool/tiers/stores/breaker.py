"""Stops calling a store that fails again and again, so that it costs neither time nor log lines."""

import logging
import time
from collections.abc import Callable, Sequence
from threading import Lock

from pagewood.kvpool.tiers.pages.arrays import Bytes
from pagewood.kvpool.tiers.stores.store import PageStore

_log = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Consecutive failures before calls to the store pause."""
FIRST_PAUSE_S = 1.0
"""Seconds of the first pause; each further failure doubles them."""
MAX_PAUSE_S = 60.0


class _Circuit:
    """Decides whether calls of one kind are made. Invariant: a pause begins only after `MAX_FAILURES` failures in a
    row."""

    __slots__ = ("_clock", "_lock", "_name", "_num_failures", "_pause_s", "_retry_at_s")

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self._name = name
        self._clock = clock
        self._lock = Lock()
        self._num_failures = 0  # consecutive; written by: failed, worked
        self._pause_s = 0.0  # written by: failed, worked
        self._retry_at_s = 0.0  # written by: failed, worked

    @property
    def is_open(self) -> bool:
        """Whether calls are paused at present."""
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
        """Record a call that failed; log it, and begin a pause after too many in a row."""
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
    """A `PageStore` that pauses calls to another store after several failures in a row.

    Failures of reads and writes are counted separately: a full disk can still be read. During a pause, it has no pages,
    and `put` fails at once. After the pause one call is tried; a failure doubles the pause, up to a minute, and a
    success ends it. Each failed call is logged, which is at most one line per pause. Thread-safe.
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
            OSError: The store failed, or its calls are paused.
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
        """Fetch pages; none during a pause.

        Raises:
            OSError: The store failed.
        """
        return self._read(lambda: self._store.get(keys, pages), len(keys))

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which pages the store has; none during a pause.

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
