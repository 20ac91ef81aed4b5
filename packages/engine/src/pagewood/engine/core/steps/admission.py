"""The admission of waiting requests to a step, in the order of the queue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pagewood.engine.core.memory.divided_kv import AnyKV
from pagewood.engine.core.memory.kv import KVSpace
from pagewood.engine.core.queue.pausing import give_back
from pagewood.engine.core.queue.priority_preemption import PriorityPreemption
from pagewood.engine.core.queue.waiting import Claim
from pagewood.engine.core.reasons import Notes, Reason
from pagewood.engine.core.request import Request
from pagewood.engine.core.steps.chunks import Chunks
from pagewood.engine.core.steps.grant import Grant
from pagewood.engine.core.steps.policies import Reserve, SkipAhead, StepReserve
from pagewood.engine.core.steps.prompts import Prompts
from pagewood.engine.core.steps.step_plan import OpenStep


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionParts:
    """What admission asks in every step."""

    kv: AnyKV
    reserve: Reserve
    skip_ahead: SkipAhead
    chunks: Chunks
    preemption: PriorityPreemption | None
    """None: only lack of memory preempts running requests."""
    notes: Notes | None
    """None: no reasons are kept."""


class Admission:
    """One pass over the waiting requests, which admits them while budget, rows and memory last.

    Invariant: nothing is admitted if a running request lacks memory. What is free or becomes free then is for that
    one: a stream of short requests could take it in every step. So a waiting request that would fit comes a step later.

    Prompts in progress go on before the first request that is not of higher priority. Requests that are parked or wait
    for copies count as running for those of lower priority.

    Args:
        parts: of the planner.
        step: gets the grants.
        prompts: in progress; those of the lowest priorities are left after the pass.
    """

    __slots__ = (
        "_admitted", "_claims", "_claims_of", "_had_place", "_has_place", "_has_tokens", "_is_declined", "_is_plain",
        "_kv", "_last_space", "_num_available", "_parts", "_prompts", "_reserve", "_step", "_waiting",
    )  # fmt: skip

    def __init__(self, parts: AdmissionParts, step: OpenStep, prompts: Prompts) -> None:
        kv = parts.kv
        self._parts = parts
        self._kv = kv
        self._step = step
        self._waiting = step.state.waiting
        self._prompts = prompts
        self._is_plain = parts.notes is None and parts.preemption is None and kv.tiers is None and not kv.num_retained
        """Whether declining a request has no effect, except that its cached prefix counts as used."""
        self._has_place = False  # written by: admission
        self._had_place = False  # written by: run. Before the pass
        self._has_tokens = False  # written by: admission
        self._last_space: KVSpace | None = None
        """Where the last request was placed; None: look again."""  # written by: admission
        self._reserve: StepReserve | None = None
        """It reads all running requests, so there is one only if a request could be admitted."""
        # written by: admission
        self._num_available = 0  # written by: admission. In the last space
        self._claims: list[Claim] = []  # written by: _look_up_claims
        self._claims_of: int | None = None
        """`_claims` are those above this priority; None: look them up again."""  # written by: admission
        self._admitted: list[Request] = []  # written by: _begin
        self._is_declined = False  # written by: admission

    def run(self) -> None:
        """Admit what may begin."""
        parts, kv, step, waiting = self._parts, self._kv, self._step, self._waiting
        if not self._is_open():
            return
        parts.skip_ahead.begin_step(waiting)
        if kv.adapters is not None:
            kv.adapters.begin_step(waiting)
        first = None if parts.preemption is None else parts.preemption.favoured
        for request in waiting.examine(step.now_s, first=first):
            if not self._examine(request):
                break
        waiting.end_pass(self._admitted)
        if self._is_declined and (not self._admitted or kv.num_free_by_rank):  # others may have begun on other ranks
            waiting.end_copies()
        if self._is_declined and step.state.held:  # only after the pass, because the order must not change during it
            give_back(step.state, kv)

    def _is_open(self) -> bool:
        """Return whether any request could be admitted."""
        step = self._step
        if step.shortage.excluded:
            self._note(Reason.CLOSED_FOR_MEMORY, None, step.shortage.excluded[-1])
            return False
        if step.state.held and step.budget.can_admit and not self._kv.num_free_rows:
            give_back(step.state, self._kv)
        self._count_left()
        self._had_place = self._has_place
        if self._has_tokens and (self._has_place or self._parts.preemption is not None):
            return True
        closed = Reason.CLOSED_FOR_TOKENS if self._kv.num_free_rows else Reason.CLOSED_FOR_PLACES
        self._note(closed, None, None, len(step.state.running))
        return False

    def _count_left(self) -> None:
        budget = self._step.budget
        self._has_tokens = budget.offer_prefill(1) > 0
        self._has_place = budget.can_admit and self._kv.num_free_rows > 0

    def _examine(self, request: Request) -> bool:
        """Admit a request if it may begin; return whether the pass goes on behind it."""
        parts, kv, state, waiting = self._parts, self._kv, self._step.state, self._waiting
        if self._prompts.is_due(request.priority) and not self._continue_prompts(request):
            return False
        if parts.skip_ahead.is_barred(request):
            return False
        if not self._has_tokens:
            self._note(Reason.NO_TOKENS, request)
            return False
        if self._claims_of != request.priority:
            self._look_up_claims(request.priority)
        if waiting.hold_back(request, self._claims):
            return True
        if not self._has_place:
            self._note(Reason.NO_PLACE, request, None, len(state.running), kv.num_free_rows)
            if not self._had_place:
                self._ask_to_leave(request)
            return False
        if kv.adapters is not None and not kv.adapters.may_admit(request):
            self._note(Reason.NO_SLOT, request)
            return True
        if waiting.defer(request):
            if parts.notes is not None:
                parts.notes.note(Reason.PARKED, request, waiting.parked_on(request), request.num_matched)
            self._claims_of = None
            return True
        if kv.num_free_rows <= len(self._claims):
            self._is_declined = True
            self._note(Reason.PLACE_KEPT, request, self._claims[0][0], kv.num_free_rows, len(self._claims))
            self._ask_to_leave(request)
            return parts.skip_ahead.pass_over(request)
        return self._give_memory(request)

    def _continue_prompts(self, request: Request) -> bool:
        """Let the prompts go on that come before a request; return whether there is memory left for it."""
        self._prompts.go_on(least=request.priority)
        excluded = self._step.shortage.excluded
        if excluded:
            self._note(Reason.CLOSED_FOR_MEMORY, None, excluded[-1])
            return False
        self._count_left()
        self._last_space = None
        self._waiting.match(request)  # pages of its match may have been taken for the prompts
        return True

    def _look_up_claims(self, priority: int) -> None:
        before, self._claims_of = self._claims, priority
        self._claims = self._waiting.claims_above(priority)
        if self._claims != before:
            self._reserve = None

    def _give_memory(self, request: Request) -> bool:
        """Give a request memory and its first chunk if both fit; return whether the pass goes on behind it."""
        parts, step, waiting = self._parts, self._step, self._waiting
        space = waiting.place(request)
        reserve = self._reserve_in(space, request)
        num_matched = waiting.num_usable(request)
        num_wanted = space.num_missing(request, num_matched)
        if self._is_plain and reserve.exceeds(request, num_available=self._num_available - num_wanted):
            self._is_declined = True
            if request.num_matched:
                space.touch(request)
            return parts.skip_ahead.pass_over(request)
        num_reserved = reserve.num_reserved(request, num_available=space.num_available)
        if waiting.recall(request, num_reserved=num_reserved, now_s=step.now_s):
            self._claims_of = None
            self._note(Reason.RECALLING, request)
            return True
        count = parts.chunks.longest(request, num_matched, request.num_known - num_matched, step.budget)
        if not count:
            self._note(Reason.NO_TOKENS, request)
            return False
        count = space.admit(request, max_tokens=count, num_reserved=num_reserved)
        if count:
            self._begin(request, count, reserve, space)
            return True
        self._is_declined = True
        self._ask_to_leave(request, num_reserved, partial(self._reserved_beside, request))
        is_passed_over = parts.skip_ahead.pass_over(request)
        reason = Reason.PASSED_OVER if is_passed_over else Reason.NO_MEMORY
        self._note(reason, request, None, num_wanted, num_reserved, space.num_available)
        return is_passed_over

    def _begin(self, request: Request, count: int, reserve: StepReserve, space: KVSpace) -> None:
        """Let a request run that has memory for its first `count` positions behind its cached prefix."""
        parts, step, start = self._parts, self._step, request.num_matched
        if request.explains and not request.admitted_s:
            request.admitted_s = step.now_s
        if request.timeline is not None:
            request.timeline.chunk(count)
        self._note(Reason.ADMITTED, request, None, start, count, request.num_known - start)
        step.budget.take_prefill(parts.chunks.worth(start, count), ends=start + count == request.num_known)
        step.budget.admit()
        reserve.admit(request, num_to_complete=space.num_to_complete(request))
        self._waiting.admitted(request)
        parts.skip_ahead.admitted(request)
        step.state.run(request)
        self._admitted.append(request)
        step.grants.append(Grant(request, start, count, request.num_promised_at(start + count), is_admitted=True))
        self._count_left()
        self._num_available = space.num_available

    def _reserve_in(self, space: KVSpace, request: Request) -> StepReserve:
        """Return what must stay free where a request has been placed."""
        if space is not self._last_space:
            self._last_space, self._reserve, self._num_available = space, None, space.num_available
        if self._reserve is None:
            step = self._step
            claims = [claim for claim in self._claims if claim[0].kv_rank == request.kv_rank]
            all_decode = step.num_decodes == len(step.state.running)
            self._reserve = self._open_reserve(
                self._kv.beside(request, step.state.running), claims, all_decode=all_decode
            )
        return self._reserve

    def _open_reserve(self, running: Sequence[Request], claims: Sequence[Claim], *, all_decode: bool) -> StepReserve:
        page_size, num_to_complete = self._kv.page_size, sum(num_pages for _, num_pages in claims)
        if not all_decode:  # decoding requests have pages for all tokens already known
            lacking = [request for request in running if request.num_known > request.num_pages * page_size]
            num_to_complete += sum(map(self._kv.num_to_complete, lacking))
        running = [*running, *(claimant for claimant, _ in claims)]
        return self._parts.reserve.open(running, page_size=page_size, num_to_complete=num_to_complete)

    def _reserved_beside(self, candidate: Request, running: Sequence[Request]) -> int:
        """Return the pages that must stay available for `running` if a candidate runs beside them only."""
        reserve = self._open_reserve(running, self._claims, all_decode=False)
        return reserve.num_reserved(candidate, num_available=0)

    def _ask_to_leave(
        self,
        request: Request,
        num_reserved: int = 0,
        reserved_beside: Callable[[Sequence[Request]], int] | None = None,
    ) -> None:
        """Let running requests of much lower priority leave for a request, from the next step on."""
        if self._parts.preemption is not None:
            self._step.shortage.excluded += self._parts.preemption.ask(
                self._step.state, request, num_reserved=num_reserved, reserved_beside=reserved_beside
            )

    def _note(self, reason: Reason, request: Request | None, other: Request | None = None, *numbers: int) -> None:
        if self._parts.notes is not None:
            self._parts.notes.note(reason, request, other, *numbers)
