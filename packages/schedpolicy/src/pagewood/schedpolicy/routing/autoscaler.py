"""How many replicas a fleet needs: from the requests that it has and the memory that they hold."""

from collections import deque
from dataclasses import dataclass
from math import ceil, inf

from pagewood.schedpolicy.counts import require_count, require_real


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLoad:
    """The load of all replicas together.

    Attributes:
        num_replicas: Replicas that take requests, those that start included.
        num_requests: Requests on replicas.
        num_waiting: Requests that wait for a place.
        kv_use: Mean part of the replicas' KV memory that running requests hold, from 0 to 1; 0 without replicas.
    """

    num_replicas: int
    num_requests: int
    num_waiting: int
    kv_use: float = 0.0


class Autoscaler:
    """Decides the number of replicas.

    It is what the requests need so that `target_use` of the places are taken, or what their memory needs so that
    `target_use` of it is taken, whichever is more. It grows at once, and shrinks to the most that was needed in the
    last `shrink_after_s`. Without any request for `zero_after_s` it is `min_replicas`, which may be 0; otherwise at
    least 1.

    Invariant: what `decide` returns is in [min_replicas, max_replicas].
    """

    __slots__ = (
        "_busy_s", "_max_replicas", "_min_replicas", "_needed", "_num_places", "_shrink_after_s", "_target_use",
        "_zero_after_s",
    )  # fmt: skip

    def __init__(
        self,
        *,
        min_replicas: int,
        max_replicas: int,
        num_places: int,
        target_use: float = 0.8,
        shrink_after_s: float = 60.0,
        zero_after_s: float = 300.0,
    ) -> None:
        """Start without load.

        Args:
            min_replicas: Least number, >= 0.
            max_replicas: Greatest number, >= `min_replicas`, >= 1.
            num_places: Requests that a replica runs at once, >= 1.
            target_use: Part of places and memory that should be taken, > 0 and <= 1.
            shrink_after_s: Time for which fewer replicas must be enough, >= 0.
            zero_after_s: Time without requests after which no more than `min_replicas` are needed, >= 0.

        Raises:
            ValueError: An argument is out of range.
        """
        self._min_replicas = require_count("min_replicas", min_replicas, least=0)
        self._max_replicas = require_count("max_replicas", max_replicas, least=max(1, min_replicas))
        self._num_places = require_count("num_places", num_places, least=1)
        require_real("target_use", target_use)
        if not 0 < target_use <= 1:
            raise ValueError(f"target_use must be in (0, 1], got {target_use}")
        for name, value in (("shrink_after_s", shrink_after_s), ("zero_after_s", zero_after_s)):
            require_real(name, value)
            if not value >= 0:
                raise ValueError(f"{name} must be >= 0, got {value}")
        self._target_use = target_use
        self._shrink_after_s = shrink_after_s
        self._zero_after_s = zero_after_s
        self._busy_s = -inf  # when there was a request for the last time; written by: decide
        # Time and need, needs falling; written by: decide.
        self._needed: deque[tuple[float, int]] = deque()

    def decide(self, load: FleetLoad, now_s: float) -> int:
        """Return how many replicas there should be; call it regularly, with a time that does not fall."""
        num_requests = load.num_requests + load.num_waiting
        if num_requests:
            self._busy_s = now_s
        by_requests = ceil(num_requests / (self._num_places * self._target_use))
        by_memory = ceil(load.num_replicas * load.kv_use / self._target_use)
        now = max(by_requests, by_memory)
        needed = self._needed
        while needed and needed[-1][1] <= now:
            needed.pop()
        needed.append((now_s, now))
        while needed[0][0] < now_s - self._shrink_after_s:
            needed.popleft()
        wanted = max(needed[0][1], int(now_s - self._busy_s < self._zero_after_s))
        return min(max(wanted, self._min_replicas), self._max_replicas)
