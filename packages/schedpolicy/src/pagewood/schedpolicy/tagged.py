"""Requests beside their like: by how many with the same tag run."""

from collections import Counter
from collections.abc import Iterator
from heapq import heapify, heappop
from typing import Generic, TypeVar

from pagewood.schedpolicy.requests import TagWaiting
from pagewood.schedpolicy.sorted_queue import SortedQueue

T = TypeVar("T", bound=TagWaiting)


class TagAffinity(Generic[T]):
    """Requests of the tag that most running requests have first; within a tag by priority, then by arrival.

    For adapters, sessions, or whatever is cheaper beside its like. A rare tag can starve: combine it with `Ageing`.
    Invariant: the counts are of the requests admitted from here that have not stopped.

    Source: `routing-key` of SGLang.
    """

    __slots__ = ("_num_running", "_queues", "_running", "_tag_of")

    def __init__(self) -> None:
        self._queues: dict[str, SortedQueue[T]] = {}  # by tag, none empty; written by: add, remove
        self._tag_of: dict[int, str] = {}  # of waiting requests, by arrival; written by: add, remove
        self._running: dict[int, str] = {}  # tags of running requests, by arrival; written by: admit, stop
        self._num_running = Counter[str]()  # by tag; written by: admit, stop

    def add(self, request: T) -> None:
        """Take a request in."""
        if request.arrival in self._tag_of:
            raise ValueError(f"arrival must be unique among waiting requests, got {request.arrival} again")
        tag = self._tag_of[request.arrival] = request.tag
        queue = self._queues.get(tag)
        if queue is None:
            queue = self._queues[tag] = SortedQueue[T]()
        queue.add(request, (-request.priority,))

    def remove(self, request: T) -> None:
        """Let a request go that will not run."""
        tag = self._tag_of.pop(request.arrival)
        self._queues[tag].discard(request)
        if not self._queues[tag]:
            del self._queues[tag]

    park = remove

    def admit(self, request: T) -> None:
        """Let a request go that runs, and count it."""
        tag = self._tag_of[request.arrival]
        self.remove(request)
        self._running[request.arrival] = tag
        self._num_running[tag] += 1

    def stop(self, request: T) -> None:
        """Count a running request no longer."""
        tag = self._running.pop(request.arrival, None)
        if tag is not None:
            self._num_running[tag] -= 1
            if not self._num_running[tag]:
                del self._num_running[tag]

    def update(self, request: T) -> None:
        """Put a request where its tag and priority say now."""
        self.remove(request)
        self.add(request)

    def ordered(self, now_s: float) -> Iterator[T]:
        """Yield the waiting requests, tag by tag; of tags with as many running, the one of the first request first."""
        heap: list[tuple[int, int, str]] = []
        for tag, queue in self._queues.items():
            first = queue.first()
            assert first is not None
            heap.append((-self._num_running[tag], first.arrival, tag))
        heapify(heap)
        while heap:
            yield from self._queues[heappop(heap)[2]]

    def __contains__(self, request: T) -> bool:
        """Return whether the request waits here."""
        return request.arrival in self._tag_of

    def __len__(self) -> int:
        """Return how many requests wait here."""
        return len(self._tag_of)
