"""How many draft tokens of a request the target will accept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_DECAY = 0.98
_OWN_DECAY = 0.95
_PRIOR_WEIGHT = 6.0
_MOST = 0.98
_NUM_IDLE = 16


class Decoding(Protocol):
    """The attributes of a decoding request that `DraftControl` reads."""

    @property
    def arrival(self) -> int:
        """Sequence number of its first arrival, unique."""
        ...

    @property
    def priority(self) -> int:
        """Higher is more urgent."""
        ...


class Own:
    """Observed acceptance of one request's drafts, compared with the rates of all requests."""

    __slots__ = ("accepted", "expected", "found", "granted", "length", "num_idle")

    def __init__(self) -> None:
        self.accepted = 0.0
        """Accepted draft tokens, decayed."""  # written by: Acceptance
        self.expected = 0.0
        """Accepted draft tokens that the rates of all requests predict, decayed in the same way."""
        # written by: Acceptance
        self.granted = 0.0
        """Granted draft tokens, decayed."""  # written by: Acceptance
        self.found = 0.0
        """Draft tokens that the drafter proposed, decayed in the same way."""  # written by: Acceptance
        self.length = 0
        """Draft tokens of the latest decision."""  # written by: DraftControl
        self.num_idle = 0
        """Decisions since then that gave it no drafts."""  # written by: Acceptance

    def halve(self) -> None:
        """Halve the weight of past observations."""
        self.accepted /= 2
        self.expected /= 2
        self.granted /= 2
        self.found /= 2


class Acceptance:
    """Acceptance rates by position over all requests, and how each request differs from them.

    The rate of a position is the probability that its draft token is accepted, if it was drafted and those before it
    were accepted: a decayed mean with a Beta prior, whose mean is the rate of the position before. Each request has two
    numbers of its own: a factor for all positions, and the part of its granted tokens that the drafter finds. Both
    start at the values of all requests. Observations do not fade while nothing is drafted. The exception: if only other
    requests get drafts, the observations of this one are halved from time to time, so that it is tried again.
    """

    __slots__ = ("_accepted", "_drafted", "_found", "_granted", "_known", "_prior", "rates")

    def __init__(self, max_tokens: int, *, prior: float) -> None:
        """Start without observations.

        Args:
            max_tokens: Positions, >= 1.
            prior: Rate that is assumed without observations, in (0, 1).

        Raises:
            ValueError: `prior` is out of its range.
        """
        if not 0 < prior < 1:
            raise ValueError(f"prior_acceptance must be in (0, 1), got {prior}")
        self._prior = prior
        self._accepted = [0.0] * max_tokens  # written by: Acceptance
        self._drafted = [0.0] * max_tokens  # written by: Acceptance
        self._granted = self._found = _PRIOR_WEIGHT  # written by: Acceptance
        self._known: dict[int, Own] = {}
        """By arrival."""  # written by: Acceptance
        self.rates = [prior] * max_tokens
        """[max_tokens], rates of all requests."""  # written by: Acceptance

    def __len__(self) -> int:
        """Return the number of requests that have a record."""
        return len(self._known)

    def of(self, request: Decoding) -> Own:
        """Return the record of a request; make an empty one for a new request."""
        own = self._known.get(request.arrival)
        if own is None:
            own = self._known[request.arrival] = Own()
        return own

    def latest_length(self, request: Decoding, usual: int) -> int:
        """Return the draft tokens of a request in the latest decision, or `usual` if it is new since then."""
        own = self._known.get(request.arrival)
        return usual if own is None else own.length

    def forget(self, request: Decoding) -> None:
        """Drop the record of a request."""
        self._known.pop(request.arrival, None)

    def fill(self, own: Own) -> float:
        """Return the part of the granted draft tokens of a request that the drafter finds."""
        everyone = self._found / self._granted
        return (own.found + _PRIOR_WEIGHT * everyone) / (own.granted + _PRIOR_WEIGHT)

    def survival(self, own: Own) -> list[float]:
        """Return the probabilities that the first i + 1 drafts of a request are all accepted, if they are found."""
        factor = (own.accepted + _PRIOR_WEIGHT) / (own.expected + _PRIOR_WEIGHT)
        product, survival = 1.0, list[float]()
        for rate in self.rates:
            product *= min(_MOST, rate * factor)
            survival.append(product)
        return survival

    def skip(self, own: Own) -> None:
        """Record that a decision gave drafts to other requests but not to this one."""
        own.num_idle += 1
        if own.num_idle % _NUM_IDLE == 0:
            own.halve()

    def hope(self) -> None:
        """Reduce the weight of bad results, because drafts are tried again after a pause."""
        for own in self._known.values():
            if own.accepted < own.expected:
                own.halve()
        for index, (accepted, drafted) in enumerate(zip(self._accepted, self._drafted, strict=True)):
            if accepted < self._prior * drafted:
                self._accepted[index], self._drafted[index] = accepted / 4, drafted / 4
        self._granted, self._found = (self._granted + 3 * _PRIOR_WEIGHT) / 4, (self._found + 3 * _PRIOR_WEIGHT) / 4
        self._update_rates()

    def observe(
        self, requests: Sequence[Decoding], granted: Sequence[int], drafted: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Learn from drafts, given each request's granted, drafted and accepted tokens."""
        max_tokens, rates = len(self.rates), self.rates
        tried, passed = [0] * (max_tokens + 1), [0] * (max_tokens + 1)
        for request, allowed, found, taken in zip(requests, granted, drafted, accepted, strict=True):
            tried[min(found, taken + 1)] += 1
            passed[taken] += 1
            own = self._known.get(request.arrival)
            if own is None:
                continue
            own.num_idle = 0
            own.accepted = own.accepted * _OWN_DECAY + taken
            own.expected = own.expected * _OWN_DECAY + sum(rates[: min(found, taken + 1)])
            own.granted = own.granted * _OWN_DECAY + allowed
            own.found = own.found * _OWN_DECAY + found
        self._granted = self._granted * _DECAY + sum(granted)
        self._found = self._found * _DECAY + sum(drafted)
        num_tried = num_passed = 0
        for index in range(max_tokens - 1, -1, -1):
            num_tried += tried[index + 1]
            num_passed += passed[index + 1]
            if num_tried:
                self._drafted[index] = self._drafted[index] * _DECAY + num_tried
                self._accepted[index] = self._accepted[index] * _DECAY + num_passed
        self._update_rates()

    def _update_rates(self) -> None:
        rate = self._prior
        for index, (num_drafted, num_accepted) in enumerate(zip(self._drafted, self._accepted, strict=True)):
            rate = (num_accepted + _PRIOR_WEIGHT * rate) / (num_drafted + _PRIOR_WEIGHT)
            self.rates[index] = rate
