"""Slow and simple versions of our orders, with which they are compared."""

from collections.abc import Callable, Iterator
from typing import Any

from pagewood.schedpolicy.testing import FakeRequest


def depth_first(waiting: list[FakeRequest], now_s: float) -> list[FakeRequest]:
    """Recurse token by token through the cached prefixes, tier by tier."""

    def below(requests: list[FakeRequest], depth: int) -> list[FakeRequest]:
        groups: dict[bytes, list[FakeRequest]] = {}
        own: list[FakeRequest] = []
        for request in sorted(requests, key=lambda request: request.arrival):
            cached = request.prefix(request.num_matched)
            if len(cached) == 4 * depth:
                own.append(request)
            else:
                groups.setdefault(cached[4 * depth : 4 * depth + 4], []).append(request)
        ranked = sorted(groups.values(), key=lambda group: (-len(group), group[0].arrival))
        return [request for group in ranked for request in below(group, depth + 1)] + own

    tiers = sorted({request.priority for request in waiting}, reverse=True)
    return [r for tier in tiers for r in below([r for r in waiting if r.priority == tier], 0)]


class NaiveShares:
    """Counts the service of groups as in the paper, with a loop over all groups each time."""

    def __init__(
        self,
        group_of: Callable[[FakeRequest], str],
        weights: dict[str, float],
        cost: Callable[[FakeRequest], float],
        output_cost: float,
    ) -> None:
        self.group_of, self.weights, self.cost, self.output_cost = group_of, weights, cost, output_cost
        self.waiting: list[tuple[FakeRequest, str]] = []
        self.parked: list[tuple[FakeRequest, str]] = []
        self.running: list[list[Any]] = []
        self.service: dict[str, float] = {}
        self.last_to_leave: str | None = None

    def charge(self, group: str, cost: float) -> None:
        """Charge a group."""
        self.service[group] += cost / self.weights.get(group, 1.0)

    def settle(self) -> None:
        """Charge running requests for generated tokens."""
        for entry in self.running:
            request, group, num_paid = entry
            self.charge(group, self.output_cost * (request.num_generated - num_paid))
            entry[2] = request.num_generated

    def groups(self) -> set[str]:
        """Return the groups with a waiting or parked request."""
        return {group for _, group in (*self.waiting, *self.parked)}

    def add(self, request: FakeRequest) -> None:
        """Add a request."""
        self.settle()
        group = self.group_of(request)
        was_in = [other for parked, other in self.parked if parked is request]
        if was_in and was_in[0] != group:
            self.stop(request)
        others = self.groups()
        self.parked = [entry for entry in self.parked if entry[0] is not request]
        if group not in others:
            if others:
                floor = min(self.service[other] for other in others)
            else:
                floor = 0.0 if self.last_to_leave is None else self.left_at
            self.service[group] = max(self.service.get(group, 0.0), floor)
        self.waiting.append((request, group))

    def take(self, request: FakeRequest) -> str:
        """Remove a request, and return its group."""
        (group,) = [group for other, group in self.waiting if other is request]
        self.waiting.remove((request, group))
        return group

    def leave(self, group: str) -> None:
        """Record the last group that left the queue."""
        if group not in self.groups():
            self.settle()
            self.last_to_leave = group
            self.left_at = self.service[group]

    def remove(self, request: FakeRequest) -> None:
        """Remove a request."""
        self.leave(self.take(request))

    def admit(self, request: FakeRequest) -> None:
        """Remove a waiting request that starts to run."""
        group = self.take(request)
        self.charge(group, self.cost(request))
        self.leave(group)
        self.running.append([request, group, request.num_generated])

    def park(self, request: FakeRequest) -> None:
        """Take out a request until it is added again."""
        self.parked.append((request, self.take(request)))

    def stop(self, request: FakeRequest) -> None:
        """Report that a running or parked request has ended, or that a running one was preempted."""
        for entry in self.parked:
            if entry[0] is request:
                self.parked.remove(entry)
                self.leave(entry[1])
                return
        self.settle()
        self.running = [entry for entry in self.running if entry[0] is not request]

    def update(self, request: FakeRequest) -> None:
        """Report that a request has changed."""
        (group,) = [group for other, group in self.waiting if other is request]
        if group != self.group_of(request):
            self.remove(request)
            self.add(request)

    def ordered(self, now_s: float) -> Iterator[FakeRequest]:
        """Yield the waiting requests."""
        self.settle()
        service = dict(self.service)
        left = sorted(self.waiting, key=lambda entry: (-entry[0].priority, entry[0].arrival))
        while left:
            group = min({group for _, group in left}, key=lambda group: (service[group], group))
            entry = next(entry for entry in left if entry[1] == group)
            left.remove(entry)
            yield entry[0]
            service[group] += self.cost(entry[0]) / self.weights.get(group, 1.0)

    def __contains__(self, request: FakeRequest, /) -> bool:
        """Return whether a request is waiting."""
        return any(other is request for other, _ in self.waiting)

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self.waiting)


