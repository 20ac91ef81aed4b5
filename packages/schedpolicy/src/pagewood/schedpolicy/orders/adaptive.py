"""Two orders, and a rule that selects one of them."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic

from pagewood.schedpolicy.counts import require_count, require_real
from pagewood.schedpolicy.orders.order import Order, W


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """One change from one order to the other, with its cause."""

    at_s: float
    is_cache_aware: bool
    hit_rate: float
    num_waiting: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveRule:
    """Selects the cache-aware order while the cache is hit and the queue is long enough to choose from.

    The cache-aware order is selected when the hit rate is at least `high_hit_rate` and at least `min_waiting` requests
    wait. The plain one is selected when the hit rate falls below `low_hit_rate`, or fewer than half of `min_waiting`
    requests wait. Between these limits, and within `hold_s` of the last change, nothing changes.

    Attributes:
        low_hit_rate: In [0, high_hit_rate].
        high_hit_rate: At most 1.
        min_waiting: >= 1.
        hold_s: >= 0.
        smoothing: Weight of one admission in the running mean of the hit rate, in (0, 1].
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
        require_count("min_waiting", self.min_waiting, least=1)
        require_real("hold_s", self.hold_s)
        if not self.hold_s >= 0:
            raise ValueError(f"hold_s must be >= 0, got {self.hold_s}")
        require_real("smoothing", self.smoothing)
        if not 0 < self.smoothing <= 1:
            raise ValueError(f"smoothing must be in (0, 1], got {self.smoothing}")


class AdaptiveOrder(Generic[W]):
    """Uses a cache-aware order while the cache is hit and the queue is long, and a plain order otherwise.

    The hit rate is a running mean, over admissions, of the cached part of the admitted requests. `switches` keeps every
    change with its numbers and its reason. Invariant: the selected order has all the requests, and the other has none.
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
            cache_aware: Makes the cache-aware order.
            plain: Makes the plain order.
            rule: Says when to switch.
            max_switches: Number of the latest switches to keep, >= 1.
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
        """Whether the cache-aware order is selected now."""
        return self._is_cache_aware

    def add(self, request: W) -> None:
        """Add a request."""
        self._order.add(request)
        self._waiting[request.arrival] = request

    def remove(self, request: W) -> None:
        """Remove a waiting request that will not run."""
        self._order.remove(request)
        del self._waiting[request.arrival]

    def admit(self, request: W) -> None:
        """Remove a waiting request that starts to run, and record how much of it was cached."""
        self._order.admit(request)
        del self._waiting[request.arrival]
        self.hit_rate += self.rule.smoothing * (request.num_matched / max(1, request.num_tokens) - self.hit_rate)

    def park(self, request: W) -> None:
        """Take a waiting request out until it is added again."""
        self._order.park(request)
        del self._waiting[request.arrival]

    def stop(self, request: W) -> None:
        """Notify the selected order."""
        self._order.stop(request)

    def update(self, request: W) -> None:
        """Notify the selected order."""
        self._order.update(request)

    def ordered(self, now_s: float) -> Iterator[W]:
        """Switch if the rule says so; then yield the waiting requests in the selected order."""
        if not self.switches or now_s - self.switches[-1].at_s >= self.rule.hold_s:
            reason = self._reason_to_switch()
            if reason is not None:
                self._switch(now_s, reason)
        return self._order.ordered(now_s)

    def __contains__(self, request: W) -> bool:
        """Return whether a request is waiting here."""
        return request.arrival in self._waiting

    def __len__(self) -> int:
        """Return the number of waiting requests."""
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
        order = self._make_orders[not self._is_cache_aware]()
        for request in self._waiting.values():
            order.add(request)
        self._order, self._is_cache_aware = order, not self._is_cache_aware
        self.switches.append(
            Switch(
                at_s=now_s,
                is_cache_aware=self._is_cache_aware,
                hit_rate=self.hit_rate,
                num_waiting=len(self._waiting),
                reason=reason,
            )
        )
