"""Work that the engine's thread does alone while it is short, and shares with helper threads when it is long."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

_ALONE_S = 0.000_3
"""How long the caller works alone; to wake a thread takes a tenth of that."""


class SharedWork:
    """Runs jobs on the caller's thread and, if they take long, on helpers too. Use it from one thread.

    Helpers gain nothing while jobs hold the interpreter's lock, or a lock that they share.
    """

    __slots__ = ("_num_helpers", "_pool")

    def __init__(self, num_helpers: int) -> None:
        """Use at most `num_helpers` threads beside the caller's; they start when they are first needed."""
        self._num_helpers = num_helpers
        self._pool: ThreadPoolExecutor | None = None  # written by: shared_work

    def run(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Run all jobs, each once, in any order, and wait for them.

        Raises:
            Exception: the error of a job, raised when no job runs any more. Later jobs may not have run.
        """
        rest = deque(jobs)
        end_s = time.monotonic() + _ALONE_S
        while rest:
            rest.popleft()()
            if self._num_helpers and len(rest) > 1 and time.monotonic() > end_s:
                self._share(rest)

    def close(self) -> None:
        """End the threads; a second call does nothing."""
        if self._pool is not None:
            self._pool.shutdown()

    def _share(self, rest: deque[Callable[[], None]]) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_helpers, "engine-helper")
        helpers = [self._pool.submit(_work, rest) for _ in range(min(self._num_helpers, len(rest) - 1))]
        try:
            _work(rest)
        finally:
            late = [helper for helper in helpers if not helper.cancel()]
            errors = [helper.exception() for helper in late]
        for error in errors:
            if error is not None:
                raise error


def _work(rest: deque[Callable[[], None]]) -> None:
    """Run jobs until none is left; each is taken by one thread."""
    while True:
        try:
            job = rest.popleft()
        except IndexError:
            return
        job()
