"""Waiting requests whose tenant is at its limit: they wait apart from the order, so that no other request waits."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from pagewood.engine.core.request import Request

_NUM_RETURNED = 8
"""Requests of a tenant that return to the order when it has room; the order then chooses among them."""
_MAX_TIMES = 32
"""A request is taken this often while others of its tenant are admitted; after that, they wait for it."""


class Verdict(Protocol):
    """Whether a request is within its tenant's limits."""

    @property
    def fits(self) -> bool:
        """Whether it is within them."""
        ...

    @property
    def reason(self) -> str:
        """Which limit it exceeds, if it does not fit."""
        ...


class Quotas(Protocol):
    """Limits on what the running requests of a tenant hold."""

    def check(self, request: Request) -> Verdict:
        """Return whether a waiting request may run now; it may if it can ever run and its tenant runs nothing."""
        ...

    def can_ever_run(self, request: Request) -> Verdict:
        """Return whether a request that has just arrived may run if its tenant runs nothing else."""
        ...

    def admit(self, request: Request) -> None:
        """Count a request that starts to run."""
        ...

    def stop(self, request: Request) -> None:
        """Stop counting a request that has ended or was preempted."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class _Tenant:
    """The requests of a tenant that wait here."""

    ranked: list[tuple[int, int, Request]] = field(default_factory=list[tuple[int, int, Request]])
    """(-priority, arrival, request), sorted."""  # written by: quota_queue
    has_room: bool = False
    """Whether it may have room since requests returned for the last time."""  # written by: quota_queue


class QuotaQueue:
    """Requests whose tenant is at its limit; they wait here until one of its requests has stopped.

    Invariant: a tenant whose requests wait here has running requests, or one that waits in the order, or returns
    requests in the next pass; so it never waits for nothing. Requests return by priority, then by arrival. One that was
    taken `_MAX_TIMES` times returns alone when it is first, so smaller ones cannot pass it for ever.
    """

    __slots__ = ("_keys", "_num_times", "_quotas", "_tenants")

    def __init__(self, quotas: Quotas) -> None:
        """Begin empty; from now on `quotas` counts the requests that run."""
        self._quotas = quotas
        self._tenants: dict[str, _Tenant] = {}
        """Name -> tenant with requests that wait here."""  # written by: quota_queue
        self._keys: dict[int, tuple[int, int, Request]] = {}
        """Arrival number -> key and request."""  # written by: quota_queue
        self._num_times: dict[int, int] = {}
        """Arrival number -> how often a waiting request was taken after it was examined."""  # written by: quota_queue

    def __len__(self) -> int:
        """Return how many requests wait here."""
        return len(self._keys)

    def __contains__(self, request: Request) -> bool:
        """Return whether a request waits here."""
        return request.arrival in self._keys

    def num_of(self, tenants: Collection[str]) -> int:
        """Return how many requests of these tenants wait here until one of their tenant stops."""
        mine = [self._tenants[name] for name in tenants if name in self._tenants]
        return sum(len(tenant.ranked) for tenant in mine if not tenant.has_room)

    def take(self, request: Request, claimants: Iterable[Request] = ()) -> bool:
        """Take a request if its tenant is at its limit; return whether it is taken.

        A request that fits is taken too if one of higher priority of its tenant waits here. Otherwise a stream of such
        requests would take all that becomes free.

        Args:
            request: waits in the order.
            claimants: waiting requests that count as running.
        """
        tenant = self._tenants.get(request.tenant)
        is_behind = tenant is not None and -tenant.ranked[0][0] > request.priority
        mine = [one for one in claimants if one.tenant == request.tenant]
        if not is_behind and self._fits(request, mine):
            return False
        self._num_times[request.arrival] = self._num_times.get(request.arrival, 0) + 1
        self._add(request)
        return True

    def join(self, request: Request) -> bool:
        """Take a request that starts to wait if others of its tenant wait here; return whether it is taken."""
        if request.tenant not in self._tenants:
            return False
        self._add(request)
        return True

    def ready(self) -> list[Request]:
        """Remove and return the requests that return to the order; called once in each pass."""
        returned: list[Request] = []
        for name, tenant in list(self._tenants.items()):
            if not tenant.has_room:
                continue
            tenant.has_room = False
            is_due = self._num_times.get(tenant.ranked[0][1], 0) >= _MAX_TIMES
            num_returned = 1 if is_due else _NUM_RETURNED
            for _, arrival, request in tenant.ranked[:num_returned]:
                del self._keys[arrival]
                returned.append(request)
            del tenant.ranked[:num_returned]
            if not tenant.ranked:
                del self._tenants[name]
        return returned

    def update(self, request: Request) -> None:
        """Note that the priority of a request that waits here has changed."""
        has_room = self._tenants[request.tenant].has_room
        self._remove(request)
        self._add(request)
        self._tenants[request.tenant].has_room = has_room

    def discard(self, request: Request) -> None:
        """Forget a waiting request that has ended, wherever it waits."""
        self._num_times.pop(request.arrival, None)
        if request in self:
            self._remove(request)
        self._note_room(request)

    def admit(self, request: Request) -> None:
        """Count a request that starts to run."""
        self._quotas.admit(request)
        self._num_times.pop(request.arrival, None)
        self._note_room(request)

    def stop(self, request: Request) -> None:
        """Stop counting a request that has ended or was preempted."""
        self._quotas.stop(request)
        self._note_room(request)

    def _fits(self, request: Request, claimants: Iterable[Request]) -> bool:
        for one in claimants:
            self._quotas.admit(one)
        fits = self._quotas.check(request).fits
        for one in claimants:
            self._quotas.stop(one)
        return fits

    def _add(self, request: Request) -> None:
        key = self._keys[request.arrival] = (-request.priority, request.arrival, request)
        insort(self._tenants.setdefault(request.tenant, _Tenant()).ranked, key)

    def _remove(self, request: Request) -> None:
        key, ranked = self._keys.pop(request.arrival), self._tenants[request.tenant].ranked
        del ranked[bisect_left(ranked, key)]
        if not ranked:
            del self._tenants[request.tenant]

    def _note_room(self, request: Request) -> None:
        tenant = self._tenants.get(request.tenant)
        if tenant is not None:
            tenant.has_room = True
