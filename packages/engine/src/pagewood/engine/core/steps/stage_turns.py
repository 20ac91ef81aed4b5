"""Which requests may be in the next step of a model that is cut into stages, so that all stages have work."""

from __future__ import annotations

from collections.abc import Iterable, Set

from pagewood.engine.core.queue.state import EngineState
from pagewood.engine.core.request import Request


class StageTurns:
    """Divides the decoding requests among the steps in flight.

    Invariant: a request with tokens that a step in flight yields is in no other step. So the steps in flight have
    different requests, but for chunks of a prompt, which yield nothing: they follow each other through the stages.

    Args:
        most_in_flight: the most steps in flight: one for each stage of the model, or one more, which is there when the
            first stage has ended a step.
    """

    __slots__ = ("_num_in_flight", "_passed_over", "most_in_flight")

    def __init__(self, most_in_flight: int) -> None:
        self.most_in_flight = most_in_flight
        self._num_in_flight = 0
        """Steps that were launched and not retired."""  # written by: stage_turns
        self._passed_over: frozenset[Request] = frozenset()
        """Requests that could be in the next step, or could have been in the last one and were not; they come first."""
        # written by: stage_turns

    def sitting_out(self, state: EngineState) -> Set[Request]:
        """Return the running requests that get no grant in the next step.

        These wait for a token, are left for steps that are not in flight yet, or would make the step larger than its
        part of all decoding requests.
        """
        waiting: set[Request] = set()
        ready: list[Request] = []
        for request in state.running:
            if request.num_unseen:
                waiting.add(request)
            elif request.num_known - request.num_launched == 1 and request.pool is None:
                ready.append(request)
        num_free = max(1, self.most_in_flight - self._num_in_flight)
        num = min(-(-len(ready) // num_free), -(-(len(waiting) + len(ready)) // self.most_in_flight))
        if len(ready) > num:
            if self._passed_over:
                ready.sort(key=lambda request: request not in self._passed_over)
            waiting.update(ready[num:])
        self._passed_over = frozenset(ready)
        return waiting

    def launched(self, requests: Iterable[Request]) -> None:
        """Note that the step that was planned last was launched, with these requests."""
        self._num_in_flight += 1
        self._passed_over = self._passed_over.difference(requests)

    def retired(self) -> None:
        """Note that the oldest step was retired."""
        self._num_in_flight -= 1
