"""A link in memory, for stages that are threads of one process."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence


class MemoryLink:
    """Both ends of a link within one process, for any number of threads."""

    __slots__ = ("_frames", "_stopping")

    def __init__(self, *, stopping: Callable[[], bool]) -> None:
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._stopping = stopping

    def send(self, frame: bytes) -> None:
        """Queue a frame."""
        self._frames.put(frame)

    @property
    def num_queued(self) -> int:
        """Frames that were sent and are not received yet."""
        return self._frames.qsize()

    def wake(self) -> None:
        """End a wait, so that the receiver checks `stopping`."""
        self._frames.put(None)

    def receive(self, *, timeout_s: float | None) -> Sequence[bytes]:
        """Return all frames that have arrived."""
        frames: list[bytes] = []
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not frames and not self._stopping():
            wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                frame = self._frames.get(block=wait_s != 0, timeout=wait_s or None)
            except queue.Empty:
                break
            if frame is not None:
                frames.append(frame)
            while not self._frames.empty():
                frame = self._frames.get()
                if frame is not None:
                    frames.append(frame)
        return frames
