"""An order that is replaced by another one while the queue is long."""

from collections.abc import Iterator
from typing import Generic

from pagewood.schedpolicy.counts import require_count
from pagewood.schedpolicy.orders.order import Order, W


class FallbackAbove(Generic[W]):
    """Uses one order up to `max_waiting` requests, and another one above.

    It exists for comparisons with SGLang, whose lpm becomes fcfs above 128 waiting requests; the orders of this package
    need no such limit. Invariant: both orders have the same requests.
    """

    __slots__ = ("_above", "_order", "max_waiting")

    def __init__(self, order: Order[W], above: Order[W], *, max_waiting: int = 128) -> None:
        """Wrap two empty orders.

        Raises:
            ValueError: `max_waiting` is negative.
        """
        require_count("max_waiting", max_waiting, least=0)
        self._order = order
        self._above = above
        self.max_waiting = max_waiting

    def add(self, request: W) -> None:
        """Add a request."""
        self._order.add(request)
        try:
            self._above.add(request)
        except Exception:
            self._order.remove(request)
            raise

    def remove(self, request: W) -> None:
        """Remove a waiting request that will not run."""
        self._order.remove(request)
        self._above.remove(request)

    def admit(self, request: W) -> None:
        """Remove a waiting request that starts to run."""
        self._order.admit(request)
        self._above.admit(request)

    def park(self, request: W) -> None:
        """Take a waiting request out until it is added again."""
        self._order.park(request)
        self._above.park(request)

    def stop(self, request: W) -> None:
        """Notify both orders."""
        self._order.stop(request)
        self._above.stop(request)

    def update(self, request: W) -> None:
        """Notify both orders."""
        self._order.update(request)
        self._above.update(request)

    def ordered(self, now_s: float) -> Iterator[W]:
        """Yield the waiting requests in the order for the present length of the queue."""
        return (self._order if len(self._order) <= self.max_waiting else self._above).ordered(now_s)

    def __contains__(self, request: W) -> bool:
        """Return whether a request is waiting here."""
        return request in self._order

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._order)
