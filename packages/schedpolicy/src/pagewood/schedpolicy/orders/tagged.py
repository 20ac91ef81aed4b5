"""Orders tags by the number of their running requests."""

from collections import Counter
from collections.abc import Iterator
from heapq import heapify, heappop
from typing import Generic, TypeVar

from pagewood.schedpolicy.orders.order import absent, changed_during_pass
from pagewood.schedpolicy.orders.sorted_queue import SortedQueue
from pagewood.schedpolicy.requests import TagWaiting

T = TypeVar("T", bound=TagWaiting)


class TagAffinity(Generic[T]):
    """Serves the tag with the most running requests first; within a tag by priority, then by arrival.

    It is for requests that are cheaper together, such as those of one adapter or session. A rare tag can starve:
    combine it with `Ageing`. Invariant: the counts are of requests that were admitted from here and have not stopped.

    Source: `routing-key` of SGLang.
    """

    __slots__ = ("_num_changes", "_num_running", "_queues", "_running", "_tag_of")

    def __init__(self) -> None:
        self._num_changes = 0  # written by: _enter, _leave, update
        self._queues: dict[str, SortedQueue[T]] = {}  # by tag, none empty; written by: _enter, _leave
        self._tag_of: dict[int, str] = {}  # of waiting requests, by arrival; written by: _enter, _leave, remove
        self._running: dict[int, str] = {}  # tags of running requests, by arrival; written by: admit, stop
        self._num_running = Counter[str]()  # by tag; written by: admit, stop

    def add(self, request: T) -> None:
        """Add a request."""
        if request.arrival in self._tag_of:
            raise ValueError(f"arrival must be unique among waiting requests, got {request.arrival} again")
        self._enter(request)

    def remove(self, request: T) -> None:
        """Remove a waiting request that will not run."""
        tag = self._tag_of.pop(request.arrival, None)
        if tag is None:
            raise absent(request)
        self._leave(request, tag)

    park = remove

    def admit(self, request: T) -> None:
        """Remove a waiting request that starts to run, and count it."""
        tag = self._tag_of.get(request.arrival)
        if tag is None:
            raise absent(request)
        self.remove(request)
        self._running[request.arrival] = tag
        self._num_running[tag] += 1

    def stop(self, request: T) -> None:
        """Stop counting a running request."""
        tag = self._running.pop(request.arrival, None)
        if tag is not None:
            self._num_running[tag] -= 1
            if not self._num_running[tag]:
                del self._num_running[tag]

    def update(self, request: T) -> None:
        """Sort a request again by its present tag and priority."""
        before = self._tag_of.get(request.arrival)
        if before is None:
            raise absent(request)
        if request.tag == before:
            self._queues[before].move(request, (-request.priority,))
            self._num_changes += 1
        else:
            self._enter(request)
            self._leave(request, before)

    def ordered(self, now_s: float) -> Iterator[T]:
        """Yield the waiting requests, tag by tag; ties go to the tag whose first request arrived earliest."""
        num_changes = self._num_changes
        heap: list[tuple[int, int, str]] = []
        for tag, queue in self._queues.items():
            first = queue.first()
            assert first is not None
            heap.append((-self._num_running[tag], first.arrival, tag))
        heapify(heap)
        while heap:
            for request in self._queues[heappop(heap)[2]]:
                yield request
                if self._num_changes != num_changes:
                    raise changed_during_pass()

    def __contains__(self, request: T) -> bool:
        """Return whether a request is waiting here."""
        return request.arrival in self._tag_of

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._tag_of)

    def _enter(self, request: T) -> None:
        """Put a request into the queue of its present tag."""
        tag = request.tag
        queue = self._queues.get(tag)
        if queue is None:
            queue = SortedQueue[T]()
        queue.add(request, (-request.priority,))
        self._queues[tag] = queue
        self._tag_of[request.arrival] = tag
        self._num_changes += 1

    def _leave(self, request: T, tag: str) -> None:
        """Remove a request from the queue of a tag."""
        self._num_changes += 1
        self._queues[tag].discard(request)
        if not self._queues[tag]:
            del self._queues[tag]
