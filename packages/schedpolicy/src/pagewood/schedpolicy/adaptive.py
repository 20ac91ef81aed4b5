"""Two orders, and a rule that says which of them decides."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic

from pagewood.schedpolicy.order import Order, W


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """One change from an order to the other, with what led to it."""

    at_s: float
    is_cache_aware: bool
    hit_rate: float
    num_waiting: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveRule:
    """When the cache-aware order decides: while it pays, and while there is a choice to make.

    It takes over when the hit rate is at least `high_hit_rate` and at least `min_waiting` requests wait. It gives way
    when the hit rate falls below `low_hit_rate`, or fewer than half of `min_waiting` wait. Between these limits nothing
    changes, nor within `hold_s` of the last change.

    Attributes:
        low_hit_rate: In [0, high_hit_rate].
        high_hit_rate: At most 1.
        min_waiting: >= 1.
        hold_s: >= 0.
        smoothing: Weight of one more admission in the running mean of the hit rate, in (0, 1].
    """

    low_hit_rate: float = 0.05
    high_hit_rate: float = 0.15
    min_waiting: int = 8
    hold_s: float = 5.0
    smoothing: float = 0.02

    def __post_init__(self) -> None:
        if not 0 <= self.low_hit_rate <= self.high_hit_rate <= 1:
            raise ValueError(
                "low_hit_rate and high_hit_rate must be in [0, 1] and in this order, "
                f"got {self.low_hit_rate} and {self.high_hit_rate}"
            )
        if self.min_waiting < 1:
            raise ValueError(f"min_waiting must be >= 1, got {self.min_waiting}")
        if not self.hold_s >= 0:
            raise ValueError(f"hold_s must be >= 0, got {self.hold_s}")
        if not 0 < self.smoothing <= 1:
            raise ValueError(f"smoothing must be in (0, 1], got {self.smoothing}")


class AdaptiveOrder(Generic[W]):
    """Lets a cache-aware order decide while the cache is hit and the queue is long, else a plain one.

    The hit rate is a running mean over admissions of the cached part of what was admitted. Every change is kept in
    `switches`, with its numbers and its reason in words. Invariant: the order that decides has all the requests, and
    the other has none.
    """

    __slots__ = ("_is_cache_aware", "_make_orders", "_order", "_waiting", "hit_rate", "rule", "switches")

    def __init__(
        self,
        cache_aware: Callable[[], Order[W]],
        plain: Callable[[], Order[W]],
        *,
        rule: AdaptiveRule | None = None,
        max_switches: int = 64,
    ) -> None:
        """Start empty, with the plain order.

        Args:
            cache_aware: makes the one order.
            plain: makes the other.
            rule: when to switch.
            max_switches: how many of the last switches are kept, >= 1.
        """
        self.rule = rule or AdaptiveRule()
        self._make_orders = plain, cache_aware
        self._order = plain()  # written by: _switch
        self._is_cache_aware = False  # written by: _switch
        self._waiting: dict[int, W] = {}  # by arrival; written by: add, remove, admit, park
        self.hit_rate = 0.0  # written by: admit
        self.switches: deque[Switch] = deque(maxlen=max_switches)  # written by: _switch

    @property
    def is_cache_aware(self) -> bool:
        """Whether the cache-aware order decides now."""
        return self._is_cache_aware

    def add(self, request: W) -> None:
        """Take a request in."""
        self._order.add(request)
        self._waiting[request.arrival] = request

    def remove(self, request: W) -> None:
        """Let a request go that will not run."""
        self._order.remove(request)
        del self._waiting[request.arrival]

    def admit(self, request: W) -> None:
        """Let a request go that runs, and take note of how much of it was cached."""
        self._order.admit(request)
        del self._waiting[request.arrival]
        self.hit_rate += self.rule.smoothing * (request.num_matched / max(1, request.num_tokens) - self.hit_rate)

    def park(self, request: W) -> None:
        """Take a waiting request out until it is added again."""
        self._order.park(request)
        del self._waiting[request.arrival]

    def stop(self, request: W) -> None:
        """Tell the order that decides."""
        self._order.stop(request)

    def update(self, request: W) -> None:
        """Tell the order that decides."""
        self._order.update(request)

    def ordered(self, now_s: float) -> Iterator[W]:
        """Switch if that is due; then yield the waiting requests as the order that decides has them."""
        if not self.switches or now_s - self.switches[-1].at_s >= self.rule.hold_s:
            reason = self._reason_to_switch()
            if reason is not None:
                self._switch(now_s, reason)
        return self._order.ordered(now_s)

    def __contains__(self, request: W) -> bool:
        """Return whether the request waits here."""
        return request.arrival in self._waiting

    def __len__(self) -> int:
        """Return how many requests wait here."""
        return len(self._waiting)

    def _reason_to_switch(self) -> str | None:
        rule, num_waiting = self.rule, len(self._waiting)
        if not self._is_cache_aware:
            if self.hit_rate >= rule.high_hit_rate and num_waiting >= rule.min_waiting:
                return (
                    f"the hit rate {self.hit_rate:.3f} is at least {rule.high_hit_rate} "
                    f"and {num_waiting} requests wait, at least {rule.min_waiting}"
                )
        elif self.hit_rate < rule.low_hit_rate:
            return f"the hit rate {self.hit_rate:.3f} is below {rule.low_hit_rate}"
        elif 2 * num_waiting < rule.min_waiting:
            return f"{num_waiting} requests wait, fewer than half of {rule.min_waiting}"
        return None

    def _switch(self, now_s: float, reason: str) -> None:
        self._is_cache_aware = not self._is_cache_aware
        self._order = self._make_orders[self._is_cache_aware]()
        for request in self._waiting.values():
            self._order.add(request)
        self.switches.append(
            Switch(
                at_s=now_s,
                is_cache_aware=self._is_cache_aware,
                hit_rate=self.hit_rate,
                num_waiting=len(self._waiting),
                reason=reason,
            )
        )
