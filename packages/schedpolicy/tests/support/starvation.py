"""How long an order lets requests wait."""

from collections.abc import Callable
from random import Random
from typing import Any

from pagewood.schedpolicy.orders.order import Order
from pagewood.schedpolicy.testing import random_request


def longest_wait(
    order: Order[Any],
    rng: Random,
    *,
    num_waiting: int,
    num_admissions: int,
    make_request: Callable[[Random, int, float], Any] = random_request,
) -> int:
    """Return the most admissions for which a request waited, while `num_waiting` requests wait at any time.

    Each pass admits its first request, which ends at once and is replaced by a new random request; passes are a second
    apart. Requests that are never admitted count with the time that they have waited: if the order starves a request,
    the result is nearly `num_admissions`.
    """
    since: dict[int, int] = {}
    longest = 0
    for number in range(num_admissions):
        while len(since) < num_waiting:
            arrival = number + len(since)
            order.add(make_request(rng, arrival, float(number)))
            since[arrival] = number
        request = next(order.ordered(float(number)))
        order.admit(request)
        order.stop(request)
        longest = max(longest, number - since.pop(request.arrival))
    return max(longest, num_admissions - min(since.values()))
