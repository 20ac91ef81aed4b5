"""The largest difference in service between tenants that have requests waiting."""

from collections.abc import Mapping

PREFILL_COST = 1.0
OUTPUT_COST = 2.0
MAX_TENANTS = 16
"""Number of tenants that are compared with each other: the first to appear."""


class ServiceGap:
    """The largest difference in service of two tenants over an interval in which both had requests waiting.

    Service is counted as in VTC: 1 for a computed prompt token, 2 for a generated token. Only intervals in which both
    wait count, because only then could the scheduler have served either; so a tenant with few requests makes no gap.

    Invariant: for every pair of tenants that wait now, `_pairs` has the least and greatest difference of their services
    since the last time at which one of them did not wait.

    Source: the fairness of VTC (arXiv 2401.00588), definition and Theorem 4.4.
    """

    __slots__ = ("_known", "_pairs", "_service", "_waiting", "largest")

    def __init__(self) -> None:
        """Start with no tenants."""
        self.largest = 0.0
        """The gap, in units of service."""  # written by: ServiceGap
        self._known: list[str] = []
        self._service: dict[str, float] = {}
        self._waiting: dict[str, int] = {}  # requests, by tenant
        self._pairs: dict[tuple[str, str], tuple[float, float]] = {}  # least and greatest difference, of waiting pairs

    def wait(self, tenant: str) -> None:
        """Record that a request starts to wait."""
        if tenant not in self._service:
            self._service[tenant] = 0.0
            if len(self._known) < MAX_TENANTS:
                self._known.append(tenant)
        self._waiting[tenant] = self._waiting.get(tenant, 0) + 1
        if self._waiting[tenant] == 1 and tenant in self._known:
            for other in self._known:
                if other != tenant and self._waiting.get(other):
                    difference = self._difference(pair := _pair(tenant, other))
                    self._pairs[pair] = difference, difference

    def leave(self, tenant: str) -> None:
        """Record that a request no longer waits."""
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            for other in self._known:
                self._pairs.pop(_pair(tenant, other), None)

    def serve(self, costs: Mapping[str, float]) -> None:
        """Add service, by tenant."""
        for tenant, cost in costs.items():
            self._service[tenant] += cost
        for pair, (lowest, highest) in self._pairs.items():
            difference = self._difference(pair)
            if not lowest <= difference <= highest:
                lowest, highest = min(lowest, difference), max(highest, difference)
                self._pairs[pair] = lowest, highest
                self.largest = max(self.largest, highest - lowest)

    def service_of(self) -> dict[str, float]:
        """Return the service of every tenant, in the order in which they appeared."""
        return dict(self._service)

    def _difference(self, pair: tuple[str, str]) -> float:
        return self._service[pair[0]] - self._service[pair[1]]


def _pair(one: str, other: str) -> tuple[str, str]:
    return (one, other) if one < other else (other, one)
