"""The waiting requests of one replica, and the notifications to their order."""

from collections import Counter
from collections.abc import Iterator
from math import inf

from pagewood.schedpolicy.admission.deferral import InBatchDeferral
from pagewood.schedpolicy.orders.order import Order
from pagewood.schedpolicy.preemption.lending import Lending
from pagewood.schedpolicy.simulation.cache import BlockCache
from pagewood.schedpolicy.simulation.memory import Memory
from pagewood.schedpolicy.simulation.request import SimRequest


class Queue:
    """Waiting requests with their live matches.

    Invariant: every waiting request is in the order, or parked on a running request whose prompt it repeats. Exactly
    those in the order have a live match, if the cache offers live matches. At the start of a pass, the order has been
    notified of every match that has changed.

    Where the cache has no live matches, each pass matches all requests in the order again.
    """

    __slots__ = (
        "_cache", "_changed", "_deferral", "_lending", "_memory", "_num_by_priority", "_order", "_top_parked",
        "_waiting",
    )  # fmt: skip

    def __init__(
        self, order: Order[SimRequest], memory: Memory, *, deferral: InBatchDeferral[SimRequest] | None = None
    ) -> None:
        """Start with no waiting requests.

        Args:
            order: Empty; only the queue adds and removes requests from now on.
            memory: Requests are matched in its cache.
            deferral: Empty; parks requests that repeat a prompt in progress. None to park none.
        """
        self._order = order
        self._memory = memory
        self._deferral = deferral
        self._lending = Lending[SimRequest]()
        self._num_by_priority = Counter[int]()  # of those in the order
        # The highest priority of the parked requests, or a higher one; written by: defer, claims_above.
        self._top_parked: float = -inf
        self._cache = memory.cache if isinstance(memory.cache, BlockCache) else None
        self._waiting: dict[int, SimRequest] = {}  # by arrival, parked requests included
        self._changed: dict[int, SimRequest] = {}  # by arrival, those whose live match changed since the last pass

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._waiting)

    def __contains__(self, request: SimRequest) -> bool:
        """Return whether a request is waiting."""
        return request.arrival in self._waiting

    def __iter__(self) -> Iterator[SimRequest]:
        """Yield the waiting requests in the order in which they were added."""
        return iter(self._waiting.values())

    @property
    def num_candidates(self) -> int:
        """Waiting requests that are not parked."""
        return len(self._waiting) - (0 if self._deferral is None else len(self._deferral))

    @property
    def top_priority(self) -> float:
        """The highest priority of these requests; -inf if there are none."""
        return max(self._num_by_priority, default=-inf)

    def begin_step(self) -> bool:
        """Put the parked requests that are ready into the order, and settle the loans of priorities.

        Returns:
            Whether the priority of a running request has changed.
        """
        has_changed = False
        if self._deferral is not None and self._waiting:
            for request in self._deferral.ready():
                self._lending.take_back(request)
                self._enter(request)
        for request, priority in self._lending.settle():
            request.priority, has_changed = priority, True
        return has_changed

    def add(self, request: SimRequest) -> None:
        """Add a request that has arrived or was preempted."""
        self._waiting[request.arrival] = request
        self._enter(request)

    def remove(self, request: SimRequest) -> None:
        """Remove a waiting request that will not run here."""
        if request in self._order:
            self._order.remove(request)
            self._leave(request)
        elif self._deferral is not None:
            self._deferral.discard(request)
            self._lending.take_back(request)
            self._order.stop(request)
        del self._waiting[request.arrival]

    def defer(self, request: SimRequest) -> bool:
        """Return whether a request waits for a prompt in progress that it repeats; then call `park` after the pass."""
        if self._deferral is None or not self._deferral.defer(request):
            return False
        self._top_parked = max(self._top_parked, request.priority)
        return True

    def claims_above(self, priority: int) -> list[tuple[SimRequest, int]]:
        """Return the parked requests of a higher priority, each with the pages that it will need for its tokens.

        Those of this priority leave them a place and these pages, as if they ran.
        """
        deferral, memory = self._deferral, self._memory
        if deferral is None or self._top_parked <= priority:
            return []
        self._top_parked = max((request.priority for request in deferral), default=-inf)
        return [
            (request, memory.pages_of(request.num_tokens) - deferral.num_awaited(request) // memory.page_size)
            for request in deferral
            if request.priority > priority
        ]

    def park(self, request: SimRequest) -> None:
        """Take a deferred request out of the order; it enters again when it is ready."""
        self._order.park(request)
        self._leave(request)
        leader = None if self._deferral is None else self._deferral.leader_of(request)
        if leader is not None:
            self._lending.lend(request, leader)

    def start(self, request: SimRequest) -> None:
        """Report, within a pass, that a request will run; call `admit` after the pass."""
        if self._deferral is not None:
            self._deferral.start(request)

    def admit(self, request: SimRequest) -> None:
        """Remove a request that has started."""
        self._order.admit(request)
        self._leave(request)
        del self._waiting[request.arrival]

    def stop(self, request: SimRequest) -> None:
        """Report that a running request has ended or was preempted; it gets its own priority back."""
        self._lending.stop(request)
        request.priority = request.own_priority
        self._order.stop(request)
        if self._deferral is not None:
            self._deferral.stop(request)

    def ordered(self, now_s: float) -> Iterator[SimRequest]:
        """Begin a pass, after `begin_step`: yield the requests that wait for admission, first to be admitted first."""
        for request in self._in_order() if self._cache is None else self._changed.values():
            num_matched = self._num_matched(request)
            if num_matched != request.num_matched:
                request.num_matched = num_matched
                self._order.update(request)
        self._changed.clear()
        return self._order.ordered(now_s)

    def _enter(self, request: SimRequest) -> None:
        """Follow the match of a request, and add it to the order."""
        if self._cache is not None:
            request.watch = self._cache.watch(request.keys, lambda: self._changed.__setitem__(request.arrival, request))
        request.num_matched = self._num_matched(request)
        self._order.add(request)
        self._num_by_priority[request.priority] += 1

    def _leave(self, request: SimRequest) -> None:
        """Note that a request is no longer in the order."""
        self._num_by_priority[request.priority] -= 1
        if not self._num_by_priority[request.priority]:
            del self._num_by_priority[request.priority]
        if request.watch is not None and self._cache is not None:
            self._cache.unwatch(request.watch)
            request.watch = None
        self._changed.pop(request.arrival, None)

    def _in_order(self) -> list[SimRequest]:
        return [request for request in self if request in self._order]

    def _num_matched(self, request: SimRequest) -> int:
        memory, watch = self._memory, request.watch
        num_cached = memory.cache.match(request.keys) if watch is None else watch.num_pages
        return memory.page_size * memory.matched_pages(request, num_cached)
