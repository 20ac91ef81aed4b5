"""Limits on what one tenant may hold at once."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pagewood.schedpolicy.counts import require_count
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
            if value is not None:
                require_count(name, value, least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a tenant holds now."""

    num_running: int
    num_tokens_in_flight: int
    num_kv_tokens: int


class Quotas:
    """Counts what tenants hold, and checks requests against the quotas.

    The caller passes over a request whose tenant is at its limit. The request is not refused, and other requests do not
    wait for it.
    Invariant: if requests are admitted only where `check` allows it, no tenant exceeds its `max_running` or
    `max_tokens_in_flight`, and no admission exceeds `max_kv_tokens`; running requests may exceed it by the tokens that
    they generate. A preempted request with more than `max_kv_tokens` runs again when its tenant runs nothing else. So
    every request that `can_ever_run` allows runs in the end.

    The cost of a check does not depend on how many requests run, except for tenants with a `max_kv_tokens`.
    """

    __slots__ = ("_default", "_held", "_quotas")

    def __init__(self, quotas: Mapping[str, Quota], *, default: Quota | None = None) -> None:
        """Start with no running requests.

        Args:
            quotas: Quotas by tenant.
            default: Quota of tenants that are not in `quotas`; None for no limits.
        """
        self._quotas = dict(quotas)
        self._default = default or Quota()
        # What tenants with running requests hold; written by: admit, stop.
        self._held: dict[str, _Held] = {}

    def check(self, request: TenantWaiting) -> Verdict:
        """Return whether the tenant may run the request now; if not, requests of other tenants may still fit."""
        held = self._held.get(request.tenant)
        if held is None:
            if request.num_generated:  # it ran before, and has outgrown `max_kv_tokens` at most
                return FITS
            return self.can_ever_run(request)
        quota = self._quotas.get(request.tenant, self._default)
        if quota.max_running is not None and len(held.requests) >= quota.max_running:
            return _over("max_running", 1, 0)
        for name, limit, used, wanted in (
            ("max_tokens_in_flight", quota.max_tokens_in_flight, held.num_at_end, _num_at_end(request)),
            ("max_kv_tokens", quota.max_kv_tokens, None, request.num_tokens),
        ):
            if limit is None:
                continue
            left = limit - (held.num_kv if used is None else used)
            if wanted > left:
                return _over(name, wanted, max(0, left))
        return FITS

    def can_ever_run(self, request: TenantWaiting) -> Verdict:
        """Return whether the request fits its tenant's quota alone; refuse it on arrival if it does not."""
        quota = self._quotas.get(request.tenant, self._default)
        for name, limit, wanted in (
            ("max_tokens_in_flight", quota.max_tokens_in_flight, _num_at_end(request)),
            ("max_kv_tokens", quota.max_kv_tokens, request.num_tokens),
        ):
            if limit is not None and wanted > limit:
                return _over(name, wanted, limit)
        return FITS

    def usage(self, tenant: str) -> Usage:
        """Return what a tenant holds now."""
        held = self._held.get(tenant) or _Held()
        return Usage(num_running=len(held.requests), num_tokens_in_flight=held.num_at_end, num_kv_tokens=held.num_kv)

    def admit(self, request: TenantWaiting) -> None:
        """Count a request that starts to run."""
        held = self._held.setdefault(request.tenant, _Held())
        num_at_end = _num_at_end(request)
        held.requests[request.arrival] = request, num_at_end
        held.num_at_end += num_at_end

    def stop(self, request: TenantWaiting) -> None:
        """Stop counting a request that has ended or was preempted."""
        held = self._held[request.tenant]
        _, num_at_end = held.requests.pop(request.arrival)
        held.num_at_end -= num_at_end
        if not held.requests:
            del self._held[request.tenant]


@dataclass(slots=True)
class _Held:
    """The running requests of a tenant. Invariant: `num_at_end` is the sum of those of `requests`."""

    requests: dict[int, tuple[TenantWaiting, int]] = field(default_factory=dict[int, tuple[TenantWaiting, int]])
    """Requests by arrival, each with its largest possible number of tokens at its end."""  # written by: Quotas
    num_at_end: int = 0  # written by: Quotas

    @property
    def num_kv(self) -> int:
        return sum(request.num_tokens for request, _ in self.requests.values())


def _over(name: str, wanted: int, left: int) -> Verdict:
    return Verdict(outcome=Outcome.OTHER, short_of=name, wanted=wanted, left=left)


def _num_at_end(request: TenantWaiting) -> int:
    return request.num_tokens + max(0, request.max_new_tokens - request.num_generated)
