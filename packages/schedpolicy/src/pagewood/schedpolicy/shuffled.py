"""Random order."""

from collections.abc import Iterator
from random import Random
from typing import Generic

from pagewood.schedpolicy.order import W


class ShuffledOrder(Generic[W]):
    """Every pass in another random order: nobody is preferred, and nobody starves.

    Where a pass takes k of at most n requests, one that waits is among them with a chance of at least k / n, whatever
    happened before. Invariant: with the same calls and the same generator, the orders are the same.
    """

    __slots__ = ("_places", "_requests", "_rng")

    def __init__(self, rng: Random) -> None:
        """Start empty; `rng` is drawn from once per request yielded."""
        self._rng = rng
        self._requests: list[W] = []  # written by: add, remove, ordered
        self._places: dict[int, int] = {}  # in it, by arrival; written by: add, remove, ordered

    def add(self, request: W) -> None:
        """Take a request in."""
        if request.arrival in self._places:
            raise ValueError(f"arrival must be unique among waiting requests, got {request.arrival} again")
        self._places[request.arrival] = len(self._requests)
        self._requests.append(request)

    def remove(self, request: W) -> None:
        """Let a request go; the last one takes its place."""
        place = self._places.pop(request.arrival)
        last = self._requests.pop()
        if place < len(self._requests):
            self._requests[place] = last
            self._places[last.arrival] = place

    admit = remove
    park = remove

    def stop(self, request: W) -> None:
        """Do nothing: who runs does not matter here."""

    def update(self, request: W) -> None:
        """Do nothing: what a request is like does not matter here."""
        if request.arrival not in self._places:
            raise KeyError(request.arrival)

    def ordered(self, now_s: float) -> Iterator[W]:
        """Yield the waiting requests, shuffling them no further than they are taken.

        Source: the shuffle of Fisher and Yates.
        """
        requests = self._requests
        for place in range(len(requests)):
            other = self._rng.randrange(place, len(requests))
            requests[place], requests[other] = requests[other], requests[place]
            self._places[requests[place].arrival] = place
            self._places[requests[other].arrival] = other
            yield requests[place]

    def __contains__(self, request: W) -> bool:
        """Return whether the request waits here."""
        return request.arrival in self._places

    def __len__(self) -> int:
        """Return how many requests wait here."""
        return len(self._requests)
