"""In which order waiting requests are considered for admission."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol, TypeVar

from pagewood.schedpolicy.requests import Waiting

W = TypeVar("W", bound=Waiting)

# Sorting once per key, the weightiest last, is faster than once by a tuple, since these getters run in C.
_by_arrival = attrgetter("arrival")
_by_priority = attrgetter("priority")


class Order(Protocol):
    """Sorts the queue. An order is a pure function: the input is not changed, and equal requests keep their order."""

    @property
    def needs_match(self) -> bool:
        """Whether `num_matched` of every waiting request must be up to date."""
        ...

    def __call__(self, waiting: Sequence[W], now_s: float) -> list[W]:
        """Return `waiting`, first to be admitted first."""
        ...


@dataclass(frozen=True, slots=True)
class FirstComeFirstServed:
    """By priority, then by arrival.

    Within a priority nobody is overtaken, and a preempted request comes back to its old place.
    """

    @property
    def needs_match(self) -> bool:
        """False: the cache does not matter here."""
        return False

    def __call__(self, waiting: Sequence[W], now_s: float) -> list[W]:
        """Return `waiting`, first to be admitted first."""
        ordered = sorted(waiting, key=_by_arrival)
        ordered.sort(key=_by_priority, reverse=True)
        return ordered


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestPrefixMatch:
    """By priority, then by cached prefix with ageing: the greatest `num_matched + age_weight * waited_s` goes first.

    Serving requests with a long cached prefix first uses the cache before it is evicted, but alone it starves those
    with none. With ageing, a request is overtaken, within its priority, only by requests that arrived less than
    `(max_match - num_matched) / age_weight` seconds after it, where `max_match` is the longest prefix that can be
    cached: at the default weight, 32 s for a request without a match where contexts reach 32,000 tokens. A priority
    can still starve a lower one.

    Source: the cache-aware order of RadixAttention (SGLang, arXiv 2312.07104), to which the ageing is added.

    Attributes:
        age_weight: Tokens of match that one second of waiting is worth, > 0 and finite.
    """

    age_weight: float = 1000.0

    def __post_init__(self) -> None:
        if not 0 < self.age_weight < math.inf:
            raise ValueError(f"age_weight must be > 0 and finite, got {self.age_weight}")

    @property
    def needs_match(self) -> bool:
        """True."""
        return True

    def __call__(self, waiting: Sequence[W], now_s: float) -> list[W]:
        """Return `waiting`, first to be admitted first."""
        age_weight = self.age_weight
        ordered = sorted(waiting, key=_by_arrival)
        # All ages grow alike, so `now_s` adds the same to every side of every comparison and drops out.
        ordered.sort(key=lambda request: age_weight * request.arrived_s - request.num_matched)
        ordered.sort(key=_by_priority, reverse=True)
        return ordered


def order_named(name: str) -> Order:
    """Return the order of that name, with its defaults: "fcfs" or "lpm".

    Raises:
        ValueError: There is none.
    """
    match name:
        case "fcfs":
            return FirstComeFirstServed()
        case "lpm":
            return LongestPrefixMatch()
        case _:
            raise ValueError(f"name must be one of fcfs, lpm, got {name!r}")
