"""How many draft tokens of a request the target will accept: estimates by position, of a request and of all."""

from collections.abc import Sequence

_PRIOR_RATE = 0.6
_PRIOR_WEIGHT = 6.0
_OWN_DECAY = 0.97
_ALL_DECAY = 0.98
_IDLE_DECAY = 0.995
_IDLE_EVERY = 8


class Acceptance:
    """Acceptance of all requests by position; a new request starts from it.

    The rate of a position is the probability that its draft token is accepted, given that it was drafted and that
    those before it were accepted. It is a decayed mean with a Beta prior, whose mean is the rate of the position before
    (that of the first is `prior`). Evidence of a position that is no longer drafted fades slowly, so that longer drafts
    are tried again. Nothing fades while nothing is drafted: after a load without drafts, the rates are what they were.
    """

    __slots__ = (
        "_accepted",
        "_drafted",
        "_num_found",
        "_num_granted",
        "_prior",
        "_weight",
        "fill",
        "num_steps",
        "rates",
    )

    def __init__(self, max_tokens: int, *, prior: float = _PRIOR_RATE, weight: float = _PRIOR_WEIGHT) -> None:
        """Start without evidence.

        Args:
            max_tokens: Positions, >= 1.
            prior: Rate that is assumed without evidence, in (0, 1).
            weight: Observations that the prior counts for, here and in each request, >= 0.

        Raises:
            ValueError: One of them is out of its range.
        """
        if not 0 < prior < 1:
            raise ValueError(f"prior must be in (0, 1), got {prior}")
        if not weight >= 0:
            raise ValueError(f"weight must be >= 0, got {weight}")
        self._prior, self._weight = prior, weight
        self._accepted = [0.0] * max_tokens  # written by: Acceptance
        self._drafted = [0.0] * max_tokens  # written by: Acceptance
        self._num_granted = weight  # written by: Acceptance
        self._num_found = weight  # written by: Acceptance
        self.num_steps = 0
        """Steps that drafted."""  # written by: Acceptance
        self.rates = [prior] * max_tokens
        """[max_tokens], the rate of each position."""  # written by: Acceptance
        self.fill = 1.0
        """Drafted tokens as a part of granted ones."""  # written by: Acceptance

    def observe(self, granted: Sequence[int], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Learn from a step that drafted: granted, drafted and accepted tokens of each of its requests."""
        max_tokens = len(self.rates)
        tried, passed = [0] * (max_tokens + 1), [0] * (max_tokens + 1)
        for found, taken in zip(drafted, accepted, strict=True):
            tried[min(found, taken + 1)] += 1
            passed[taken] += 1
        self.num_steps += 1
        self._num_granted = self._num_granted * _ALL_DECAY + sum(granted)
        self._num_found = self._num_found * _ALL_DECAY + sum(drafted)
        self.fill = self._num_found / max(self._num_granted, 1e-9)
        num_tried = num_passed = 0
        for index in range(max_tokens - 1, -1, -1):
            num_tried += tried[index + 1]
            num_passed += passed[index + 1]
            decay = _ALL_DECAY if num_tried else _IDLE_DECAY
            self._drafted[index] = self._drafted[index] * decay + num_tried
            self._accepted[index] = self._accepted[index] * decay + num_passed
        rate, weight = self._prior, self._weight
        for index, (num_drafted, num_accepted) in enumerate(zip(self._drafted, self._accepted, strict=True)):
            if num_drafted + weight:
                rate = (num_accepted + weight * rate) / (num_drafted + weight)
            self.rates[index] = rate

    def estimate(self) -> "Estimate":
        """Return the estimate of a new request."""
        return Estimate(self, self._weight)


class Estimate:
    """Acceptance of one request, shrunk towards that of all requests.

    `survival[i]` is the probability that positions 0 to i are all accepted, if they are drafted. The prior mean of a
    position is the rate of all requests there, times the ratio by which this request differs from it at the position
    before. Invariant: `survival` never rises from one position to the next.
    """

    __slots__ = ("_accepted", "_all", "_drafted", "_num_found", "_num_granted", "_num_seen", "_seen_at", "_weight",
                 "fill", "is_stale", "length", "survival")  # fmt: skip

    def __init__(self, everyone: Acceptance, weight: float) -> None:
        """Start from the acceptance of all requests.

        Args:
            everyone: That acceptance.
            weight: Observations that it counts for.
        """
        self._all, self._weight = everyone, weight
        self._accepted = [0.0] * len(everyone.rates)  # written by: Estimate
        self._drafted = [0.0] * len(everyone.rates)  # written by: Estimate
        self._num_granted = self._num_found = 0.0  # written by: Estimate
        self._num_seen = 0  # written by: Estimate
        self._seen_at = everyone.num_steps  # written by: Estimate
        self.length = -1
        """Draft tokens of the latest decision; -1 before the first."""  # written by: drafting.decisions
        self.is_stale = False
        """Whether there are observations that `survival` does not have yet."""  # written by: Estimate
        self.survival: list[float] = []
        """[max_tokens], as above."""  # written by: Estimate
        self.fill = 1.0
        """Drafted tokens as a part of granted ones."""  # written by: Estimate
        self.refresh()

    @property
    def num_observations(self) -> float:
        """Observations of the first position, decayed."""
        return self._drafted[0]

    def observe(self, granted: int, drafted: int, accepted: int) -> None:
        """Learn from a step that granted at least one token."""
        own_drafted, own_accepted = self._drafted, self._accepted
        for index in range(accepted):
            own_drafted[index] = own_drafted[index] * _OWN_DECAY + 1
            own_accepted[index] = own_accepted[index] * _OWN_DECAY + 1
        if accepted < drafted:
            own_drafted[accepted] = own_drafted[accepted] * _OWN_DECAY + 1
            own_accepted[accepted] *= _OWN_DECAY
        self._num_granted = self._num_granted * _OWN_DECAY + granted
        self._num_found = self._num_found * _OWN_DECAY + drafted
        self._num_seen += 1
        if self._num_seen % _IDLE_EVERY == 0:
            self._fade(_IDLE_DECAY**_IDLE_EVERY, first=min(accepted + 1, drafted))
        self._seen_at = self._all.num_steps
        self.is_stale = True

    def refresh(self) -> None:
        """Compute `survival` and `fill` anew, with the rates of all requests as they are now."""
        num_idle = self._all.num_steps - self._seen_at
        if num_idle > 1:
            self._fade(_IDLE_DECAY**num_idle, first=0)
            self._seen_at = self._all.num_steps
        weight = self._weight
        ratio = product = 1.0
        survival: list[float] = []
        for accepted, drafted, rate in zip(self._accepted, self._drafted, self._all.rates, strict=True):
            mean = rate * ratio
            if mean > 0.98:
                mean = 0.98
            if drafted + weight:
                mean = (accepted + weight * mean) / (drafted + weight)
            ratio = mean / rate if rate else 1.0
            product *= mean
            survival.append(product)
        self.survival = survival
        self.fill = (self._num_found + weight * self._all.fill) / max(self._num_granted + weight, 1e-9)
        self.is_stale = False

    def _fade(self, factor: float, *, first: int) -> None:
        self._drafted[first:] = [value * factor for value in self._drafted[first:]]
        self._accepted[first:] = [value * factor for value in self._accepted[first:]]
