"""Any order, with a bound on how often a request can be overtaken."""

from collections.abc import Iterator
from math import inf
from typing import Generic

from pagewood.schedpolicy.counts import require_count, require_real
from pagewood.schedpolicy.orders.order import Order, W
from pagewood.schedpolicy.orders.sorted_queue import SortedQueue


class Ageing(Generic[W]):
    """Gives one of every `every` admissions to the oldest request that has waited `after_s`; the rest follow any order.

    Bound: let m be the number of waiting requests that arrived before A, at the time when A has waited `after_s`. Then
    A is among the next `every * (m + 1)` admissions, whatever arrives meanwhile and whatever order is wrapped. This
    assumes that the engine admits in the order yielded (see `SkipAhead` for requests that do not fit), that no
    preempted request is older than A, and that neither A nor an older request is parked meanwhile; a parked request
    keeps its arrival, and is the oldest again when it returns.
    Proof: after `every - 1` admissions without the oldest waiting request, the next place in the order goes to the
    oldest if it has waited `after_s`; A has, and so have all older requests. So any `every` consecutive admissions
    include the request that is the oldest at that time. New requests are younger than A, so at most m requests are
    admitted this way before A, and then A is the oldest.

    With `every=1` this is first come, first served among the requests that have waited `after_s`. With a larger value,
    even a queue of old requests is mostly in the wrapped order: under overload this does not fall back to fcfs.

    Invariant: `_by_age` has the same requests as the wrapped order.
    """

    __slots__ = ("_by_age", "_num_since", "_order", "after_s", "every")

    def __init__(self, order: Order[W], *, after_s: float, every: int = 4) -> None:
        """Wrap an empty order.

        Args:
            order: Decides all other places.
            after_s: Seconds of waiting after which a request can get such a place, >= 0.
            every: One of this many admissions goes to the oldest request, >= 1.

        Raises:
            ValueError: `after_s` or `every` is out of range, or `order` is not empty.
        """
        require_real("after_s", after_s)
        if not 0 <= after_s < inf:
            raise ValueError(f"after_s must be >= 0 and finite, got {after_s}")
        require_count("every", every, least=1)
        if len(order):
            raise ValueError(f"order must be empty, got {len(order)} requests")
        self.after_s = after_s
        self.every = every
        self._order = order
        self._by_age = SortedQueue[W]()
        self._num_since = 0  # admissions since the oldest was admitted; written by: admit

    def add(self, request: W) -> None:
        """Add a request."""
        self._order.add(request)  # may refuse it
        self._by_age.add(request, ())

    def remove(self, request: W) -> None:
        """Remove a waiting request that will not run."""
        self._order.remove(request)
        self._by_age.discard(request)

    def admit(self, request: W) -> None:
        """Remove a waiting request that starts to run."""
        self._order.admit(request)
        self._num_since = 0 if request is self._by_age.first() else self._num_since + 1
        self._by_age.discard(request)

    def park(self, request: W) -> None:
        """Take a waiting request out until it is added again."""
        self._order.park(request)
        self._by_age.discard(request)

    def stop(self, request: W) -> None:
        """Notify the wrapped order."""
        self._order.stop(request)

    def update(self, request: W) -> None:
        """Notify the wrapped order."""
        self._order.update(request)

    def ordered(self, now_s: float) -> Iterator[W]:
        """Yield the waiting requests; the oldest takes every `every`-th place if it has waited `after_s`."""
        num_since = self._num_since
        yielded: set[int] = set()
        by_age = iter(self._by_age)
        oldest = next(by_age, None)
        by_order = self._order.ordered(now_s)
        while oldest is not None:
            if num_since >= self.every - 1 and now_s - oldest.arrived_s >= self.after_s:
                request = oldest
            else:
                request = next(r for r in by_order if r.arrival not in yielded)
            num_since = 0 if request is oldest else num_since + 1
            yielded.add(request.arrival)
            yield request
            while oldest is not None and oldest.arrival in yielded:
                oldest = next(by_age, None)

    def __contains__(self, request: W) -> bool:
        """Return whether a request is waiting here."""
        return request in self._by_age

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._by_age)
