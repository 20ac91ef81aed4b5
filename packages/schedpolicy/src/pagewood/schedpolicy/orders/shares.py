"""Groups that share one engine in proportion to their weights: tenants by tokens, classes by turns."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from heapq import heappop, heappush
from math import inf
from operator import attrgetter
from typing import Generic, TypeVar

from pagewood.schedpolicy.counts import require_real
from pagewood.schedpolicy.orders.order import Order, W, absent, changed_during_pass, require_number
from pagewood.schedpolicy.orders.ranked import RankedOrder, by_priority
from pagewood.schedpolicy.requests import ClassWaiting, TenantWaiting, Waiting

_MAX_IDLE = 1024
"""Entries of idle groups that are kept before the first are forgotten."""

T = TypeVar("T", bound=TenantWaiting)
C = TypeVar("C", bound=ClassWaiting)


class ShareOrder(Generic[W]):
    """Serves the group with the least service next; within a group, an order of its own decides.

    The service of a group is the sum of its charges divided by its weight: a charge for every admission, and a charge
    for every token that its running requests generate. A group that returns after a time without waiting requests is
    lifted to the least service of the groups that wait (if none waits, of the last group that did), so that a group
    cannot save up idle time. A group whose waiting requests are all parked is not idle, and is not lifted. Within a
    pass, every yielded request counts as admitted.

    When there are more than 1,024 groups without requests, those that would be lifted on their return are forgotten,
    which changes nothing for them.

    Invariant: `_active` is sorted, and has exactly the groups with a waiting or parked request, each with its service.

    With `charges_at_stop`, generated tokens are charged when their request stops, so a pass does not read all running
    requests; for thousands of them this matters more than the delay.

    Bound: as long as two groups both have waiting requests that are not parked, and the engine admits in this order,
    their services differ by at most 2 * max(largest charge of an admission, largest output charge of the requests of
    one group that run at once), divided by the smaller weight. So no group with a waiting request starves. (With
    `charges_at_stop` this holds for the service that has been charged.)

    Source: the virtual token counter of VTC (Sheng et al., arXiv 2401.00588), Theorem 4.4 and its weighted form.
    """

    __slots__ = (
        "_active", "_admission_cost", "_charges_at_stop", "_group_of", "_groups", "_idle", "_last_service",
        "_make_order", "_num_changes", "_num_members", "_num_running", "_orders", "_output_cost", "_parked",
        "_running", "_service", "_weights",
    )  # fmt: skip

    def __init__(
        self,
        group_of: Callable[[W], str],
        *,
        make_order: Callable[[], Order[W]],
        weights: Mapping[str, float],
        admission_cost: Callable[[W], float],
        output_cost: float,
        charges_at_stop: bool = False,
    ) -> None:
        """Start with no groups.

        Args:
            group_of: Returns the group of a request; if it changes while the request waits, call `update`.
            make_order: Makes the order of the requests within one group.
            weights: Shares of groups, > 0 and finite; 1 for groups that are not named.
            admission_cost: Returns the charge for admitting a request, >= 0; called when it is admitted.
            output_cost: Charge for one generated token, >= 0.
            charges_at_stop: Whether generated tokens are charged only when their request stops.

        Raises:
            ValueError: A weight or `output_cost` is out of range.
        """
        for group, weight in weights.items():
            require_real("weights", weight)
            if not 0 < weight < inf:
                raise ValueError(f"weights must be > 0 and finite, got {weight} for {group!r}")
        require_real("output_cost", output_cost)
        if not 0 <= output_cost < inf:
            raise ValueError(f"output_cost must be >= 0 and finite, got {output_cost}")
        self._group_of = group_of
        self._make_order = make_order
        self._weights = dict(weights)
        self._admission_cost = admission_cost
        self._output_cost = output_cost
        self._charges_at_stop = charges_at_stop
        self._num_changes = 0  # of the waiting requests; written by: add, remove, admit, park, update
        self._orders: dict[str, Order[W]] = {}  # of groups with a waiting or parked request; written by: _enter, _leave
        self._groups: dict[int, str] = {}  # of waiting requests, by arrival; written by: add, remove, admit, park
        self._parked: dict[int, str] = {}  # groups of parked requests, by arrival; written by: add, park, stop
        self._num_members: dict[str, int] = {}  # waiting or parked requests of a group; written by: _enter, _leave
        self._num_running: dict[str, int] = {}  # admitted requests of a group; written by: admit, stop
        self._service: dict[str, float] = {}  # by group; written by: _enter, _charge, _forget_idle
        self._idle: list[tuple[float, str]] = []  # a heap of groups that may be forgotten; written by: _forget_idle
        self._active: list[tuple[float, str]] = []  # written by: _enter, _charge, _leave
        self._last_service = 0.0  # of the group that was the last to wait; written by: _leave
        # Running requests by arrival, with their group and the tokens charged so far; written by: admit, stop, _settle.
        self._running: dict[int, tuple[W, str, int]] = {}

    def service(self, group: str) -> float:
        """Return the charges of a group divided by its weight, lifts included; 0 for a forgotten group."""
        self._settle()
        return self._service.get(group, 0.0)

    def add(self, request: W) -> None:
        """Add a request; lift its group if it was idle."""
        if request.arrival in self._groups:
            raise ValueError(f"arrival must be unique among waiting requests, got {request.arrival} again")
        group = self._group_of(request)
        if self._parked.get(request.arrival, group) != group:
            self.stop(request)
        self._enter(request, group, is_new=request.arrival not in self._parked)
        self._parked.pop(request.arrival, None)
        self._groups[request.arrival] = group

    def remove(self, request: W) -> None:
        """Remove a waiting request that will not run; its group is not charged."""
        group = self._group_here(request)
        self._orders[group].remove(request)
        del self._groups[request.arrival]
        self._num_changes += 1
        self._leave(group)

    def admit(self, request: W) -> None:
        """Remove a waiting request that starts to run, and charge its group for the admission.

        Raises:
            KeyError: The request is not here.
            ValueError: The charge is NaN.
        """
        group, cost = self._group_here(request), self._cost_of(request)
        self._orders[group].admit(request)
        self._charge(group, cost)
        del self._groups[request.arrival]
        self._num_changes += 1
        self._running[request.arrival] = request, group, request.num_generated
        self._num_running[group] = self._num_running.get(group, 0) + 1
        self._leave(group)

    def park(self, request: W) -> None:
        """Take a waiting request out until it is added again; its group keeps its place, and is not lifted then."""
        group = self._group_here(request)
        self._orders[group].park(request)
        self._parked[request.arrival] = group
        del self._groups[request.arrival]
        self._num_changes += 1

    def stop(self, request: W) -> None:
        """Charge a running request for its last tokens; forget a parked one."""
        parked_group = self._parked.pop(request.arrival, None)
        if parked_group is not None:
            self._orders[parked_group].stop(request)
            self._leave(parked_group)
            return
        entry = self._running.pop(request.arrival, None)
        if entry is None:
            return
        _, group, num_paid = entry
        self._charge(group, self._output_cost * (request.num_generated - num_paid))
        order = self._orders.get(group)
        if order is not None:
            order.stop(request)
        self._num_running[group] -= 1
        if not self._num_running[group]:
            del self._num_running[group]
            self._forget_idle(group)

    def update(self, request: W) -> None:
        """Notify the order of its group; move the request if its group has changed."""
        before, group = self._group_here(request), self._group_of(request)
        if group == before:
            self._orders[group].update(request)
        else:
            self._enter(request, group, is_new=True, leaves=before)
            self._groups[request.arrival] = group
        self._num_changes += 1

    def ordered(self, now_s: float) -> Iterator[W]:
        """Yield the waiting requests; each is of the group with the least service at that point of the pass."""
        self._settle()
        active, num_changes = self._active, self._num_changes
        num_begun = 0
        passes: dict[str, Iterator[W]] = {}
        again: list[tuple[float, str]] = []  # groups that had a turn, with their service after it
        while True:
            if again and (num_begun == len(active) or again[0] < active[num_begun]):
                service, group = heappop(again)
            elif num_begun < len(active):
                service, group = active[num_begun]
                num_begun += 1
                passes[group] = self._orders[group].ordered(now_s)
            else:
                return
            request = next(passes[group], None)
            if request is not None:
                yield request
                if self._num_changes != num_changes:
                    raise changed_during_pass()
                heappush(again, (service + self._cost_of(request) / self._weights.get(group, 1.0), group))

    def __contains__(self, request: W) -> bool:
        """Return whether a request is waiting here."""
        return request.arrival in self._groups

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._groups)

    def _group_here(self, request: W) -> str:
        """Return the group of a waiting request."""
        group = self._groups.get(request.arrival)
        if group is None:
            raise absent(request)
        return group

    def _cost_of(self, request: W) -> float:
        return require_number("admission_cost", self._admission_cost(request), request)

    def _enter(self, request: W, group: str, *, is_new: bool, leaves: str | None = None) -> None:
        """Put a request into the order of a group, which is lifted if it was idle.

        Args:
            request: The request.
            group: Its group now.
            is_new: Whether the group does not count the request yet.
            leaves: The group that it waited in so far; None if it did not wait.
        """
        order = self._orders.get(group)
        if order is None:
            order = self._make_order()
        order.add(request)  # may refuse it, before anything has changed
        if leaves is not None:
            self._orders[leaves].remove(request)
            self._leave(leaves)
        if group not in self._orders:
            self._settle()
            service = max(self._service.get(group, 0.0), self._level)
            self._service[group] = service
            insort(self._active, (service, group))
            self._orders[group] = order
            self._num_members[group] = 0
        self._num_members[group] += is_new
        self._num_changes += 1

    @property
    def _level(self) -> float:
        """The service to which a group is lifted when it is not idle any more; it never falls."""
        return self._active[0][0] if self._active else self._last_service

    def _forget_idle(self, group: str) -> None:
        """Note that a group is idle; if many are, forget those that would be lifted when they return."""
        heappush(self._idle, (self._service[group], group))
        if len(self._idle) <= _MAX_IDLE:
            return
        level = self._level
        while self._idle and self._idle[0][0] <= level:
            service, name = heappop(self._idle)
            is_idle = name not in self._orders and name not in self._num_running
            if is_idle and self._service.get(name) == service:  # otherwise it is entered again when it becomes idle
                del self._service[name]

    def _settle(self) -> None:
        """Charge running requests for the tokens generated since they were last charged."""
        if self._output_cost and not self._charges_at_stop:
            for arrival, (request, group, num_paid) in self._running.items():
                num_generated = request.num_generated
                if num_generated != num_paid:
                    self._running[arrival] = request, group, num_generated
                    self._charge(group, self._output_cost * (num_generated - num_paid))

    def _charge(self, group: str, cost: float) -> None:
        before = self._service[group]
        after = before + cost / self._weights.get(group, 1.0)
        self._service[group] = after
        if group in self._orders:
            del self._active[bisect_left(self._active, (before, group))]
            insort(self._active, (after, group))

    def _leave(self, group: str) -> None:
        """Remove one request from the count of a group; a group without requests loses its order."""
        self._num_members[group] -= 1
        if not self._num_members[group]:
            self._settle()
            del self._orders[group], self._num_members[group]
            del self._active[bisect_left(self._active, (self._service[group], group))]
            self._last_service = self._service[group]
            if group not in self._num_running:
                self._forget_idle(group)


def fair_share(
    *,
    weights: Mapping[str, float] | None = None,
    prefill_cost: float = 1.0,
    output_cost: float = 2.0,
    charges_at_stop: bool = False,
    make_order: Callable[[], Order[T]] | None = None,
) -> ShareOrder[T]:
    """Return an order in which tenants share by tokens: uncached prompt tokens and generated tokens.

    A cached prefix is free for the tenant, because it costs no computation.

    Args:
        weights: Shares of tenants; 1 for tenants that are not named.
        prefill_cost: Charge for a prompt token that is not cached, >= 0.
        output_cost: Charge for a generated token, >= 0; the default ratio of 2 to 1 is that of VTC.
        charges_at_stop: Whether generated tokens are charged only when their request stops; see `ShareOrder`.
        make_order: Makes the order within a tenant; by default by priority, then arrival.
    """
    require_real("prefill_cost", prefill_cost)
    if not 0 <= prefill_cost < inf:
        raise ValueError(f"prefill_cost must be >= 0 and finite, got {prefill_cost}")

    def admission_cost(request: Waiting) -> float:
        return prefill_cost * (request.num_tokens - request.num_matched)

    return ShareOrder[T](
        attrgetter("tenant"),
        make_order=make_order or (lambda: RankedOrder[T](by_priority)),
        weights=weights or {},
        admission_cost=admission_cost,
        output_cost=output_cost,
        charges_at_stop=charges_at_stop,
    )


def weighted_round_robin(
    weights: Mapping[str, float], *, make_order: Callable[[], Order[C]] | None = None
) -> ShareOrder[C]:
    """Return an order in which classes take turns: of `sum(weights)` admissions, each class gets its weight.

    Args:
        weights: Turns of each class, > 0; 1 for classes that are not named.
        make_order: Makes the order within a class; by default by priority, then arrival.
    """
    return ShareOrder[C](
        attrgetter("service_class"),
        make_order=make_order or (lambda: RankedOrder[C](by_priority)),
        weights=weights,
        admission_cost=_one,
        output_cost=0.0,
    )


def _one(request: Waiting) -> float:
    return 1.0
