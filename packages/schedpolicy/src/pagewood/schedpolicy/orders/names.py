"""Orders by name, as given on a command line, with default parameters."""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from pagewood.schedpolicy.orders.adaptive import AdaptiveOrder
from pagewood.schedpolicy.orders.depth_first import DepthFirstWeight
from pagewood.schedpolicy.orders.multilevel import MultilevelOrder
from pagewood.schedpolicy.orders.order import Order
from pagewood.schedpolicy.orders.ranked import (
    ByLongestMatch,
    ByRemaining,
    ByShortest,
    RankedOrder,
    by_deadline,
    by_longest_output,
    by_priority,
    by_priority_low_first,
)
from pagewood.schedpolicy.orders.shares import fair_share, weighted_round_robin
from pagewood.schedpolicy.orders.shuffled import Draws, ShuffledOrder
from pagewood.schedpolicy.orders.tagged import TagAffinity

PLAIN_ORDERS = ("fcfs", "priority", "priority-low", "lpm", "lof", "shortest", "srtf", "random", "adaptive")
"""Names of the orders that read only the attributes of `Waiting`."""

ORDERS = (*PLAIN_ORDERS, "dfs-weight", "fair", "edf", "wrr", "tag")
"""Names of all orders."""

MATCH_ORDERS = ("lpm", "shortest", "srtf", "adaptive", "dfs-weight")
"""Names of the orders that compare waiting requests by `num_matched`.

"fair" reads it too, but only for requests that it has just yielded."""


def order_named(
    name: str, *, seed: int = 0, notified: bool = False, weights: Mapping[str, float] | None = None
) -> Order[Any]:
    """Return an empty order by name, with default parameters; most orders compare priorities first.

    Requests need the attributes that the order reads: `Waiting` for those in `PLAIN_ORDERS`, and in addition
    `HasPrefix` for "dfs-weight", `HasTenant` for "fair", `HasDeadline` for "edf", `HasClass` for "wrr" and `HasTag` for
    "tag".

    Args:
        name: One of `ORDERS`; underscores and hyphens are the same.
        seed: Seed of "random".
        notified: Whether the caller calls `update` on every change of `num_matched`; if not, each pass reads them all.
        weights: Shares of tenants for "fair", of classes for "wrr", > 0; 1 for those that are not named.

    Raises:
        ValueError: There is no order of that name.
    """

    def ranked(rank: Callable[[Any], tuple[float, ...]], *, reads_match: bool = False) -> Order[Any]:
        return RankedOrder[Any](rank, reads_match=reads_match, notified=notified)

    def by_level(make_order: Callable[[], Order[Any]]) -> Order[Any]:
        return MultilevelOrder[Any](attrgetter("priority"), make_order)

    match name.replace("_", "-"):
        case "fcfs" | "priority":
            return ranked(by_priority)
        case "priority-low":
            return ranked(by_priority_low_first)
        case "lpm":
            return ranked(ByLongestMatch(), reads_match=True)
        case "lof":
            return ranked(by_longest_output)
        case "shortest":
            return ranked(ByShortest(), reads_match=True)
        case "srtf":
            return ranked(ByRemaining(), reads_match=True)
        case "random":
            draws = Draws(seed)
            return by_level(lambda: ShuffledOrder[Any](draws))
        case "adaptive":
            return AdaptiveOrder[Any](
                lambda: order_named("lpm", notified=notified), lambda: order_named("fcfs", notified=notified)
            )
        case "dfs-weight":
            return by_level(lambda: DepthFirstWeight[Any](notified=notified))
        case "fair":
            return fair_share(weights=weights)
        case "edf":
            return ranked(by_deadline)
        case "wrr":
            return weighted_round_robin(weights or {})
        case "tag":
            return TagAffinity[Any]()
        case _:
            raise ValueError(f"name must be one of {', '.join(ORDERS)}, got {name!r}")
