"""A multilevel queue: any order within each level; the level is the priority, or a function of the user."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Generic

from pagewood.schedpolicy.orders.order import Order, W, absent, changed_during_pass, require_number


class MultilevelOrder(Generic[W]):
    """Orders by level, highest first, and within a level by any order: the place where users adjust a policy.

    The level can be the priority, or any function of a request: `lambda r: r.num_tokens < 1000` puts short prompts
    first. A lower level can starve: combine it with `Ageing`.

    Invariant: a waiting or parked request belongs to the level that it had at its last `add` or `update`, a running
    request to the level from which it was admitted.
    """

    __slots__ = (
        "_level_of", "_levels", "_levels_of", "_make_order", "_num_changes", "_num_members", "_orders", "_parked",
        "_running",
    )  # fmt: skip

    def __init__(self, level_of: Callable[[W], float], make_order: Callable[[], Order[W]]) -> None:
        """Start empty.

        Args:
            level_of: Returns the level of a request, greatest first; called by `add` and `update`.
            make_order: Makes the order within a level.
        """
        self._level_of = level_of
        self._make_order = make_order
        self._num_changes = 0  # of the waiting requests; written by: add, remove, admit, park, update, _enter
        self._orders: dict[float, Order[W]] = {}  # by level; written by: _enter, _drop
        self._num_members: dict[float, int] = {}  # waiting, running or parked, by level; written by: _enter, _drop
        self._levels: list[float] = []  # of `_orders`, negated, sorted; written by: _enter, _drop
        # Levels of waiting, running or parked requests, by arrival; written by: add, update, _leave.
        self._levels_of: dict[int, float] = {}
        self._running: set[int] = set()  # arrivals of running requests; written by: admit, stop
        self._parked: set[int] = set()  # arrivals of parked requests; written by: add, park, stop

    def add(self, request: W) -> None:
        """Add a request."""
        level = require_number("level", self._level_of(request), request)
        if request.arrival in self._parked:
            if self._levels_of[request.arrival] == level:
                self._orders[level].add(request)
                self._parked.remove(request.arrival)
                self._num_changes += 1
                return
            self.stop(request)
        if request.arrival in self._levels_of:
            raise ValueError(f"arrival must be unique among waiting requests, got {request.arrival} again")
        self._enter(request, level)
        self._levels_of[request.arrival] = level

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
        """Take a waiting request out until it is added again; its level is kept."""
        self._order_of(request).park(request)
        self._num_changes += 1
        self._parked.add(request.arrival)

    def stop(self, request: W) -> None:
        """Notify the order that a running or parked request came from."""
        if request.arrival in self._running or request.arrival in self._parked:
            self._running.discard(request.arrival)
            self._parked.discard(request.arrival)
            self._orders[self._levels_of[request.arrival]].stop(request)
            self._leave(request)

    def update(self, request: W) -> None:
        """Move a waiting request to its present level."""
        if request not in self:
            raise absent(request)
        before, level = self._levels_of[request.arrival], require_number("level", self._level_of(request), request)
        if level == before:
            self._orders[level].update(request)
            self._num_changes += 1
        else:
            self._enter(request, level)
            self._orders[before].remove(request)
            self._drop(before)
            self._levels_of[request.arrival] = level

    def ordered(self, now_s: float) -> Iterator[W]:
        """Yield the waiting requests, level by level."""
        num_changes = self._num_changes
        for negated in self._levels:
            for request in self._orders[-negated].ordered(now_s):
                yield request
                if self._num_changes != num_changes:
                    raise changed_during_pass()

    def __contains__(self, request: W) -> bool:
        """Return whether a request is waiting here."""
        level = self._levels_of.get(request.arrival)
        return level is not None and request in self._orders[level]

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return sum(map(len, self._orders.values()))

    def _order_of(self, request: W) -> Order[W]:
        """Return the order of the level of a request."""
        level = self._levels_of.get(request.arrival)
        if level is None:
            raise absent(request)
        return self._orders[level]

    def _enter(self, request: W, level: float) -> None:
        """Put a request into the order of a level, and count it as a member."""
        order = self._orders.get(level)
        if order is None:
            order = self._make_order()
            order.add(request)  # may refuse it
            self._orders[level] = order
            self._num_members[level] = 0
            insort(self._levels, -level)
        else:
            order.add(request)
        self._num_members[level] += 1
        self._num_changes += 1

    def _leave(self, request: W) -> None:
        """Forget a request."""
        self._drop(self._levels_of.pop(request.arrival))

    def _drop(self, level: float) -> None:
        """Remove one request from the count of a level; a level without requests loses its order."""
        self._num_members[level] -= 1
        if not self._num_members[level]:
            del self._orders[level], self._num_members[level]
            del self._levels[bisect_left(self._levels, -level)]
