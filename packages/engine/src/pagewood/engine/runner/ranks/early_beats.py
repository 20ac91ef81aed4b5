"""The signs of life of a process that has not yet imported what its pulse needs."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

BEAT_S = 0.1
"""Time between two beats of a rank."""
_STANDSTILL_S = 120.0
"""A process that has no use of the processor for this long, although it should load, stands still."""
_USED_S = 0.01
"""A process that computes, or reads a file through the page cache, uses far more than this in `_STANDSTILL_S`."""


@contextmanager
def early_beats(descriptor: int, place: int) -> Generator[None]:
    """Count beats on a thread as long as the context lasts.

    Args:
        descriptor: of the memory that ranks share; it stays open.
        place: of the counter of this rank, in words of eight bytes.
    """
    stopping = threading.Event()

    def beat() -> None:
        with mmap.mmap(descriptor, 0) as memory, memoryview(memory) as whole, whole.cast("q") as words:
            while not stopping.wait(BEAT_S):
                words[place] += 1

    thread = threading.Thread(target=beat, name="beats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


class Standstill:
    """Whether a process that should load stands still: it has used no processor for long, and waits for no other rank.

    A process whose main thread waits for ever can still beat, which is why this is asked for.
    Used by the thread that beats, whose own time does not count.

    Args:
        used_s: processor time of the process but for the calling thread.
        clock: seconds.
    """

    __slots__ = ("_clock", "_since_s", "_used", "_used_s", "is_waiting")

    def __init__(
        self,
        used_s: Callable[[], float] = lambda: time.process_time() - time.thread_time(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._used_s = used_s
        self._clock = clock
        self._used = used_s()  # written by: is_found
        self._since_s = clock()  # written by: is_found
        self.is_waiting = False
        """Whether it waits for rank 0, however long that takes."""  # written by: rank_process

    def is_found(self) -> bool:
        """Return whether it stands still at present."""
        now_s, used = self._clock(), self._used_s()
        if self.is_waiting or used - self._used > _USED_S:
            self._used, self._since_s = used, now_s
        return now_s - self._since_s > _STANDSTILL_S
