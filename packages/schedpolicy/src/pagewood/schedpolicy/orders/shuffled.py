"""Random order, drawn again after each admission."""

from collections.abc import Iterator
from random import Random
from typing import Generic

from pagewood.schedpolicy.orders.order import W, absent, changed_during_pass
from pagewood.schedpolicy.orders.sorted_queue import SortedQueue


class Draws:
    """The random numbers of the passes. Invariant: they depend only on the seed and on the number of admissions.

    Several orders can share one, as in `MultilevelOrder`: an admission from one of them gives all of them other
    numbers.
    """

    __slots__ = ("_num_admitted", "_seed")

    def __init__(self, seed: int) -> None:
        """Start with no admission."""
        self._seed = seed
        self._num_admitted = 0  # written by: admit

    def admit(self) -> None:
        """Count an admission: the next pass gets other numbers."""
        self._num_admitted += 1

    def of_pass(self) -> Random:
        """Return the generator of a pass; all passes between two admissions get the same numbers."""
        return Random(f"{self._seed} {self._num_admitted}")


class ShuffledOrder(Generic[W]):
    """Yields the requests in a random order, a new one after each admission: no request is preferred, and none starves.

    If k of at most n requests are admitted from a pass, each waiting request is among them with a probability of at
    least k / n, independently of earlier admissions. Invariant: an order depends only on the draws and on which
    requests wait. How often it was asked for, and in which order requests came and left, does not matter. So two
    schedulers that make the same admissions agree on the next one, even if one of them looks at the queue more often.
    """

    __slots__ = ("_by_arrival", "_draws", "_num_changes")

    def __init__(self, draws: Draws) -> None:
        """Start empty."""
        self._draws = draws
        self._num_changes = 0  # written by: add, remove
        self._by_arrival = SortedQueue[W]()

    def add(self, request: W) -> None:
        """Add a request."""
        self._by_arrival.add(request, ())
        self._num_changes += 1

    def remove(self, request: W) -> None:
        """Remove a request."""
        self._by_arrival.discard(request)
        self._num_changes += 1

    park = remove

    def admit(self, request: W) -> None:
        """Remove a request that starts to run; the next pass has a new order."""
        self.remove(request)
        self._draws.admit()

    def stop(self, request: W) -> None:
        """Do nothing: running requests do not affect this order."""

    def update(self, request: W) -> None:
        """Do nothing: the attributes of a request do not affect this order."""
        if request not in self._by_arrival:
            raise absent(request)

    def ordered(self, now_s: float) -> Iterator[W]:
        """Yield the waiting requests, shuffling only as many as are taken.

        Source: the shuffle of Fisher and Yates, of the requests by arrival.
        """
        requests, num_changes, rng = self._by_arrival, self._num_changes, self._draws.of_pass()
        moved: dict[int, int] = {}  # place -> place by arrival of the request that was moved there
        for place in range(len(requests)):
            other = rng.randrange(place, len(requests))
            taken = moved.get(other, other)
            moved[other] = moved.pop(place, place)
            yield requests[taken]
            if self._num_changes != num_changes:
                raise changed_during_pass()

    def __contains__(self, request: W) -> bool:
        """Return whether a request is waiting here."""
        return request in self._by_arrival

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._by_arrival)
