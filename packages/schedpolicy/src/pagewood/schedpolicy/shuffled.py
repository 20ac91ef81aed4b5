"""Random order, drawn again in each pass."""

from collections.abc import Iterator
from random import Random
from typing import Generic

from pagewood.schedpolicy.order import W, absent, changed_during_pass


class ShuffledOrder(Generic[W]):
    """Yields every pass in a new random order: no request is preferred, and none starves.

    If a pass takes k of at most n requests, each waiting request is among them with a probability of at least k / n,
    independently of earlier passes. Invariant: the same calls and the same generator give the same orders.
    """

    __slots__ = ("_num_changes", "_places", "_requests", "_rng")

    def __init__(self, rng: Random) -> None:
        """Start empty; each request yielded draws one number from `rng`."""
        self._rng = rng
        self._num_changes = 0  # written by: add, remove
        self._requests: list[W] = []  # written by: add, remove, ordered
        self._places: dict[int, int] = {}  # in it, by arrival; written by: add, remove, ordered

    def add(self, request: W) -> None:
        """Add a request."""
        if request.arrival in self._places:
            raise ValueError(f"arrival must be unique among waiting requests, got {request.arrival} again")
        self._num_changes += 1
        self._places[request.arrival] = len(self._requests)
        self._requests.append(request)

    def remove(self, request: W) -> None:
        """Remove a request; the last one takes its place."""
        place = self._places.pop(request.arrival, None)
        if place is None:
            raise absent(request)
        self._num_changes += 1
        last = self._requests.pop()
        if place < len(self._requests):
            self._requests[place] = last
            self._places[last.arrival] = place

    admit = remove
    park = remove

    def stop(self, request: W) -> None:
        """Do nothing: running requests do not affect this order."""

    def update(self, request: W) -> None:
        """Do nothing: the attributes of a request do not affect this order."""
        if request.arrival not in self._places:
            raise absent(request)

    def ordered(self, now_s: float) -> Iterator[W]:
        """Yield the waiting requests, shuffling only as many as are taken.

        Source: the shuffle of Fisher and Yates.
        """
        requests, num_changes = self._requests, self._num_changes
        for place in range(len(requests)):
            other = self._rng.randrange(place, len(requests))
            requests[place], requests[other] = requests[other], requests[place]
            self._places[requests[place].arrival] = place
            self._places[requests[other].arrival] = other
            yield requests[place]
            if self._num_changes != num_changes:
                raise changed_during_pass()

    def __contains__(self, request: W) -> bool:
        """Return whether a request is waiting here."""
        return request.arrival in self._places

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._requests)
