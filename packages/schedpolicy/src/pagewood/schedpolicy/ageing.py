"""Any order, with a bound on how long a request can be overtaken."""

from collections.abc import Iterator
from math import inf
from typing import Generic

from pagewood.schedpolicy.order import Order, W
from pagewood.schedpolicy.sorted_queue import SortedQueue


class Ageing(Generic[W]):
    """Of every `every` admissions, one is the oldest request that has waited for `after_s`; the rest go by any order.

    Bound: let m requests that arrived before A wait when A has waited for `after_s`. Then A is admitted with the
    `every * (m + 1)`-th admission from that moment on, or before, whatever arrives meanwhile and whatever the order is
    that is wrapped; given that the engine admits in the order yielded (see `SkipAhead` for what does not fit), and
    that none of those preempted is older than A.
    Proof: whenever `every - 1` admissions have gone by without the oldest waiting request, the next place in the order
    is that of the oldest, if it has come of age; A has, and so have all who are older. So any `every` consecutive
    admissions remove the oldest at that time. Newcomers are younger than A, so before A there are at most m to be
    removed like this, and then A is the oldest itself.

    With `every=1` this is first come, first served among those who have come of age. With more, a queue that is old
    altogether is still mostly in the order that was asked for: under overload this does not fall back to fcfs.

    Invariant: `_by_age` has the same requests as the order that is wrapped.
    """

    __slots__ = ("_by_age", "_num_since", "_order", "after_s", "every")

    def __init__(self, order: Order[W], *, after_s: float, every: int = 4) -> None:
        """Wrap an empty order.

        Args:
            order: decides among those who have not come of age, and the places that ageing leaves.
            after_s: when a request comes of age, >= 0.
            every: of so many admissions one goes to the oldest, >= 1.

        Raises:
            ValueError: `after_s` or `every` is out of range, or `order` has requests already.
        """
        if not 0 <= after_s < inf:
            raise ValueError(f"after_s must be >= 0 and finite, got {after_s}")
        if every < 1:
            raise ValueError(f"every must be >= 1, got {every}")
        if len(order):
            raise ValueError(f"order must be empty, got {len(order)} requests")
        self.after_s = after_s
        self.every = every
        self._order = order
        self._by_age = SortedQueue[W]()
        self._num_since = 0  # admissions since the oldest was admitted; written by: admit

    def add(self, request: W) -> None:
        """Take a request in."""
        self._by_age.add(request, ())
        self._order.add(request)

    def remove(self, request: W) -> None:
        """Let a request go that will not run."""
        self._by_age.discard(request)
        self._order.remove(request)

    def admit(self, request: W) -> None:
        """Let a request go that runs."""
        self._num_since = 0 if request is self._by_age.first() else self._num_since + 1
        self._by_age.discard(request)
        self._order.admit(request)

    def park(self, request: W) -> None:
        """Take a waiting request out until it is added again."""
        self._by_age.discard(request)
        self._order.park(request)

    def stop(self, request: W) -> None:
        """Tell the order that is wrapped."""
        self._order.stop(request)

    def update(self, request: W) -> None:
        """Tell the order that is wrapped."""
        self._order.update(request)

    def ordered(self, now_s: float) -> Iterator[W]:
        """Yield the waiting requests; those of age take every `every`-th place, oldest first."""
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
        """Return whether the request waits here."""
        return request in self._by_age

    def __len__(self) -> int:
        """Return how many requests wait here."""
        return len(self._by_age)
