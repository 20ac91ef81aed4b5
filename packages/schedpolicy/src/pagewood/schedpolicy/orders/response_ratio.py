"""Orders by response ratio, highest first."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from math import floor, log2
from typing import Generic

from pagewood.schedpolicy.orders.match_sweep import MatchSweep
from pagewood.schedpolicy.orders.order import W, absent, changed_during_pass, require_number
from pagewood.schedpolicy.orders.sorted_queue import SortedQueue
from pagewood.schedpolicy.requests import Waiting

_BUCKETS_PER_DOUBLING = 8
_ROUNDING = 1 - 1e-9


class HighestResponseRatio(Generic[W]):
    """Orders by `(waited + service) / service`, greatest first: short prompts first, but long ones gain with time.

    The service of a request is the time to compute its uncached prompt tokens; the time per token cancels in every
    comparison. No request starves: a request with u uncached tokens that has waited w is not overtaken by a request
    with v uncached tokens that has waited less than `w * v / u`.

    Ranks cross as time passes, so a sorted list cannot hold them. Requests are kept in buckets by uncached tokens,
    eight buckets to each doubling, and by arrival within a bucket. No ratio in a bucket exceeds the ratio that its
    oldest request would have with the fewest tokens of the bucket. A pass takes from the bucket with the greatest such
    bound until the best request found beats all bounds, so the order is exact. Invariant: every waiting request is in
    the bucket of its uncached tokens.

    Source: P. Brinch Hansen (1971); SGLang's `hrrn` counts tokens processed meanwhile instead of time.
    """

    __slots__ = ("_bucket_of", "_buckets", "_num_changes", "_sweep")

    def __init__(self, *, notified: bool = False) -> None:
        """Start empty; with `notified`, the caller calls `update` on every change of `num_matched`."""
        self._buckets: dict[int, SortedQueue[W]] = {}  # written by: _place, _take_out
        self._bucket_of: dict[int, int] = {}  # by arrival; written by: _place, _take_out
        self._num_changes = 0  # written by: _place, _take_out
        self._sweep = None if notified else MatchSweep[W]()

    def add(self, request: W) -> None:
        """Add a request."""
        if request.arrival in self._bucket_of:
            raise ValueError(f"arrival must be unique among waiting requests, got {request.arrival} again")
        self._place(request)
        if self._sweep is not None:
            self._sweep.add(request)

    def remove(self, request: W) -> None:
        """Remove a request."""
        self._take_out(request)
        if self._sweep is not None:
            self._sweep.discard(request)

    admit = remove
    park = remove

    def stop(self, request: W) -> None:
        """Do nothing: running requests do not affect this order."""

    def update(self, request: W) -> None:
        """Move a request to the bucket of its present uncached tokens."""
        if request.arrival not in self._bucket_of:
            raise absent(request)
        require_number("arrived_s", request.arrived_s, request)
        if self._bucket_of[request.arrival] != _bucket(request):
            self._take_out(request)
            self._place(request)
        if self._sweep is not None:
            self._sweep.read(request)

    def ordered(self, now_s: float) -> Iterator[W]:
        """Yield the waiting requests, highest ratio first, ties by arrival."""
        if self._sweep is not None:
            for request in self._sweep.changed():
                self.update(request)
        num_changes = self._num_changes
        found: list[tuple[float, int, W]] = []  # (-ratio, arrival, request)
        bounds: list[tuple[float, int, W, Iterator[W]]] = []  # (-bound, bucket, its oldest request left, the others)
        for bucket, queue in self._buckets.items():
            rest = iter(queue)
            oldest = next(rest)
            bounds.append((_bound(oldest, bucket, now_s), bucket, oldest, rest))
        heapify(bounds)
        while bounds or found:
            while bounds and (not found or bounds[0][0] <= found[0][0]):
                _, bucket, oldest, rest = bounds[0]
                heappush(found, ((oldest.arrived_s - now_s) / _num_uncached(oldest), oldest.arrival, oldest))
                following = next(rest, None)
                if following is None:
                    heappop(bounds)
                else:
                    heapreplace(bounds, (_bound(following, bucket, now_s), bucket, following, rest))
            yield heappop(found)[2]
            if self._num_changes != num_changes:
                raise changed_during_pass()

    def __contains__(self, request: W) -> bool:
        """Return whether a request is waiting here."""
        return request.arrival in self._bucket_of

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._bucket_of)

    def _place(self, request: W) -> None:
        bucket, arrived_s = _bucket(request), require_number("arrived_s", request.arrived_s, request)
        queue = self._buckets.get(bucket)
        if queue is None:
            queue = self._buckets[bucket] = SortedQueue[W]()
        queue.add(request, (arrived_s,))
        self._bucket_of[request.arrival] = bucket
        self._num_changes += 1

    def _take_out(self, request: W) -> None:
        bucket = self._bucket_of.pop(request.arrival, None)
        if bucket is None:
            raise absent(request)
        self._num_changes += 1
        queue = self._buckets[bucket]
        queue.discard(request)
        if not queue:
            del self._buckets[bucket]


def _num_uncached(request: Waiting) -> int:
    return max(1, request.num_tokens - request.num_matched)


def _bucket(request: Waiting) -> int:
    return floor(_BUCKETS_PER_DOUBLING * log2(_num_uncached(request)))


def _bound(oldest: Waiting, bucket: int, now_s: float) -> float:
    """Return a lower bound on `1 - ratio` of `oldest` and all later requests of a bucket."""
    return (oldest.arrived_s - now_s) / (_ROUNDING * 2.0 ** (bucket / _BUCKETS_PER_DOUBLING))
