"""Whether other work takes the cores that this process computes on, as Linux counts it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

_WINDOW_S = 0.1
_TAKEN = 0.25
_FREE = 0.1
_NUM_BYTES = 64


class TakenCores:
    """Compares the time for which threads of this process have run with the time for which they waited for a core.

    Threads that compute a step meet after every part of it, so one that waits for a core holds up all. A step with
    drafts has several times as many parts, so it loses several times as much. The threads are those that exist at the
    first call, which covers the time since they began.

    Invariant: where the system does not count these times, cores count as free.
    """

    __slots__ = ("_clock", "_folder", "_is_taken", "_next_s", "_run_ns", "_threads", "_wait_ns")

    def __init__(self, folder: Path = Path("/proc/self/task"), *, clock: Callable[[], float] = perf_counter) -> None:
        """Start without a look at the threads.

        Args:
            folder: Has a folder for each thread. Its file `schedstat` begins with the nanoseconds for which the thread
                has run, and for which it was ready and waited for a core.
            clock: Returns seconds.
        """
        self._folder, self._clock = folder, clock
        self._threads: list[str] | None = None  # written by: __call__
        self._next_s = self._run_ns = self._wait_ns = 0.0  # written by: __call__
        self._is_taken = False  # written by: __call__

    def __call__(self) -> bool:
        """Return whether threads waited for a quarter of the time that they could have run.

        It looks ten times a second. Once cores are taken, they are until threads wait for less than a tenth.
        """
        now_s = self._clock()
        if now_s < self._next_s:
            return self._is_taken
        self._next_s = now_s + _WINDOW_S
        if self._threads is None:
            self._threads = [str(path) for path in self._folder.glob("*/schedstat")]
        run_ns, wait_ns = (sum(times) for times in zip((0, 0), *map(_run_and_wait_ns, self._threads), strict=True))
        ran_ns, waited_ns = run_ns - self._run_ns, wait_ns - self._wait_ns
        self._run_ns, self._wait_ns = run_ns, wait_ns
        if ran_ns > 0 and waited_ns >= 0:  # a thread that has ended takes its times with it
            self._is_taken = waited_ns > (_FREE if self._is_taken else _TAKEN) * (ran_ns + waited_ns)
        return self._is_taken


def _run_and_wait_ns(path: str) -> tuple[int, int]:
    """Return the times of a thread; zeros if it has ended."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0, 0
    try:
        run, wait = os.read(file, _NUM_BYTES).split()[:2]
    except (OSError, ValueError):
        return 0, 0
    finally:
        os.close(file)
    return int(run), int(wait)
