"""What decides on a simulated replica: the very objects that an engine runs, by name."""

from dataclasses import dataclass

from pagewood.schedpolicy.budget import Budget
from pagewood.schedpolicy.deadlines import Feasibility
from pagewood.schedpolicy.names import order_named
from pagewood.schedpolicy.order import Order
from pagewood.schedpolicy.quotas import Quotas
from pagewood.schedpolicy.reserve import NewTokenRatio
from pagewood.schedpolicy.simulation.request import SimRequest
from pagewood.schedpolicy.skip_ahead import SkipAhead
from pagewood.schedpolicy.victim import VictimRank, by_least_output, by_lowest_priority


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """The objects of one replica, none of them shared with another.

    Attributes:
        order: Who is considered first; told of every change of a match.
        budget: What a step may take.
        reserve: What is kept for tokens to come.
        skip_ahead: How far admission goes past a request that does not fit.
        victim: Who yields when memory runs out: the smallest rank.
        quotas: What a tenant may hold; None for no limits.
        feasibility: What refuses requests that would miss their deadline; None to let them try.
    """

    order: Order[SimRequest]
    budget: Budget
    reserve: NewTokenRatio
    skip_ahead: SkipAhead
    victim: VictimRank[SimRequest] = by_lowest_priority
    quotas: Quotas | None = None
    feasibility: Feasibility | None = None


DEFAULT_BUDGET = Budget(max_step_tokens=2048, max_chunk_tokens=None, max_running=256, max_prefills=8)
VICTIMS = ("priority", "least-output")


def policies_named(
    order: str,
    *,
    budget: Budget = DEFAULT_BUDGET,
    victim: str = "priority",
    quotas: Quotas | None = None,
    feasibility: Feasibility | None = None,
    seed: int = 0,
) -> Policies:
    """Return policies by name, with the defaults of everything else.

    Args:
        order: One of `pagewood.schedpolicy.names.ORDERS`.
        budget: What a step may take.
        victim: One of `VICTIMS`.
        quotas: What a tenant may hold; not shared with another replica.
        feasibility: What refuses requests that would miss their deadline.
        seed: Of an order that draws random numbers.

    Raises:
        ValueError: There is no such order or victim.
    """
    if victim not in VICTIMS:
        raise ValueError(f"victim must be one of {', '.join(VICTIMS)}, got {victim!r}")
    return Policies(
        order=order_named(order, seed=seed, told=True),
        budget=budget,
        reserve=NewTokenRatio(),
        skip_ahead=SkipAhead(max_skipped=8, max_passes=16),
        victim=by_lowest_priority if victim == "priority" else by_least_output,
        quotas=quotas,
        feasibility=feasibility,
    )
