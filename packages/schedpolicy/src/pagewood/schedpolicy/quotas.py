"""Limits on what one tenant may hold at once."""

from collections.abc import Mapping
from dataclasses import dataclass

from pagewood.schedpolicy.requests import TenantWaiting
from pagewood.schedpolicy.verdict import FITS, Outcome, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Limits of one tenant; None for no limit.

    Attributes:
        max_running: Requests that run at once.
        max_tokens_in_flight: Tokens of running requests: their tokens now, plus all they may still generate.
        max_kv_tokens: Tokens of KV that running requests hold now.
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
    """What a tenant holds now."""

    num_running: int
    num_tokens_in_flight: int
    num_kv_tokens: int


class Quotas:
    """Counts what tenants hold, and checks requests against the quotas.

    The caller passes over a request whose tenant is at its limit, and does not refuse it; others do not wait for it.
    Invariant: if requests are admitted only where `check` allows it, no tenant exceeds its `max_running` or
    `max_tokens_in_flight`, and no admission exceeds `max_kv_tokens`; running requests may grow beyond that by what
    they generate.
    """

    __slots__ = ("_default", "_quotas", "_running")

    def __init__(self, quotas: Mapping[str, Quota], *, default: Quota | None = None) -> None:
        """Start with no running requests.

        Args:
            quotas: Quotas by tenant.
            default: Quota of tenants that are not named; None for no limits.
        """
        self._quotas = dict(quotas)
        self._default = default or Quota()
        # Running requests by tenant and arrival; written by: admit, stop.
        self._running: dict[str, dict[int, TenantWaiting]] = {}

    def check(self, request: TenantWaiting) -> Verdict:
        """Return whether the tenant may run the request now; if not, requests of other tenants may still fit."""
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
        """Return whether the request fits its tenant's quota alone; refuse it on arrival if it does not."""
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
        """Count a request that starts to run."""
        self._running.setdefault(request.tenant, {})[request.arrival] = request

    def stop(self, request: TenantWaiting) -> None:
        """Stop counting a request that has ended or was preempted."""
        running = self._running[request.tenant]
        del running[request.arrival]
        if not running:
            del self._running[request.tenant]


def _num_at_end(request: TenantWaiting) -> int:
    return request.num_tokens + max(0, request.max_new_tokens - request.num_generated)
