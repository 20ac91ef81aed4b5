"""Requests whose grammars are slow take turns, so that a step does not wait for the masks of all of them."""

from __future__ import annotations

from collections.abc import Set

from pagewood.engine.core.queue.state import EngineState
from pagewood.engine.core.reasons import Notes, Reason
from pagewood.engine.core.request import Request

STEP_MS = 20
"""How long the slow grammars of a step may take where other requests run or wait, on average over steps."""
ALONE_MS = 100
"""How long they may take in a step where all requests have slow grammars, so that only a new one would wait."""


class MaskTurns:
    """Chooses which requests with slow grammars get no token in a step.

    Invariant: the request whose last turn is longest ago gets the next turn: at once if no other request runs or waits,
    otherwise when later steps have made up for the time that earlier turns took beyond `STEP_MS`.
    """

    __slots__ = ("_notes", "_num_turns", "_room_ms")

    def __init__(self, notes: Notes | None = None) -> None:
        self._notes = notes
        self._num_turns = 0  # written by: sitting_out
        self._room_ms = 0
        """Milliseconds that earlier steps have left over; negative after a long turn."""  # written by: sitting_out

    def sitting_out(self, state: EngineState, others: Set[Request] = frozenset()) -> Set[Request]:
        """Return the running requests that get no token in the next step, because their masks would take too long.

        Args:
            state: of the engine.
            others: requests that get no token for another reason, so they have no turn.
        """
        if not state.num_constrained:
            self._room_ms = 0
            return frozenset()
        slow = [request for request in state.running if request.mask_ms and request not in others]
        is_alone = len(slow) == len(state.running) and not len(state.waiting)
        room_ms = ALONE_MS if is_alone else min(STEP_MS, self._room_ms + STEP_MS)
        slow.sort(key=lambda request: request.mask_turn)  # among equals, the best-ranked first
        found: set[Request] = set()
        for place, request in enumerate(slow):
            if request.mask_ms <= room_ms or (place == 0 and room_ms > 0):
                room_ms -= request.mask_ms
                self._num_turns += 1
                request.mask_turn = self._num_turns
            else:
                found.add(request)
                if self._notes is not None:
                    self._notes.note(Reason.MASKS_OF_OTHERS, request, None, request.mask_ms)
        self._room_ms = room_ms
        return found
