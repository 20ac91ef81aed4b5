"""What one tenant may hold at once, however much it asks for."""

from collections.abc import Mapping
from dataclasses import dataclass

from pagewood.schedpolicy.requests import TenantWaiting
from pagewood.schedpolicy.verdict import FITS, Outcome, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Limits of one tenant; None for no limit.

    Attributes:
        max_running: Requests that run at once.
        max_tokens_in_flight: Tokens of running requests, prompt and all that they may still generate.
        max_kv_tokens: Tokens that running requests hold in memory now.
    """

    max_running: int | None = None
    max_tokens_in_flight: int | None = None
    max_kv_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_running", "max_tokens_in_flight", "max_kv_tokens"):
            value: int | None = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a tenant holds."""

    num_running: int
    num_tokens_in_flight: int
    num_kv_tokens: int


class Quotas:
    """Keeps count of what tenants hold, and says who may have more.

    A request of a tenant at its limit is passed over, not refused; others do not wait for it. Invariant: if
    requests are admitted only where `check` says so, no tenant has more running or in flight than its quota, and none
    is admitted beyond its KV; what runs already may grow beyond that by what it generates.
    """

    __slots__ = ("_default", "_quotas", "_running")

    def __init__(self, quotas: Mapping[str, Quota], *, default: Quota | None = None) -> None:
        """Start with nobody running.

        Args:
            quotas: by tenant.
            default: of those that are not named; None for no limits.
        """
        self._quotas = dict(quotas)
        self._default = default or Quota()
        # Running requests by tenant and arrival; written by: admit, stop.
        self._running: dict[str, dict[int, TenantWaiting]] = {}

    def check(self, request: TenantWaiting) -> Verdict:
        """Say whether the request's tenant may run it now; a limit of its own is no reason to look no further."""
        quota = self._quotas.get(request.tenant, self._default)
        usage = self.usage(request.tenant)
        for name, limit, used, wanted in (
            ("max_running", quota.max_running, usage.num_running, 1),
            ("max_tokens_in_flight", quota.max_tokens_in_flight, usage.num_tokens_in_flight, _num_at_end(request)),
            ("max_kv_tokens", quota.max_kv_tokens, usage.num_kv_tokens, request.num_tokens),
        ):
            if limit is not None and used + wanted > limit:
                return Verdict(outcome=Outcome.OTHER, short_of=name, wanted=wanted, left=max(0, limit - used))
        return FITS

    def can_ever_run(self, request: TenantWaiting) -> Verdict:
        """Say whether the request would be let in if its tenant had nothing else: refuse at once what would not."""
        quota = self._quotas.get(request.tenant, self._default)
        for name, limit, wanted in (
            ("max_tokens_in_flight", quota.max_tokens_in_flight, _num_at_end(request)),
            ("max_kv_tokens", quota.max_kv_tokens, request.num_tokens),
        ):
            if limit is not None and wanted > limit:
                return Verdict(outcome=Outcome.OTHER, short_of=name, wanted=wanted, left=limit)
        return FITS

    def usage(self, tenant: str) -> Usage:
        """Return what a tenant holds now."""
        running = self._running.get(tenant, {}).values()
        return Usage(
            num_running=len(running),
            num_tokens_in_flight=sum(map(_num_at_end, running)),
            num_kv_tokens=sum(request.num_tokens for request in running),
        )

    def admit(self, request: TenantWaiting) -> None:
        """Count a request that runs from now on."""
        self._running.setdefault(request.tenant, {})[request.arrival] = request

    def stop(self, request: TenantWaiting) -> None:
        """Count a request no longer that has ended or was preempted."""
        running = self._running[request.tenant]
        del running[request.arrival]
        if not running:
            del self._running[request.tenant]


def _num_at_end(request: TenantWaiting) -> int:
    return request.num_tokens + max(0, request.max_new_tokens - request.num_generated)
