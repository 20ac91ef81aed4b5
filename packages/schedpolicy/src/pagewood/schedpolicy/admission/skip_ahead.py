"""Bounds how far admission may look past waiting requests that do not fit."""

from collections.abc import Container
from typing import Any

from pagewood.schedpolicy.counts import require_count
from pagewood.schedpolicy.requests import Waiting


class SkipAhead:
    """Lets small requests pass a large one that does not fit, a bounded number of times.

    Without this, a request that needs more memory than is free holds up all requests behind it. Invariant: there are at
    most `max_passes` steps in which any request is admitted past a given one; after that it blocks the queue until it
    fits. Steps in which no request passes it do not count. No request passes one of higher priority: otherwise a stream
    of them would take the memory that becomes free.

    In every step call `begin_step`; then, for each request in order, stop if it `is_barred`, or call `admitted`, or
    `pass_over`, and stop if that returns False.

    Attributes:
        num_starved: Requests that were passed over in `max_passes` steps; a request that is queued again is counted
            again.
    """

    __slots__ = ("_highest", "_num_skipped", "_passed", "_skipped", "max_passes", "max_skipped", "num_starved")

    def __init__(self, *, max_skipped: int, max_passes: int) -> None:
        """Start with no request passed over.

        Args:
            max_skipped: Requests that may be passed over in one step; 0 turns skipping off.
            max_passes: Steps in which one request may be passed over.

        Raises:
            ValueError: An argument is negative.
        """
        require_count("max_skipped", max_skipped, least=0)
        require_count("max_passes", max_passes, least=0)
        self.max_skipped = max_skipped
        self.max_passes = max_passes
        self.num_starved = 0  # written by: admitted
        self._num_skipped = 0  # in this step; written by: begin_step, pass_over
        self._highest: int | None = None  # priority passed over in this step; written by: begin_step, pass_over
        self._skipped: list[Waiting] = []  # since the last admission; written by: begin_step, pass_over, admitted
        # For each request passed over, by arrival, the number of steps in which this happened; written by: begin_step,
        # admitted.
        self._passed: dict[int, tuple[Waiting, int]] = {}

    def begin_step(self, waiting: Container[Any]) -> None:
        """Reset this step's allowance of skipped requests; forget requests that are no longer waiting."""
        self._num_skipped = 0
        self._highest = None
        self._skipped.clear()
        if self._passed:
            self._passed = {arrival: entry for arrival, entry in self._passed.items() if entry[0] in waiting}

    def is_barred(self, request: Waiting) -> bool:
        """Return whether a request of higher priority was passed over in this step; admission then ends."""
        return self._highest is not None and request.priority < self._highest

    def pass_over(self, request: Waiting) -> bool:
        """Return whether admission may continue past a request that does not fit; if not, it ends for this step."""
        if self._num_skipped == self.max_skipped or self._num_passes(request) >= self.max_passes:
            return False
        self._num_skipped += 1
        self._highest = request.priority if self._highest is None else max(self._highest, request.priority)
        self._skipped.append(request)
        return True

    def admitted(self, request: Waiting) -> None:
        """Record that a request was admitted: it passed all requests that were passed over before it in this step."""
        for other in self._skipped:
            num_passes = self._num_passes(other) + 1
            self._passed[other.arrival] = other, num_passes
            self.num_starved += num_passes == self.max_passes
        self._skipped.clear()
        self._passed.pop(request.arrival, None)

    def _num_passes(self, request: Waiting) -> int:
        entry = self._passed.get(request.arrival)
        return 0 if entry is None else entry[1]
