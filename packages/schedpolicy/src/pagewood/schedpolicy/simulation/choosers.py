"""Simple ways to choose a replica for each request, for comparisons: the request is sent at once, and waits there."""

from collections.abc import Sequence
from random import Random
from typing import Protocol

from pagewood.schedpolicy.counts import require_count, require_real


class Chooser(Protocol):
    """Chooses a replica for each request, in the order of their arrival."""

    def choose(self, keys: Sequence[int], loads: Sequence[int]) -> int:
        """Return the number of the replica for a request.

        Args:
            keys: Keys of the request's pages that others can share.
            loads: Number of requests of each replica that have not ended.
        """
        ...


class RoundRobin:
    """Chooses replicas in turn, independent of load. Invariant: request counts differ by at most 1."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        """Start with replica 0."""
        self._next = 0

    def choose(self, keys: Sequence[int], loads: Sequence[int]) -> int:
        """Return the next in turn."""
        chosen = self._next
        self._next = (chosen + 1) % len(loads)
        return chosen


class LeastLoaded:
    """Chooses the replica with the fewest requests, ties by number. It needs the present load of every replica."""

    __slots__ = ()

    def choose(self, keys: Sequence[int], loads: Sequence[int]) -> int:
        """Return the least loaded."""
        return loads.index(min(loads))


class PowerOfTwo:
    """Chooses the less loaded of two random replicas: nearly as even as `LeastLoaded`, but reads only two loads.

    Source: M. Mitzenmacher, The power of two choices in randomized load balancing (2001).
    """

    __slots__ = ("_rng",)

    def __init__(self, rng: Random) -> None:
        """Use `rng`, which is drawn from twice per request."""
        self._rng = rng

    def choose(self, keys: Sequence[int], loads: Sequence[int]) -> int:
        """Return the less loaded of two."""
        one, other = self._rng.randrange(len(loads)), self._rng.randrange(len(loads))
        return min(one, other, key=lambda replica: (loads[replica], replica))


class PrefixAware:
    """Chooses the replica that last got the longest prefix of a request, or the least loaded if that is overloaded.

    A replica is overloaded if it has more than `slack` requests and more than `factor` times the mean. The router
    remembers what it sent, not what the replicas still cache, so it needs no messages from them.

    Invariant: if a prefix is known, so is every shorter one.

    Source: the cache-aware router of SGLang, in its simplest form.
    """

    __slots__ = ("_factor", "_sent", "_slack")

    def __init__(self, *, factor: float = 1.5, slack: int = 16) -> None:
        """Start with nothing sent.

        Args:
            factor: Load that a replica may have, as a multiple of the mean, >= 1.
            slack: Number of requests that a replica may have in any case, >= 0.

        Raises:
            ValueError: An argument is out of range.
        """
        require_real("factor", factor)
        if not factor >= 1:
            raise ValueError(f"factor must be >= 1, got {factor}")
        require_count("slack", slack, least=0)
        self._factor = factor
        self._slack = slack
        self._sent: dict[int, int] = {}

    def choose(self, keys: Sequence[int], loads: Sequence[int]) -> int:
        """Return the replica with the longest known prefix that is not overloaded."""
        sent = self._sent
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in sent:
                low = middle + 1
            else:
                high = middle
        chosen = sent[keys[low - 1]] if low else -1
        if chosen < 0 or loads[chosen] > max(self._slack, self._factor * sum(loads) / len(loads)):
            chosen = loads.index(min(loads))
        for key in keys:
            sent[key] = chosen
        return chosen


CHOOSERS = ("round-robin", "least-loaded", "prefix-aware", "power-of-two")


def chooser_named(name: str, *, seed: int) -> Chooser:
    """Return a chooser by name, with default parameters.

    Raises:
        ValueError: The name is unknown.
    """
    match name:
        case "round-robin":
            return RoundRobin()
        case "least-loaded":
            return LeastLoaded()
        case "prefix-aware":
            return PrefixAware()
        case "power-of-two":
            return PowerOfTwo(Random(f"power-of-two/{seed}"))
        case _:
            raise ValueError(f"router must be one of {', '.join(CHOOSERS)}, got {name!r}")
