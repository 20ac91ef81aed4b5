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
    """What is known of one request: how its drafts fare beside those of all requests."""

    __slots__ = ("accepted", "expected", "found", "granted", "length", "num_idle")

    def __init__(self) -> None:
        self.accepted = 0.0
        """Accepted draft tokens, decayed."""  # written by: Acceptance
        self.expected = 0.0
        """Those that the rates of all requests made likely, decayed alike."""  # written by: Acceptance
        self.granted = 0.0
        """Granted draft tokens, decayed."""  # written by: Acceptance
        self.found = 0.0
        """Those that the drafter proposed, decayed alike."""  # written by: Acceptance
        self.length = 0
        """Draft tokens of the latest decision."""  # written by: DraftControl
        self.num_idle = 0
        """Decisions since then that gave it none."""  # written by: Acceptance

    def halve(self) -> None:
        """Believe half as much in what was observed."""
        self.accepted /= 2
        self.expected /= 2
        self.granted /= 2
        self.found /= 2


class Acceptance:
    """Rates of acceptance by position of all requests, and how each request differs from them.

    The rate of a position is the probability that its draft token is accepted, if it was drafted and those before it
    were accepted: a decayed mean with a Beta prior, whose mean is the rate of the position before. A request has a
    factor of its own for all positions, and the part of its granted tokens that the drafter finds; both start as those
    of all requests. Observations count for the past: nothing fades while nothing is drafted, but for a request that
    others leave without drafts, which is forgotten by half from time to time, so that it is tried again.
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
        """[max_tokens], of all requests."""  # written by: Acceptance

    def __len__(self) -> int:
        """Return of how many requests something is kept."""
        return len(self._known)

    def of(self, request: Decoding) -> Own:
        """Return what is known of a request."""
        own = self._known.get(request.arrival)
        if own is None:
            own = self._known[request.arrival] = Own()
        return own

    def latest_length(self, request: Decoding, usual: int) -> int:
        """Return the draft tokens of a request in the latest decision, or `usual` if it is new since then."""
        own = self._known.get(request.arrival)
        return usual if own is None else own.length

    def forget(self, request: Decoding) -> None:
        """Drop what is known of a request."""
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
        """Note that a decision gave a request no drafts, but others some."""
        own.num_idle += 1
        if own.num_idle % _NUM_IDLE == 0:
            own.halve()

    def hope(self) -> None:
        """Believe less in what was bad: drafts are tried again after a time without."""
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
        """Learn from drafts: granted, found and accepted tokens of each of some requests."""
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
