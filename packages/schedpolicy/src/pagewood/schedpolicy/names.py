"""Orders by name, as a command line gives them, with their defaults."""

from collections.abc import Callable
from operator import attrgetter
from random import Random
from typing import Any

from pagewood.schedpolicy.adaptive import AdaptiveOrder
from pagewood.schedpolicy.depth_first import DepthFirstWeight
from pagewood.schedpolicy.order import Order
from pagewood.schedpolicy.ranked import (
    ByLongestMatch,
    ByShortest,
    RankedOrder,
    by_deadline,
    by_longest_output,
    by_priority,
    by_priority_low_first,
)
from pagewood.schedpolicy.response_ratio import HighestResponseRatio
from pagewood.schedpolicy.shares import fair_share, weighted_round_robin
from pagewood.schedpolicy.shuffled import ShuffledOrder
from pagewood.schedpolicy.tagged import TagAffinity
from pagewood.schedpolicy.tiers import Tiers

PLAIN_ORDERS = ("fcfs", "priority", "priority-low", "lpm", "lof", "shortest", "hrrn", "random", "adaptive")
"""Names of the orders that read nothing but what every `Waiting` request has."""

ORDERS = (*PLAIN_ORDERS, "dfs-weight", "fair", "edf", "wrr", "tag")
"""Names of all orders."""

MATCH_ORDERS = ("lpm", "shortest", "hrrn", "adaptive", "dfs-weight")
"""Names of the orders that compare waiting requests by `num_matched`.

"fair" reads it too, but only of a request that it has just yielded, which may be asked for then."""


def order_named(name: str, *, seed: int = 0, notified: bool = False) -> Order[Any]:
    """Return an empty order of that name, with its defaults; by priority first, where priorities make sense.

    What a request must have is what the order reads: those in `PLAIN_ORDERS` get by with `Waiting`, "dfs-weight" reads
    `HasPrefix`, "fair" `HasTenant`, "edf" `HasDeadline`, "wrr" `HasClass` and "tag" `HasTag`.

    Args:
        name: one of `ORDERS`; an underscore is as good as a hyphen.
        seed: of "random".
        notified: whether the caller calls `update` on every change of `num_matched`; if not, each pass reads them all.

    Raises:
        ValueError: There is no such order.
    """

    def ranked(rank: Callable[[Any], tuple[float, ...]], *, reads_match: bool = False) -> Order[Any]:
        return RankedOrder[Any](rank, reads_match=reads_match, notified=notified)

    def by_tier(make_order: Callable[[], Order[Any]]) -> Order[Any]:
        return Tiers[Any](attrgetter("priority"), make_order)

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
        case "hrrn":
            return by_tier(lambda: HighestResponseRatio[Any](notified=notified))
        case "random":
            rng = Random(seed)
            return by_tier(lambda: ShuffledOrder[Any](rng))
        case "adaptive":
            return AdaptiveOrder[Any](
                lambda: order_named("lpm", notified=notified), lambda: order_named("fcfs", notified=notified)
            )
        case "dfs-weight":
            return by_tier(lambda: DepthFirstWeight[Any](notified=notified))
        case "fair":
            return fair_share()
        case "edf":
            return ranked(by_deadline)
        case "wrr":
            return weighted_round_robin({})
        case "tag":
            return TagAffinity[Any]()
        case _:
            raise ValueError(f"name must be one of {', '.join(ORDERS)}, got {name!r}")
