"""Preempts running requests for a waiting one of much higher priority, over several steps.

A request whose step is in flight cannot lose its pages. So it first gets no grant, and is preempted when its last step
has been retired.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pagewood.engine.core.memory.divided_kv import AnyKV
from pagewood.engine.core.queue.state import EngineState
from pagewood.engine.core.reasons import Notes, Reason
from pagewood.engine.core.request import Request

WorthPreempting = Callable[[Request, Sequence[Request], int], Sequence[Request]]
"""(candidate, running requests, tokens of memory that it lacks, >= 1) -> the requests to preempt for it, or none."""


class PriorityPreemption:
    """Knows which running requests leave for which waiting one. Invariant: they leave for one request at a time."""

    __slots__ = ("_able", "_choose", "_kv", "_notes", "favoured", "leaving", "num_spared")

    def __init__(
        self,
        kv: AnyKV,
        choose: WorthPreempting,
        *,
        able: Callable[[Request, Sequence[Request]], Sequence[Request]],
        num_spared: Callable[[], int] = lambda: 0,
        notes: Notes | None = None,
    ) -> None:
        """Preempt what `choose` returns.

        Args:
            kv: memory of the engine.
            choose: returns the requests to preempt.
            able: returns the running requests that `choose` may return for a waiting one.
            num_spared: returns for how many waiting requests `choose` has preempted nothing because the candidates had
                been preempted before.
            notes: gets the reasons of decisions; None: no reasons are kept.
        """
        self.num_spared = num_spared
        self._notes = notes
        self._kv = kv
        self._able = able
        self._choose = choose
        self.leaving: list[Request] = []
        """Running requests that are to leave; they get no grant."""  # written by: priority_preemption
        self.favoured: Request | None = None
        """The waiting request that they leave for; it is admitted before all others."""
        # written by: priority_preemption

    def begin_step(self, state: EngineState) -> tuple[list[Request], int]:
        """Move the leaving requests without a step in flight to the queue.

        Returns:
            The leaving requests that still have one, which must get no grant in this step; and how many were moved.
        """
        if self.favoured is None:
            return [], 0
        if self.favoured not in state.waiting:  # it has ended, or it runs
            self.favoured, self.leaving = None, []
            return [], 0
        leaving = [one for one in self.leaving if one.row >= 0 and one.finish is None and one.pause == "no"]
        self.leaving = [request for request in leaving if request.num_in_flight]
        if self._notes is not None:
            for request in leaving:
                reason = Reason.MUST_LEAVE if request.num_in_flight else Reason.GAVE_WAY
                self._notes.note(reason, request, self.favoured)
        return self.leaving, stop_all(state, self._kv, leaving)

    def ask(
        self,
        state: EngineState,
        candidate: Request,
        *,
        num_reserved: int = 0,
        reserved_beside: Callable[[Sequence[Request]], int] | None = None,
    ) -> Sequence[Request]:
        """Choose the requests to preempt for `candidate`, which does not fit now; they leave from the next step on.

        If all that can give way hold less than is kept for outputs, what is kept for their own does not count: it would
        go with them. If only some of them leave, and the candidate still does not fit beside the others, it asks again.

        Returns:
            Those that were chosen now.

        Args:
            state: of the engine.
            candidate: waits.
            num_reserved: as for `KVSpace.admit`.
            reserved_beside: returns what `num_reserved` is if only some of the running requests stay.
        """
        if self.leaving:
            return ()
        running = [request for request in state.running if request.finish is None]
        chosen = self._choose(candidate, running, self._num_missing(candidate, num_reserved))
        if not chosen and reserved_beside is not None and (able := set(self._able(candidate, running))):
            num_reserved = reserved_beside([request for request in state.running if request not in able])
            chosen = self._choose(candidate, running, self._num_missing(candidate, num_reserved))
        if chosen:
            self.favoured, self.leaving = candidate, list(chosen)
        return chosen

    def _num_missing(self, candidate: Request, num_reserved: int) -> int:
        """Return the tokens of memory that a waiting request lacks, at least 1."""
        num_pages = self._kv.num_missing(candidate, candidate.num_matched) + num_reserved
        return max(1, (num_pages - self._kv.num_available) * self._kv.page_size)


def stop_all(state: EngineState, kv: AnyKV, requests: Iterable[Request]) -> int:
    """Move the running requests of `requests` without a step in flight to the queue; return how many."""
    ready = [request for request in requests if not request.num_in_flight]
    for request in ready:
        kv.release(request)
        state.stop(request)
        state.waiting.add(request)
        state.waiting.count_preempted(request.own_priority)
        if request.timeline is not None:
            request.timeline.preempted()
    return len(ready)
