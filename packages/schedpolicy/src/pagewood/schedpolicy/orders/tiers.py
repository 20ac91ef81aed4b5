"""Any order, in tiers: by priority, or by a function of the user."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Generic

from pagewood.schedpolicy.orders.order import Order, W, absent, changed_during_pass, require_number


class Tiers(Generic[W]):
    """Orders by tier, highest first, and within a tier by any order: the place where users adjust a policy.

    The tier can be the priority, or any function of a request: `lambda r: r.num_tokens < 1000` puts short prompts
    first. A lower tier can starve: combine it with `Ageing`.

    Invariant: a waiting or parked request belongs to the tier that it had at its last `add` or `update`, a running
    request to the tier from which it was admitted.
    """

    __slots__ = (
        "_make_order", "_num_changes", "_num_members", "_orders", "_parked", "_running", "_tier_of", "_tiers",
        "_tiers_of",
    )  # fmt: skip

    def __init__(self, tier_of: Callable[[W], float], make_order: Callable[[], Order[W]]) -> None:
        """Start empty.

        Args:
            tier_of: Returns the tier of a request, greatest first; called by `add` and `update`.
            make_order: Makes the order within a tier.
        """
        self._tier_of = tier_of
        self._make_order = make_order
        self._num_changes = 0  # of the waiting requests; written by: add, remove, admit, park, update, _enter
        self._orders: dict[float, Order[W]] = {}  # by tier; written by: _enter, _drop
        self._num_members: dict[float, int] = {}  # waiting, running or parked, by tier; written by: _enter, _drop
        self._tiers: list[float] = []  # of `_orders`, negated, sorted; written by: _enter, _drop
        # Tiers of waiting, running or parked requests, by arrival; written by: add, update, _leave.
        self._tiers_of: dict[int, float] = {}
        self._running: set[int] = set()  # arrivals of running requests; written by: admit, stop
        self._parked: set[int] = set()  # arrivals of parked requests; written by: add, park, stop

    def add(self, request: W) -> None:
        """Add a request."""
        tier = require_number("tier", self._tier_of(request), request)
        if request.arrival in self._parked:
            if self._tiers_of[request.arrival] == tier:
                self._orders[tier].add(request)
                self._parked.remove(request.arrival)
                self._num_changes += 1
                return
            self.stop(request)
        if request.arrival in self._tiers_of:
            raise ValueError(f"arrival must be unique among waiting requests, got {request.arrival} again")
        self._enter(request, tier)
        self._tiers_of[request.arrival] = tier

    def remove(self, request: W) -> None:
        """Remove a waiting request that will not run."""
        self._order_of(request).remove(request)
        self._num_changes += 1
        self._leave(request)

    def admit(self, request: W) -> None:
        """Remove a waiting request that starts to run."""
        self._order_of(request).admit(request)
        self._num_changes += 1
        self._running.add(request.arrival)

    def park(self, request: W) -> None:
        """Take a waiting request out until it is added again; its tier is kept."""
        self._order_of(request).park(request)
        self._num_changes += 1
        self._parked.add(request.arrival)

    def stop(self, request: W) -> None:
        """Notify the order that a running or parked request came from."""
        if request.arrival in self._running or request.arrival in self._parked:
            self._running.discard(request.arrival)
            self._parked.discard(request.arrival)
            self._orders[self._tiers_of[request.arrival]].stop(request)
            self._leave(request)

    def update(self, request: W) -> None:
        """Move a waiting request to its present tier."""
        if request not in self:
            raise absent(request)
        before, tier = self._tiers_of[request.arrival], require_number("tier", self._tier_of(request), request)
        if tier == before:
            self._orders[tier].update(request)
            self._num_changes += 1
        else:
            self._enter(request, tier)
            self._orders[before].remove(request)
            self._drop(before)
            self._tiers_of[request.arrival] = tier

    def ordered(self, now_s: float) -> Iterator[W]:
        """Yield the waiting requests, tier by tier."""
        num_changes = self._num_changes
        for negated in self._tiers:
            for request in self._orders[-negated].ordered(now_s):
                yield request
                if self._num_changes != num_changes:
                    raise changed_during_pass()

    def __contains__(self, request: W) -> bool:
        """Return whether a request is waiting here."""
        tier = self._tiers_of.get(request.arrival)
        return tier is not None and request in self._orders[tier]

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return sum(map(len, self._orders.values()))

    def _order_of(self, request: W) -> Order[W]:
        """Return the order of the tier of a request."""
        tier = self._tiers_of.get(request.arrival)
        if tier is None:
            raise absent(request)
        return self._orders[tier]

    def _enter(self, request: W, tier: float) -> None:
        """Put a request into the order of a tier, and count it as a member."""
        order = self._orders.get(tier)
        if order is None:
            order = self._make_order()
            order.add(request)  # may refuse it
            self._orders[tier] = order
            self._num_members[tier] = 0
            insort(self._tiers, -tier)
        else:
            order.add(request)
        self._num_members[tier] += 1
        self._num_changes += 1

    def _leave(self, request: W) -> None:
        """Forget a request."""
        self._drop(self._tiers_of.pop(request.arrival))

    def _drop(self, tier: float) -> None:
        """Remove one request from the count of a tier; a tier without requests loses its order."""
        self._num_members[tier] -= 1
        if not self._num_members[tier]:
            del self._orders[tier], self._num_members[tier]
            del self._tiers[bisect_left(self._tiers, -tier)]
