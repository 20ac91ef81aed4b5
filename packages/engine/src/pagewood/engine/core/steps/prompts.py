"""The prompts in progress: those that have begun, and are not computed to their end."""

from __future__ import annotations

from math import inf

from pagewood.engine.core.reasons import Notes, Reason
from pagewood.engine.core.request import Request
from pagewood.engine.core.steps.chunks import Chunks
from pagewood.engine.core.steps.grant import Grant
from pagewood.engine.core.steps.step_plan import OpenStep


class Prompts:
    """The prompts that have not been continued in a step, and the tokens that they may have together.

    Args:
        step: gets their grants.
        left: the prompts, most deserving last.
        room: tokens of the step's budget.
        chunks: cuts them.
        notes: gets the reasons of decisions; None: no reasons are kept.
    """

    __slots__ = ("_chunks", "_left", "_notes", "_room", "_step")

    def __init__(self, step: OpenStep, left: list[Request], *, room: int, chunks: Chunks, notes: Notes | None) -> None:
        self._step = step
        self._chunks = chunks
        self._notes = notes
        self._left = left  # written by: go_on
        self._room = room  # written by: go_on

    def is_due(self, priority: float) -> bool:
        """Return whether any of them is of at least a priority."""
        return bool(self._left) and self._left[-1].priority >= priority

    def go_on(self, *, least: float = -inf) -> None:
        """Continue those of at least a priority, most deserving first."""
        step = self._step
        while self.is_due(least):
            request, room = self._left.pop(), self._room
            if request in step.shortage.excluded:
                continue
            start = request.num_launched
            num_missing = request.num_known + request.num_unseen - start
            count = self._chunks.longest(request, start, num_missing, step.budget, room)
            if count < num_missing and self._notes is not None:
                if count:
                    self._notes.note(Reason.CHUNKED, request, None, count, num_missing, room)
                else:
                    self._notes.note(Reason.NO_CHUNK, request, None, num_missing)
            if count and step.shortage.grow(request, start + count, step.grants):
                taken = step.budget.take_prefill(self._chunks.worth(start, count), ends=count == num_missing)
                self._room = max(0, room - taken)  # the least chunk may be worth more
                if request.timeline is not None:
                    request.timeline.chunk(count)
                step.grants.append(Grant(request, start, count, request.num_promised_at(start + count)))


def is_in_progress(request: Request, *, prefill_first: bool) -> bool:
    """Return whether a running request lacks more than its last token; one that lacks only that one decodes.

    With `prefill_first`, the last token of a prompt counts as in progress too: as a decode it would wait for all
    prompts.
    """
    num_missing = request.num_known + request.num_unseen - request.num_launched
    return num_missing > (request.pool is None) or (
        prefill_first and num_missing > 0 and request.num_launched < request.num_prompt
    )
