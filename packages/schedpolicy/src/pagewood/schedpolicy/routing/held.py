"""Waiting requests whose tenant is at its limit: they wait apart from the order, so that no other request waits."""

from bisect import bisect_left, insort
from typing import Generic, TypeVar

from pagewood.schedpolicy.admission.quotas import Quotas
from pagewood.schedpolicy.requests import TenantWaiting

_NUM_RETURNED = 8
"""Requests of a tenant that return to the order together; the order then chooses among them."""

T = TypeVar("T", bound=TenantWaiting)


class HeldByQuota(Generic[T]):
    """Requests that wait until their tenant holds less.

    While requests of a tenant wait here, none of its requests of the same or lower priority that arrived later passes
    them. So a large one is not passed by small ones for ever.

    Invariant: a tenant with requests here has running requests, or one in the order, or is in `_returning`; so it never
    waits for nothing.
    """

    __slots__ = ("_num_held", "_quotas", "_ranked", "_returning")

    def __init__(self, quotas: Quotas) -> None:
        """Begin empty; `quotas` counts the running requests."""
        self._quotas = quotas
        # (-priority, arrival, request) by tenant, sorted; written by: add, remove, take_back.
        self._ranked: dict[str, list[tuple[int, int, T]]] = {}
        # Tenants that may have room, in the order in which they got it; written by: has_room, remove, take_back.
        self._returning: dict[str, None] = {}
        self._num_held = 0  # written by: add, remove, take_back

    def __len__(self) -> int:
        """Return how many requests wait here."""
        return self._num_held

    @property
    def has_returning(self) -> bool:
        """Whether `take_back` will return requests."""
        return bool(self._returning)

    def must_wait(self, request: T) -> bool:
        """Return whether a request must wait here: for its quota, or for another one of its tenant."""
        ranked = self._ranked.get(request.tenant)
        if ranked and ranked[0][:2] < (-request.priority, request.arrival):
            return True
        return not self._quotas.check(request).fits

    def add(self, request: T) -> None:
        """Let a request wait here."""
        insort(self._ranked.setdefault(request.tenant, []), (-request.priority, request.arrival, request))
        self._num_held += 1

    def remove(self, request: T) -> None:
        """Remove a request that will not run."""
        ranked = self._ranked[request.tenant]
        del ranked[bisect_left(ranked, (-request.priority, request.arrival))]
        self._num_held -= 1
        if ranked:
            self._returning[request.tenant] = None  # it may have been the one for which the others waited
        else:
            del self._ranked[request.tenant]
            self._returning.pop(request.tenant, None)

    def has_room(self, tenant: str) -> None:
        """Note that a tenant holds less than before."""
        if tenant in self._ranked:
            self._returning[tenant] = None

    def take_back(self) -> list[T]:
        """Take out the first requests of the tenants that may have room; the caller puts them into the order."""
        returned: list[T] = []
        for tenant in self._returning:
            ranked = self._ranked[tenant]
            returned += [request for _, _, request in ranked[:_NUM_RETURNED]]
            del ranked[:_NUM_RETURNED]
            if not ranked:
                del self._ranked[tenant]
        self._returning.clear()
        self._num_held -= len(returned)
        return returned
