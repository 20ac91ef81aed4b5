"""How far admission may go past waiting requests that do not fit."""

from collections.abc import Iterable

from pagewood.schedpolicy.requests import Waiting


class SkipAhead:
    """Lets small requests past a large one that does not fit, for a bounded number of times.

    Without this a request that needs more memory than is free holds up everyone behind it. Invariant: there are at most
    `max_passes` steps in which anybody is admitted past a given request; then it blocks the line until it fits. Steps
    in which nobody gets past it do not count.

    In every step: `begin_step`; then, for the requests in order, either `admitted`, or `pass_over` and on False stop.
    """

    __slots__ = ("_num_passes", "_num_skipped", "_skipped", "max_passes", "max_skipped")

    def __init__(self, *, max_skipped: int, max_passes: int) -> None:
        """Start with nobody passed over.

        Args:
            max_skipped: Requests that may be passed over in one step; 0 turns skipping off.
            max_passes: Steps in which one request may be passed over.

        Raises:
            ValueError: One of them is negative.
        """
        if max_skipped < 0:
            raise ValueError(f"max_skipped must be >= 0, got {max_skipped}")
        if max_passes < 0:
            raise ValueError(f"max_passes must be >= 0, got {max_passes}")
        self.max_skipped = max_skipped
        self.max_passes = max_passes
        self._num_skipped = 0  # in this step; written by: begin_step, pass_over
        self._skipped: list[int] = []  # arrivals, since the last admission; written by: begin_step, pass_over, admitted
        self._num_passes: dict[int, int] = {}  # by arrival, where not 0; written by: begin_step, admitted

    def begin_step(self, waiting: Iterable[Waiting]) -> None:
        """Allow `max_skipped` requests to be passed over again; forget those that are no longer waiting."""
        self._num_skipped = 0
        self._skipped.clear()
        if self._num_passes:
            alive = {request.arrival for request in waiting}
            self._num_passes = {arrival: n for arrival, n in self._num_passes.items() if arrival in alive}

    def pass_over(self, request: Waiting) -> bool:
        """Decide whether admission may go on past `request`, which does not fit; False ends it for this step."""
        if self._num_skipped == self.max_skipped or self._num_passes.get(request.arrival, 0) >= self.max_passes:
            return False
        self._num_skipped += 1
        self._skipped.append(request.arrival)
        return True

    def admitted(self, request: Waiting) -> None:
        """Take note that `request` runs: it got past everybody who was passed over before it in this step."""
        for arrival in self._skipped:
            self._num_passes[arrival] = self._num_passes.get(arrival, 0) + 1
        self._skipped.clear()
        self._num_passes.pop(request.arrival, None)
