"""Decide the next step: which requests run, and how many tokens of each are computed."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence, Set
from typing import Protocol

from pagewood.engine.core.memory.divided_kv import AnyKV
from pagewood.engine.core.queue.pausing import settle
from pagewood.engine.core.queue.priority_preemption import PriorityPreemption, stop_all
from pagewood.engine.core.queue.state import EngineState
from pagewood.engine.core.reasons import Notes, Reason
from pagewood.engine.core.request import Request
from pagewood.engine.core.steps.admission import Admission, AdmissionParts
from pagewood.engine.core.steps.chunks import ANY_NUMBER, Chunks
from pagewood.engine.core.steps.grant import Grant
from pagewood.engine.core.steps.mask_turns import MaskTurns
from pagewood.engine.core.steps.policies import Budget, Reserve, SkipAhead, Victim
from pagewood.engine.core.steps.prompts import Prompts, is_in_progress
from pagewood.engine.core.steps.shortage import Shortage
from pagewood.engine.core.steps.step_plan import OpenStep, StepPlan

_PARTS_OF_STEP = 8
"""Prompts in progress leave 1 / _PARTS_OF_STEP of a step's prompt tokens to waiting requests, so that a long prompt
does not keep short ones from starting."""


class Pace(Protocol):
    """A further limit on the prompt tokens of a step, which depends on what runs."""

    def max_prefill_tokens(self, state: EngineState) -> int:
        """Return the most prompt tokens of the next step."""
        ...


class Turns(Protocol):
    """Which requests may be in a step, where several steps are in flight at once."""

    def sitting_out(self, state: EngineState) -> Set[Request]:
        """Return the running requests that get no grant in the next step."""
        ...


class Planner:
    """Decides steps. Invariant: the best-ranked running request never loses its pages to another.

    Prompts share what the decodes leave of a step by priority: one in progress goes on before the waiting requests that
    are not of higher priority, and after those that are. So a long prompt does not keep them waiting.

    A request that cannot get a page takes it from the worst-ranked request without a grant in this step. If there is
    none, it takes it from one of lower priority that was to decode, before it is preempted itself. A victim with a step
    in flight cannot be preempted at once: it gets no grant in this step, and is preempted in the next.
    """

    __slots__ = (
        "_admission", "_budget", "_chunks", "_kv", "_mask_turns", "_notes", "_pace", "_preemption", "_reserve",
        "_skip_ahead", "_turns", "_victim",
    )  # fmt: skip

    def __init__(
        self,
        *,
        kv: AnyKV,
        budget: Budget,
        reserve: Reserve,
        victim: Victim,
        skip_ahead: SkipAhead,
        chunks: Chunks | None = None,
        preemption: PriorityPreemption | None = None,
        pace: Pace | None = None,
        turns: Turns | None = None,
        notes: Notes | None = None,
    ) -> None:
        """Keep the parts.

        Args:
            kv: gives pages and rows.
            budget: how much a step may do.
            reserve: how much memory is kept for outputs.
            victim: which request is preempted.
            skip_ahead: how far to look past a request that does not fit.
            chunks: cuts prompts; None: wherever the budget of a step ends.
            preemption: preempts running requests for waiting ones; None: only lack of memory preempts running requests.
            pace: limits the prompt tokens of steps; None: only the budget does.
            turns: which requests may be in a step; None: all.
            notes: gets the reasons of decisions; None: no reasons are kept.
        """
        self._preemption = preemption
        self._pace = pace
        self._turns = turns
        self._notes = notes
        self._chunks = chunks or Chunks()
        self._kv = kv
        self._budget = budget
        self._reserve = reserve
        self._victim = victim
        self._skip_ahead = skip_ahead
        self._mask_turns = MaskTurns(notes)
        self._admission = AdmissionParts(
            kv=kv, reserve=reserve, skip_ahead=skip_ahead, chunks=self._chunks, preemption=preemption, notes=notes
        )

    def plan(self, state: EngineState, now_s: float) -> StepPlan:
        """Decide the next step; moves requests between `waiting` and `running` and gives them pages."""
        shortage = Shortage(state, self._kv, self._victim, self._notes)
        num_moved = 0
        if self._preemption is not None:
            leaving, num_moved = self._preemption.begin_step(state)
            shortage.excluded += leaving
        if state.waiting.begin_step():
            state.sort_running()
        room = None if self._pace is None else self._pace.max_prefill_tokens(state)
        if room is not None and self._notes is not None:
            self._notes.note(Reason.LIMITED_BY_TARGET, None, None, room)
        if self._turns is None:
            sitting_out = self._mask_turns.sitting_out(state)
        else:
            sitting_out = self._turns.sitting_out(state)
            sitting_out = sitting_out | self._mask_turns.sitting_out(state, sitting_out)
        step = OpenStep(
            state=state,
            now_s=now_s,
            budget=self._budget.open(len(state.running), max_prefill_tokens=room),
            shortage=shortage,
        )
        is_prefill_first = self._budget.prefill_first
        if not is_prefill_first:
            self._plan_decodes(step, sitting_out)
            step.num_decodes = len(step.grants)
        prompts = self._open_prompts(step, sitting_out)
        prompts.go_on(least=state.waiting.top_priority)
        num_preempted = 0
        if not is_prefill_first:
            num_preempted = self._preempt(step)
            self._note_step(num_preempted)
        if len(state.waiting):
            Admission(self._admission, step, prompts).run()
        prompts.go_on()
        grants, num_decodes = step.grants, step.num_decodes
        num_others = len(grants) - num_decodes
        if is_prefill_first and not grants:
            self._plan_decodes(step, sitting_out)
        num_later = self._preempt(step)
        if is_prefill_first or num_later > num_preempted == 0:
            self._note_step(num_later)
        revoked = shortage.revoked
        if self._preemption is not None and (leaving := self._preemption.leaving):  # they leave a step earlier without
            revoked += leaving
        if revoked:
            grants[:num_decodes] = [grant for grant in grants[:num_decodes] if grant.request not in revoked]
        return StepPlan(
            grants=tuple(grants), num_preempted=num_moved + num_preempted + num_later, is_decode=not num_others
        )

    def plan_again(self, grants: Sequence[Grant]) -> StepPlan:
        """Return the step in which the requests of a launched step of decodes get one more position each.

        Requests that may not have another token are left out. There is no other decision: if there is not a page for
        each of the rest, the plan is empty.
        """
        decoding, full = self._next_decodes([grant.request for grant in grants])
        if not self._kv.add_page_to_each(full):
            for request in full:
                if not self._kv.grow(request, request.num_launched + 1):
                    return StepPlan(grants=())
        self._reserve.on_step()
        return StepPlan(grants=tuple(decoding), is_decode=True)

    def retract(self, state: EngineState) -> int:
        """Move the running requests without a step in flight to the queue; return how many."""
        if self._notes is not None:
            for request in state.running:
                if not request.num_in_flight:
                    self._notes.note(Reason.RETRACTED, request)
        return stop_all(state, self._kv, state.running)

    def settle(self, state: EngineState) -> int:
        """Take the memory of the requests that were paused alone and give it back; return how many there are."""
        return settle(state, self._kv)

    @property
    def num_starved(self) -> int:
        """Waiting requests that others have passed as often as they may."""
        return self._skip_ahead.num_starved

    @property
    def num_spared(self) -> int:
        """Waiting requests for which no other was preempted because these had been preempted before."""
        return 0 if self._preemption is None else self._preemption.num_spared()

    def _preempt(self, step: OpenStep) -> int:
        """Move the requests that have lost their pages to the queue; return how many."""
        state, preempted = step.state, step.shortage.preempted
        step.shortage.preempted = []
        for request in preempted:
            state.stop(request)
            state.waiting.add(request)
            state.waiting.count_preempted(request.own_priority)
            if request.timeline is not None:
                request.timeline.preempted()
        return len(preempted)

    def _note_step(self, num_preempted: int) -> None:
        """Report to the reserve whether requests had to be preempted for memory."""
        if num_preempted:
            self._reserve.on_preempt()
        else:
            self._reserve.on_step()

    def _plan_decodes(self, step: OpenStep, sitting_out: Container[Request]) -> None:
        """Grant one position to every request whose other positions have all been launched."""
        page_size, shortage = self._kv.page_size, step.shortage
        budget, grants, excluded = step.budget, step.grants, shortage.excluded
        running = step.state.running
        if excluded:  # they may have lost their pages to a prompt
            running = [request for request in running if request not in excluded]
        if sitting_out:
            running = [request for request in running if request not in sitting_out]
        decoding, full = self._next_decodes(running)
        grown = self._kv.add_page_to_each(full)
        if grown and not excluded:
            grants += decoding[: budget.take_decodes(len(decoding))]
            return
        for grant in decoding:
            request = grant.request
            if excluded and request in excluded:
                continue
            if not budget.take_decode():
                if self._notes is not None:
                    self._notes.note(Reason.NO_DECODE, request)
                return
            if grown or grant.start < request.num_pages * page_size or shortage.grow(request, grant.start + 1, grants):
                grants.append(grant)

    def _next_decodes(self, requests: Sequence[Request]) -> tuple[list[Grant], list[Request]]:
        """Return a grant for each request that lacks just the position of its last token, and those without a page."""
        page_size = self._kv.page_size
        decoding: list[Grant] = []
        full: list[Request] = []
        new_grant: Callable[[type[Grant]], Grant] = object.__new__
        for request in requests:
            start, end = request.num_launched, request.num_known + request.num_unseen
            if end - start == 1 and end < request.max_length:
                grant = new_grant(Grant)  # Grant(request, start, 1, 1), which would take a third longer than the rest
                grant.request = request
                grant.start = start
                grant.num_tokens = grant.num_promised = 1
                grant.is_admitted = False
                decoding.append(grant)
                if start >= request.num_pages * page_size:
                    full.append(request)
        return decoding, full

    def _open_prompts(self, step: OpenStep, sitting_out: Container[Request]) -> Prompts:
        """Return the prompts in progress; part of the step is left for requests that wait to start."""
        state, room, left = step.state, 0, list[Request]()
        if step.num_decodes < len(state.running):
            room = step.budget.offer_prefill(ANY_NUMBER)
            if state.waiting.num_candidates and self._kv.num_free_rows and self._budget.max_prefills > 1:
                room -= room // _PARTS_OF_STEP
            is_first = self._budget.prefill_first
            left = [request for request in reversed(state.running) if is_in_progress(request, prefill_first=is_first)]
            if sitting_out:
                left = [request for request in left if request not in sitting_out]
        return Prompts(step, left, room=room, chunks=self._chunks, notes=self._notes)
