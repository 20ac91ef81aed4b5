"""Weights of requests that share the rest of a step: by priority, and by lateness."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Protocol, TypeVar

from pagewood.schedpolicy.requests import HasDeadline, Running

_PER_PRIORITY = 1.25
_MOST_PRIORITY = 6
_MOST_LATE = 4.0


class HasPriority(Protocol):
    """A request with a priority."""

    @property
    def priority(self) -> int:
        """Higher is more urgent."""
        ...


R = TypeVar("R", bound=HasPriority)


class Urgent(Running, HasDeadline, Protocol):
    """The attributes that `WeightByUrgency` reads."""

    @property
    def arrived_s(self) -> float:
        """Time of its first arrival, on the clock of `deadline_s`."""
        ...


def weight_by_priority(request: HasPriority) -> float:
    """Return 1.25 to the power of the priority, which is limited to [-6, 6] (weights of 0.26 to 3.8)."""
    return _PER_PRIORITY ** min(_MOST_PRIORITY, max(-_MOST_PRIORITY, request.priority))


def relative_weights(requests: Sequence[R], weight: Callable[[R], float]) -> list[float] | None:
    """Return the weights of some requests, at least one, scaled to a mean of 1; None if all are equal."""
    if weight is weight_by_priority and len({request.priority for request in requests}) == 1:
        return None
    weights = [weight(request) for request in requests]
    mean = sum(weights) / len(weights)
    return [one / mean for one in weights] if min(weights) < max(weights) else None


class WeightByUrgency:
    """The weight by priority, times a factor in [1, 4] for a request that falls behind its deadline.

    The factor is the speed that the rest of its tokens needs, as a multiple of its speed since it arrived. It is 1 for
    a request without a deadline, in time, past its deadline, or without output, whose speed is unknown. All tokens that
    the request may have are counted, because its end is not known before.
    """

    __slots__ = ("_clock",)

    def __init__(self, clock: Callable[[], float]) -> None:
        """Read the time from `clock`, in seconds, as the deadlines of requests are."""
        self._clock = clock

    def __call__(self, request: Urgent) -> float:
        """Return the weight of a request, > 0."""
        weight = weight_by_priority(request) if request.priority else 1.0
        num_generated = request.num_generated
        if request.deadline_s == inf or num_generated <= 0:
            return weight
        now_s = self._clock()
        left_s, passed_s = request.deadline_s - now_s, now_s - request.arrived_s
        if left_s <= 0 or passed_s <= 0:
            return weight
        needed = (request.max_new_tokens - num_generated) / left_s
        return weight * min(_MOST_LATE, max(1.0, needed * passed_s / num_generated))
