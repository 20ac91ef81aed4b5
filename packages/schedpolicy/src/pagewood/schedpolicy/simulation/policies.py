"""The policies of a simulated replica by name: the same objects that an engine uses."""

from collections.abc import Callable
from dataclasses import dataclass

from pagewood.schedpolicy.admission.deadlines import Feasibility
from pagewood.schedpolicy.admission.deferral import InBatchDeferral
from pagewood.schedpolicy.admission.quotas import Quotas
from pagewood.schedpolicy.admission.skip_ahead import SkipAhead
from pagewood.schedpolicy.memory.reserve import NewTokenRatio
from pagewood.schedpolicy.orders.ageing import Ageing
from pagewood.schedpolicy.orders.fallback import FallbackAbove
from pagewood.schedpolicy.orders.names import ORDERS, order_named
from pagewood.schedpolicy.orders.order import Order
from pagewood.schedpolicy.orders.ranked import ByLongestMatch, RankedOrder
from pagewood.schedpolicy.preemption.victim import by_least_output, by_lowest_priority
from pagewood.schedpolicy.simulation.request import SimRequest
from pagewood.schedpolicy.steps.budget import Budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """The policy objects of one replica; replicas must not share them.

    Attributes:
        order: Which request is considered first; it is notified of every change of a match.
        budget: Limits of a step.
        reserve: Memory to reserve for tokens that requests will generate.
        skip_ahead: How far admission looks past a request that does not fit.
        deferral: Parks requests that repeat a prompt in progress; None to park none.
        victim: Which request is preempted when memory runs out: the one with the smallest rank.
        quotas: Limits of tenants; None for no limits.
        feasibility: Refuses requests that would miss their deadline; None to accept all.
    """

    order: Order[SimRequest]
    budget: Budget
    reserve: NewTokenRatio
    skip_ahead: SkipAhead
    deferral: InBatchDeferral[SimRequest] | None = None
    victim: Callable[[SimRequest], tuple[float, ...]] = by_lowest_priority
    quotas: Quotas | None = None
    feasibility: Feasibility | None = None


DEFAULT_BUDGET = Budget(max_step_tokens=2048, max_chunk_tokens=None, max_running=256, max_prefills=8)
VICTIMS = ("priority", "least-output")
SGLANG_ORDERS = ("lpm-unaged", "lpm-sglang")
"""For comparisons: lpm without ageing, and the same with SGLang's fallback to fcfs above 128 waiting requests."""
EXTRAS = ("age", "defer")
"""Suffixes of a name, as in `lpm+defer`: a bound on waiting, and in-batch prefix deferral."""

_AGE_AFTER_S = 10.0


def check_policy(name: str) -> None:
    """Check that `policies_named` knows a name.

    Raises:
        ValueError: The name is unknown.
    """
    base, *extras = name.split("+")
    known = (*ORDERS, *SGLANG_ORDERS)
    if base not in known:
        raise ValueError(f"policy must be one of {', '.join(known)}, got {base!r}")
    for extra in extras:
        if extra not in EXTRAS:
            raise ValueError(f"policy {base} must be followed by +{' or +'.join(EXTRAS)}, got +{extra}")


def policies_named(
    policy: str,
    *,
    page_size: int,
    budget: Budget = DEFAULT_BUDGET,
    victim: str = "priority",
    quotas: Quotas | None = None,
    feasibility: Feasibility | None = None,
    seed: int = 0,
) -> Policies:
    """Return policies by name, with defaults for everything else.

    Args:
        policy: An order: one of `ORDERS` or `SGLANG_ORDERS`, and any of `EXTRAS`, as in `lpm+defer+age`.
        page_size: Tokens per page.
        budget: Limits of a step.
        victim: One of `VICTIMS`.
        quotas: Limits of tenants; not shared with another replica.
        feasibility: Refuses requests that would miss their deadline.
        seed: Seed of an order that draws random numbers.

    Raises:
        ValueError: The policy or victim is unknown.
    """
    check_policy(policy)
    if victim not in VICTIMS:
        raise ValueError(f"victim must be one of {', '.join(VICTIMS)}, got {victim!r}")
    base, *extras = policy.split("+")
    order = _order(base, seed)
    if "age" in extras:
        order = Ageing[SimRequest](order, after_s=_AGE_AFTER_S)
    return Policies(
        order=order,
        budget=budget,
        reserve=NewTokenRatio(),
        skip_ahead=SkipAhead(max_skipped=8, max_passes=32),
        deferral=InBatchDeferral[SimRequest](page_size=page_size) if "defer" in extras else None,
        victim=by_lowest_priority if victim == "priority" else by_least_output,
        quotas=quotas,
        feasibility=feasibility,
    )


def _order(name: str, seed: int) -> Order[SimRequest]:
    if name not in SGLANG_ORDERS:
        return order_named(name, seed=seed, notified=True)
    unaged = RankedOrder[SimRequest](ByLongestMatch(age_weight=0), reads_match=True, notified=True)
    return unaged if name == "lpm-unaged" else FallbackAbove[SimRequest](unaged, order_named("fcfs"))
