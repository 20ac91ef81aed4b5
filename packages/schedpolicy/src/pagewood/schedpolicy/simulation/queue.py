"""The waiting requests of one replica, and what their order must be told of them."""

from collections.abc import Iterator

from pagewood.schedpolicy.order import Order
from pagewood.schedpolicy.simulation.cache import BlockCache
from pagewood.schedpolicy.simulation.memory import Memory
from pagewood.schedpolicy.simulation.request import SimRequest


class Queue:
    """Waiting requests with their live matches. Invariant: the order has exactly these, and at the start of a pass it
    has been told of every match that has changed.

    Where the cache has no live matches, each pass matches all requests again.
    """

    __slots__ = ("_cache", "_changed", "_memory", "_order", "_waiting")

    def __init__(self, order: Order[SimRequest], memory: Memory) -> None:
        """Start with nobody waiting.

        Args:
            order: Empty; from now on only the queue tells it who waits.
            memory: Whose cache requests are matched in.
        """
        self._order = order
        self._memory = memory
        self._cache = memory.cache if isinstance(memory.cache, BlockCache) else None
        self._waiting: dict[int, SimRequest] = {}  # by arrival
        self._changed: dict[int, SimRequest] = {}  # by arrival, those whose live match changed since the last pass

    def __len__(self) -> int:
        """Return how many requests wait."""
        return len(self._waiting)

    def __contains__(self, request: SimRequest) -> bool:
        """Return whether a request waits."""
        return request.arrival in self._waiting

    def __iter__(self) -> Iterator[SimRequest]:
        """Yield the waiting requests in the order in which they came."""
        return iter(self._waiting.values())

    def add(self, request: SimRequest) -> None:
        """Let a request wait."""
        if self._cache is not None:
            request.watch = self._cache.watch(request.keys, lambda: self._changed.__setitem__(request.arrival, request))
        request.num_matched = self._num_matched(request)
        self._waiting[request.arrival] = request
        self._order.add(request)

    def admit(self, request: SimRequest) -> None:
        """Let a request go that runs from now on."""
        self._order.admit(request)
        if request.watch is not None and self._cache is not None:
            self._cache.unwatch(request.watch)
            request.watch = None
        del self._waiting[request.arrival]
        self._changed.pop(request.arrival, None)

    def stop(self, request: SimRequest) -> None:
        """Tell the order of a request that runs no more."""
        self._order.stop(request)

    def ordered(self, now_s: float) -> Iterator[SimRequest]:
        """Begin a pass: yield the waiting requests, first to be admitted first."""
        for request in self if self._cache is None else self._changed.values():
            num_matched = self._num_matched(request)
            if num_matched != request.num_matched:
                request.num_matched = num_matched
                self._order.update(request)
        self._changed.clear()
        return self._order.ordered(now_s)

    def _num_matched(self, request: SimRequest) -> int:
        memory, watch = self._memory, request.watch
        num_cached = memory.cache.match(request.keys) if watch is None else watch.num_pages
        return memory.page_size * memory.matched_pages(request, num_cached)
