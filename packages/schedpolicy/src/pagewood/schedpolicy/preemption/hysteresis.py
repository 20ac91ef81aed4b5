"""A bound on how often waiting requests preempt the same running request, and on the work that this repeats."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

from pagewood.schedpolicy.counts import require_count, require_real
from pagewood.schedpolicy.preemption.victim import PREEMPTION_THRESHOLD, worth_preempting
from pagewood.schedpolicy.requests import Running, Waiting

R = TypeVar("R", bound=Running)


class PreemptionGuard(Generic[R]):
    """`worth_preempting`, except that a request is spared until it has grown since it was last chosen.

    Invariant: each time that a request is chosen, it has at least `1 + growth` times the tokens of the last time.

    Without this, a stream of ever higher priorities preempts the same requests again and again, and their tokens are
    computed again each time. With it, let a request be chosen with `n_1, n_2, ..., n_k` tokens. Then
    `n_i <= n_k / (1 + growth) ** (k - i)`, so `k <= 1 + log(n_k / n_1) / log(1 + growth)`, and the tokens that are
    computed again are `n_1 + ... + n_k <= n_k * (1 + growth) / growth`: at most three times its length at the default.
    Between two times it generates at least `growth` times its length, which takes a step for each token at least
    without speculation.

    Preemptions because memory has run out are not limited: they are necessary. Not thread-safe.

    Attributes:
        num_spared: Waiting requests that the guard kept from preempting others; repeated calls for the same request
            count once, unless one for another request came in between.
    """

    __slots__ = ("_growth", "_last_candidate", "_lengths", "_max_remembered", "num_spared")

    def __init__(self, *, growth: float = 0.5, max_remembered: int = 65_536) -> None:
        """Start without remembered requests.

        Args:
            growth: Part of its length by which a request must grow before it is chosen again, >= 0 and finite. With 0
                nothing is spared.
            max_remembered: Requests that are remembered, >= 1. If there are more, those chosen longest ago are
                forgotten, and can be chosen again.

        Raises:
            ValueError: An argument is out of range or of another type.
        """
        require_real("growth", growth)
        if not 0 <= growth < math.inf:
            raise ValueError(f"growth must be >= 0 and finite, got {growth}")
        self._growth = growth
        self._max_remembered = require_count("max_remembered", max_remembered, least=1)
        # Tokens of a request when it was last chosen, by arrival; last chosen last.
        self._lengths: OrderedDict[int, int] = OrderedDict()  # written by: choose
        self._last_candidate: int | None = None  # written by: choose
        self.num_spared = 0  # written by: choose

    def eligible(self, candidate: Waiting, running: Sequence[R], threshold: int = PREEMPTION_THRESHOLD) -> list[R]:
        """Return the running requests that `choose` may return for `candidate`; none of them counts as preempted.

        What memory needs beyond its own tokens depends on which requests run. A caller that counts this in
        `num_missing` should leave out what it would need for these.
        """
        require_count("threshold", threshold, least=0)
        return [one for one in self._grown(running) if candidate.priority - one.priority > threshold]

    def choose(
        self, candidate: Waiting, running: Sequence[R], threshold: int = PREEMPTION_THRESHOLD, *, num_missing: int = 1
    ) -> list[R]:
        """Return the requests to preempt so that `candidate` can run, or an empty list; see `worth_preempting`.

        Those that are returned count as preempted.

        Raises:
            ValueError: `threshold` or `num_missing` is out of range or not an integer.
        """
        lengths, grown = self._lengths, self._grown(running)
        victims = worth_preempting(candidate, grown, threshold, num_missing=num_missing)
        if not victims and len(grown) < len(running) and candidate.arrival != self._last_candidate:
            self._last_candidate = candidate.arrival
            self.num_spared += bool(worth_preempting(candidate, running, threshold, num_missing=num_missing))
        for victim in victims:
            lengths[victim.arrival] = victim.num_tokens
            lengths.move_to_end(victim.arrival)
        while len(lengths) > self._max_remembered:
            lengths.popitem(last=False)
        return victims

    def _grown(self, running: Sequence[R]) -> list[R]:
        """Return those that have grown enough since they were last chosen."""
        lengths, factor = self._lengths, 1 + self._growth
        return [one for one in running if one.num_tokens >= factor * lengths.get(one.arrival, 0)]
