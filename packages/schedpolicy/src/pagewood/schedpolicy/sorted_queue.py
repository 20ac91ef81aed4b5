"""Requests sorted by a key that changes only by an explicit call."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Any, Generic

from pagewood.schedpolicy.order import W

Key = tuple[Any, ...]
"""Sort key, smallest first; all keys of one queue must be comparable with each other."""


class SortedQueue(Generic[W]):
    """Requests by (key, arrival). Invariant: the list is sorted, and has each request once, with its latest key.

    It is one sorted list. An insertion is a binary search and a move in memory: 80 kB at 10,000 requests, about 2 us.
    No tree or heap is faster at this size, and iterating over a list changes nothing.
    """

    __slots__ = ("_entries", "_keys")

    def __init__(self) -> None:
        self._entries: list[Key] = []  # (*key, arrival, request); written by: add, discard
        self._keys: dict[int, Key] = {}  # (*key, arrival), by arrival; written by: add, discard

    def add(self, request: W, key: Key) -> None:
        """Add a request under a key.

        Raises:
            ValueError: A request with the same `arrival` is already here.
        """
        arrival = request.arrival
        if arrival in self._keys:
            raise ValueError(f"arrival must be unique among waiting requests, got {arrival} again")
        key = (*key, arrival)
        self._keys[arrival] = key
        insort(self._entries, (*key, request))

    def discard(self, request: W) -> None:
        """Remove a request.

        Raises:
            KeyError: The request is not here.
        """
        place = bisect_left(self._entries, self._keys.pop(request.arrival))
        del self._entries[place]

    def move(self, request: W, key: Key) -> None:
        """Change the key of a request.

        Raises:
            KeyError: The request is not here.
        """
        if self._keys[request.arrival] != (*key, request.arrival):
            self.discard(request)
            self.add(request, key)

    def first(self) -> W | None:
        """Return the request with the smallest key, or None if the queue is empty."""
        return self._entries[0][-1] if self._entries else None

    def __iter__(self) -> Iterator[W]:
        """Yield the requests, smallest key first."""
        for entry in self._entries:
            yield entry[-1]

    def __contains__(self, request: W) -> bool:
        """Return whether a request is here."""
        return request.arrival in self._keys

    def __len__(self) -> int:
        """Return the number of requests here."""
        return len(self._entries)
