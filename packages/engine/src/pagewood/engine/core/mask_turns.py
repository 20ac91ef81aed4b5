"""Requests whose grammars are slow take turns, so that a step does not wait for the masks of all of them."""

from __future__ import annotations

from collections.abc import Set

from pagewood.engine.core.reasons import Notes, Reason
from pagewood.engine.core.request import Request
from pagewood.engine.core.state import EngineState

STEP_MS = 20
"""How long the slow grammars of a step may take together where other requests run or wait."""
ALONE_MS = 100
"""The same where all requests have slow grammars, so that only a new one would wait for them."""


class MaskTurns:
    """Chooses which requests with slow grammars get no token in a step.

    Invariant: of those that could get one, the request whose last turn is longest ago has a turn in every step.
    """

    __slots__ = ("_notes", "_num_steps")

    def __init__(self, notes: Notes | None = None) -> None:
        self._notes = notes
        self._num_steps = 0  # written by: sitting_out

    def sitting_out(self, state: EngineState) -> Set[Request]:
        """Return the running requests that get no token in the next step, because their masks would take too long."""
        if not state.num_constrained:
            return frozenset()
        slow = [request for request in state.running if request.mask_ms]
        is_alone = len(slow) == len(state.running) and not len(state.waiting)
        room_ms = ALONE_MS if is_alone else STEP_MS
        if sum([request.mask_ms for request in slow]) <= room_ms:
            return frozenset()
        self._num_steps += 1
        slow.sort(key=lambda request: request.mask_turn)  # among equals, the best-ranked first
        found: set[Request] = set()
        for place, request in enumerate(slow):
            if place == 0 or request.mask_ms <= room_ms:
                room_ms -= request.mask_ms
                request.mask_turn = self._num_steps
            else:
                found.add(request)
                if self._notes is not None:
                    self._notes.note(Reason.MASKS_OF_OTHERS, request, None, request.mask_ms)
        return found