class NaiveTags:
    """Counts the running requests of each tag in every pass."""

    def __init__(self) -> None:
        self.waiting: list[FakeRequest] = []
        self.running: list[tuple[FakeRequest, str]] = []

    def add(self, request: FakeRequest) -> None:
        """Add a request."""
        self.waiting.append(request)

    def remove(self, request: FakeRequest) -> None:
        """Remove a request."""
        self.waiting.remove(request)

    def admit(self, request: FakeRequest) -> None:
        """Remove a waiting request that starts to run."""
        self.remove(request)
        self.running.append((request, request.tag))

    park = remove

    def stop(self, request: FakeRequest) -> None:
        """Report that a running request has ended or was preempted."""
        self.running = [entry for entry in self.running if entry[0] is not request]

    def update(self, request: FakeRequest) -> None:
        """Do nothing."""

    def ordered(self, now_s: float) -> Iterator[FakeRequest]:
        """Yield the waiting requests."""

        def first(tag: str) -> int:
            return min((r for r in self.waiting if r.tag == tag), key=lambda r: (-r.priority, r.arrival)).arrival

        def key(request: FakeRequest) -> tuple[float, ...]:
            num_running = sum(tag == request.tag for _, tag in self.running)
            return -num_running, first(request.tag), -request.priority, request.arrival

        return iter(sorted(self.waiting, key=key))

    def __contains__(self, request: FakeRequest, /) -> bool:
        """Return whether a request is waiting."""
        return request in self.waiting

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self.waiting)


class NaiveDeferral:
    """The behaviour of `InBatchDeferral`, by comparing every request with every leader."""

    def __init__(self, *, min_shared: int = 32, page_size: int = 1) -> None:
        self.min_shared = -(-min_shared // page_size) * page_size
        self.page_size = page_size
        self.leaders: list[Any] = []
        self.parked: list[list[Any]] = []  # [request, leader]; the leader is None once it has stopped
        self.num_parked = 0
        """Calls of `defer` that parked a request."""
        self.num_orphaned = 0
        """Parked requests whose leader has stopped before its prompt was computed."""

    def saved_by(self, request: Any, leader: Any) -> int:
        """Return how many tokens a leader has still to compute that a request can match."""
        num_usable = min(request.num_shared(leader), request.num_tokens - 1, leader.num_prompt)
        return self.whole_pages(num_usable) - self.whole_pages(leader.num_computed)

    def is_worth_waiting(self, request: Any, leader: Any) -> bool:
        """Return whether a leader will raise the match of a request by `min_shared` tokens or more."""
        num_raised = self.saved_by(request, leader) + self.whole_pages(leader.num_computed) - request.num_matched
        return min(num_raised, self.saved_by(request, leader)) >= self.min_shared

    def whole_pages(self, num_tokens: int) -> int:
        """Round down to whole pages."""
        return num_tokens // self.page_size * self.page_size

    def start(self, request: Any) -> None:
        """Let others park on a request."""
        self.leaders.append(request)

    def stop(self, request: Any) -> None:
        """Release those that are parked on a request."""
        self.leaders = [leader for leader in self.leaders if leader is not request]
        for entry in self.parked:
            if entry[1] is request:
                entry[1] = None
                self.num_orphaned += self.saved_by(entry[0], request) >= self.min_shared

    def defer(self, request: Any) -> bool:
        """Park a request on the first leader that is worth waiting for."""
        for leader in self.leaders:
            if self.is_worth_waiting(request, leader):
                self.parked.append([request, leader])
                self.num_parked += 1
                return True
        return False

    def num_awaited(self, request: Any) -> int:
        """Return the least number of tokens, whole pages, that wakes a parked request when its leader has them."""
        leader = next(leader for parked, leader in self.parked if parked is request)
        if leader is None:
            return 0
        num_usable = self.saved_by(request, leader) + self.whole_pages(leader.num_computed)
        return next(num for num in range(0, num_usable + 1, self.page_size) if num_usable - num < self.min_shared)

    def discard(self, request: Any) -> None:
        """Forget a request."""
        self.parked = [entry for entry in self.parked if entry[0] is not request]

    def ready(self) -> list[Any]:
        """Take out and return the requests that need not wait any longer."""
        is_ready = [
            leader is None or self.saved_by(request, leader) < self.min_shared for request, leader in self.parked
        ]
        ready = [entry[0] for entry, takes_out in zip(self.parked, is_ready, strict=True) if takes_out]
        self.parked = [entry for entry, takes_out in zip(self.parked, is_ready, strict=True) if not takes_out]
        return sorted(ready, key=lambda request: request.arrival)
