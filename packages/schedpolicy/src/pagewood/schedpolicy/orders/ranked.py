"""Orders by a rank that depends on one request only: fcfs, priority, lof, shortest, srtf, edf and lpm."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic

from pagewood.schedpolicy.counts import require_real
from pagewood.schedpolicy.orders.match_sweep import MatchSweep
from pagewood.schedpolicy.orders.order import W
from pagewood.schedpolicy.orders.sorted_queue import Key, SortedQueue
from pagewood.schedpolicy.requests import DeadlineWaiting, Waiting


class RankedOrder(Generic[W]):
    """Orders by rank, smallest first, ties by arrival. Invariant: every waiting request is sorted by its rank.

    A rank must not depend on the time. If it depends on `num_matched`, every pass first reads `num_matched` of all
    requests and moves those that changed. With `notified=True` the caller reports changes by `update` instead, and the
    cost of a pass depends only on how many requests are taken from it.
    """

    __slots__ = ("_queue", "_rank", "_sweep")

    def __init__(self, rank: Callable[[W], Key], *, reads_match: bool = False, notified: bool = False) -> None:
        """Start empty.

        Args:
            rank: Returns the key of a request; all keys must be comparable with each other.
            reads_match: Whether the rank depends on `num_matched`.
            notified: Whether the caller calls `update` on every change of `num_matched`.
        """
        self._rank = rank
        self._queue = SortedQueue[W]()
        self._sweep = MatchSweep[W]() if reads_match and not notified else None

    def add(self, request: W) -> None:
        """Add a request."""
        self._queue.add(request, self._rank(request))
        if self._sweep is not None:
            self._sweep.add(request)

    def remove(self, request: W) -> None:
        """Remove a request."""
        self._queue.discard(request)
        if self._sweep is not None:
            self._sweep.discard(request)

    admit = remove
    park = remove

    def stop(self, request: W) -> None:
        """Do nothing: running requests do not affect this order."""

    def update(self, request: W) -> None:
        """Rank a request again, with its present attributes."""
        self._queue.move(request, self._rank(request))
        if self._sweep is not None:
            self._sweep.read(request)

    def ordered(self, now_s: float) -> Iterator[W]:
        """Yield the waiting requests, smallest rank first."""
        if self._sweep is not None:
            for request in self._sweep.changed():
                self.update(request)
        return iter(self._queue)

    def __contains__(self, request: W) -> bool:
        """Return whether a request is waiting here."""
        return request in self._queue

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._queue)


def by_arrival(request: Waiting) -> Key:
    """Rank all requests the same, so that the arrival decides."""
    return ()


def by_priority(request: Waiting) -> Key:
    """Rank by priority, high first."""
    return (-request.priority,)


def by_priority_low_first(request: Waiting) -> Key:
    """Rank by priority, low first."""
    return (request.priority,)


def by_longest_output(request: Waiting) -> Key:
    """Rank by priority, then by the tokens that may still be generated, most first, so that long ones start early."""
    return -request.priority, request.num_generated - request.max_new_tokens


def by_deadline(request: DeadlineWaiting) -> Key:
    """Rank by deadline, earliest first; requests without a deadline come last.

    If any order meets all deadlines on a machine that serves one request at a time, this order does.
    """
    return (request.deadline_s,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ByLongestMatch:
    """Rank by priority, then by cached prefix with ageing: the greatest `num_matched + age_weight * waited_s` first.

    Serving requests with a long cached prefix first uses the cache before it is evicted, but without ageing it starves
    requests that have no match. With ageing, a request is overtaken, within its priority, only by requests that arrived
    less than `(max_match - num_matched) / age_weight` seconds after it, where `max_match` is the longest prefix that
    can be cached: at the default weight, 32 s for a request without a match if contexts reach 32,000 tokens. Proof: if
    B goes before A, then `B.num_matched + w * (now - B.arrived_s) >= A.num_matched + w * (now - A.arrived_s)`, so
    `w * (B.arrived_s - A.arrived_s) <= B.num_matched - A.num_matched <= max_match - A.num_matched`.
    All ages grow at the same rate, so `now` cancels in every comparison, and the rank changes only with the match.

    Source: the cache-aware order of RadixAttention (SGLang, arXiv 2312.07104); the ageing is ours.

    Attributes:
        age_weight: Tokens of match that one second of waiting is worth, >= 0 and finite. With 0, requests can starve,
            as in SGLang.
    """

    age_weight: float = 1000.0

    def __post_init__(self) -> None:
        require_real("age_weight", self.age_weight)
        if not 0 <= self.age_weight < math.inf:
            raise ValueError(f"age_weight must be >= 0 and finite, got {self.age_weight}")

    def __call__(self, request: Waiting) -> Key:
        """Return the rank."""
        return -request.priority, self.age_weight * request.arrived_s - request.num_matched


@dataclass(frozen=True, slots=True, kw_only=True)
class ByShortest:
    """Rank by priority, then by estimated work: uncached input plus weighted expected output.

    Least work first minimises the mean completion time. A long request can starve: combine it with `Ageing`.

    Attributes:
        output_ratio: Part of the allowed output that is expected, in [0, 1].
        output_weight: Cost of one output token in input tokens, > 0 and finite.
    """

    output_ratio: float = 0.7
    output_weight: float = 2.0

    def __post_init__(self) -> None:
        require_real("output_ratio", self.output_ratio)
        if not 0 <= self.output_ratio <= 1:
            raise ValueError(f"output_ratio must be in [0, 1], got {self.output_ratio}")
        require_real("output_weight", self.output_weight)
        if not 0 < self.output_weight < math.inf:
            raise ValueError(f"output_weight must be > 0 and finite, got {self.output_weight}")

    def __call__(self, request: Waiting) -> Key:
        """Return the rank."""
        num_output = self.output_ratio * max(0, request.max_new_tokens - request.num_generated)
        return -request.priority, request.num_tokens - request.num_matched + self.output_weight * num_output


@dataclass(frozen=True, slots=True, kw_only=True)
class ByRemaining:
    """Rank by priority, then by the work that remains: uncached input plus weighted output that is still expected.

    A request is expected to generate `output_ratio` of its limit in total. So after a preemption its output so far
    counts in full, where `ByShortest` expects the same part of the remaining limit. So requests near their expected end
    go first. A long request can starve: combine it with `Ageing`.

    Source: Schrage, A proof of the optimality of the shortest remaining processing time discipline, 1968.

    Attributes:
        output_ratio: Part of the allowed output that is expected, in [0, 1].
        output_weight: Cost of one output token in input tokens, > 0 and finite.
    """

    output_ratio: float = 0.7
    output_weight: float = 2.0

    def __post_init__(self) -> None:
        ByShortest(output_ratio=self.output_ratio, output_weight=self.output_weight)  # the same rules

    def __call__(self, request: Waiting) -> Key:
        """Return the rank; a request that has passed its expected end is expected to generate one more token."""
        num_output = max(1.0, self.output_ratio * request.max_new_tokens - request.num_generated)
        return -request.priority, request.num_tokens - request.num_matched + self.output_weight * num_output
