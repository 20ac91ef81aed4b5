"""What is known of each request: the estimate of its acceptance, and its draft length of the latest decision."""

from collections.abc import Sequence
from typing import Protocol

from pagewood.schedpolicy.drafting.acceptance import Acceptance, Estimate

_FEW = 16
_FEW_OBSERVATIONS = 6


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


class RequestEstimates:
    """The estimates of all requests that have been decided for and are not forgotten, by arrival.

    Invariant: an observation changes only the estimates of the requests that it is of, and of all requests together.
    """

    __slots__ = ("_known", "everyone", "has_new", "num_decisions")

    def __init__(self, everyone: Acceptance) -> None:
        """Start without requests.

        Args:
            everyone: Acceptance of all requests, from which a new one starts.
        """
        self.everyone = everyone
        """Acceptance of all requests."""
        self._known: dict[int, Estimate] = {}  # written by: RequestEstimates
        self.num_decisions = 0
        """Calls of `current`."""  # written by: RequestEstimates
        self.has_new = False
        """Whether there was a new request in the latest decision."""  # written by: RequestEstimates

    def __len__(self) -> int:
        """Return how many requests are known."""
        return len(self._known)

    def current(self, requests: Sequence[Decoding]) -> list[Estimate]:
        """Return the estimates of the requests; those of large batches take turns in being computed anew."""
        self.num_decisions += 1
        self.has_new = False
        known, turn, is_small = self._known, self.num_decisions, len(requests) <= _FEW
        estimates: list[Estimate] = []
        for request in requests:
            arrival = request.arrival
            estimate = known.get(arrival)
            if estimate is None:
                estimate = known[arrival] = self.everyone.estimate()
                self.has_new = True
            elif estimate.is_stale:
                if is_small or not (turn + arrival) & 3 or estimate.num_observations < _FEW_OBSERVATIONS:
                    estimate.refresh()
            elif not (turn + arrival) & 15:
                estimate.refresh()
            estimates.append(estimate)
        return estimates

    def observe(
        self, requests: Sequence[Decoding], granted: Sequence[int], drafted: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """Learn from a step with drafts: granted, drafted and accepted tokens of each of its requests."""
        self.everyone.observe(granted, drafted, accepted)
        known = self._known
        for request, allowed, found, taken in zip(requests, granted, drafted, accepted, strict=True):
            estimate = known.get(request.arrival) if allowed else None
            if estimate is not None:
                estimate.observe(allowed, found, taken)

    def latest_lengths(self, requests: Sequence[Decoding], usual: int) -> list[int]:
        """Return the length of each request in the latest decision; `usual` for one without."""
        known = self._known
        lengths: list[int] = []
        for request in requests:
            estimate = known.get(request.arrival)
            lengths.append(usual if estimate is None or estimate.length < 0 else estimate.length)
        return lengths

    def forget(self, request: Decoding) -> None:
        """Drop what is known of a request that has ended."""
        self._known.pop(request.arrival, None)
