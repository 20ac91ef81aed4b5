"""Any order, but of requests that share an uncached prefix one goes first, and the others find it cached."""

from collections.abc import Iterator
from typing import Generic

from pagewood.schedpolicy.depth_first import P
from pagewood.schedpolicy.order import Order


class InBatchDeferral(Generic[P]):
    """Puts off, to the end of the pass, requests whose prompts repeat one that is about to be computed anyway.

    A request defers to another if the other's prompt would raise its match by `min_shared` tokens or more, and the
    other goes before it in this pass or runs and has not generated a token yet. It is put off, not refused: the order
    stays a permutation, and once its leader's prompt is cached its match has grown, and it leads or hits. A request is
    thus put off at most while some request with the same prefix is being computed.

    Two prompts share `num_matched + min_shared` tokens exactly if those prefixes are equal, so a set of prefixes
    answers where SGLang builds a tree of the queue in every pass.

    Source: in-batch prefix caching of SGLang, with its thresholds 32 and 32.
    """

    __slots__ = ("_max_matched", "_min_shared", "_order", "_running")

    def __init__(
        self, order: Order[P], *, min_shared: int = 32, max_matched: int | None = 32, page_size: int = 1
    ) -> None:
        """Wrap an order.

        Args:
            order: decides who goes first, also among those who share a prefix.
            min_shared: tokens of prefill that deferring must save, >= 1.
            max_matched: requests with a longer match do not defer, >= 0; None for no limit.
            page_size: tokens that the cache keeps together, >= 1: it shares whole pages only.

        Raises:
            ValueError: An argument is out of range.
        """
        if min_shared < 1:
            raise ValueError(f"min_shared must be >= 1, got {min_shared}")
        if max_matched is not None and max_matched < 0:
            raise ValueError(f"max_matched must be >= 0, got {max_matched}")
        if page_size < 1:
            raise ValueError(f"page_size must be >= 1, got {page_size}")
        self._order = order
        self._min_shared = -(-min_shared // page_size) * page_size
        self._max_matched = max_matched
        # Running requests and what each had generated on admission, by arrival; written by: admit, stop, ordered.
        self._running: dict[int, tuple[P, int]] = {}

    def add(self, request: P) -> None:
        """Take a request in."""
        self._order.add(request)

    def remove(self, request: P) -> None:
        """Let a request go that will not run."""
        self._order.remove(request)

    def admit(self, request: P) -> None:
        """Let a request go that runs; others defer to it until its prompt is computed."""
        self._order.admit(request)
        self._running[request.arrival] = request, request.num_generated

    def stop(self, request: P) -> None:
        """Defer to a request no longer."""
        self._running.pop(request.arrival, None)
        self._order.stop(request)

    def update(self, request: P) -> None:
        """Tell the order that is wrapped."""
        self._order.update(request)

    def ordered(self, now_s: float) -> Iterator[P]:
        """Yield the waiting requests, those that defer to another last."""
        self._running = {
            arrival: (request, num_generated)
            for arrival, (request, num_generated) in self._running.items()
            if request.num_generated == num_generated
        }
        leaders: dict[int, set[bytes]] = {}  # prefixes of those who go first or run, by length in tokens
        deferred: list[P] = []
        for request in self._order.ordered(now_s):
            num_shared = request.num_matched + self._min_shared
            if num_shared >= request.num_tokens or self._is_matched_enough(request):
                yield request
                continue
            prefixes = leaders.get(num_shared)
            if prefixes is None:
                prefixes = {other.prefix(num_shared) for other, _ in self._running.values()}
                leaders[num_shared] = prefixes
            prefix = request.prefix(num_shared)
            if prefix in prefixes:
                deferred.append(request)
            else:
                prefixes.add(prefix)
                yield request
        yield from deferred

    def __contains__(self, request: P) -> bool:
        """Return whether the request waits here."""
        return request in self._order

    def __len__(self) -> int:
        """Return how many requests wait here."""
        return len(self._order)

    def _is_matched_enough(self, request: P) -> bool:
        return self._max_matched is not None and request.num_matched > self._max_matched
