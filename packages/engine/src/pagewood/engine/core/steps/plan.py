"""Decide the next step: which requests run, and how many tokens of each are computed."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Protocol

from pagewood.engine.core.memory.divided_kv import AnyKV
from pagewood.engine.core.memory.kv import KVSpace
from pagewood.engine.core.queue.pausing import give_back, settle
from pagewood.engine.core.queue.priority_preemption import PriorityPreemption, stop_all
from pagewood.engine.core.queue.state import EngineState
from pagewood.engine.core.queue.waiting import Claim
from pagewood.engine.core.reasons import Notes, Reason
from pagewood.engine.core.request import Request
from pagewood.engine.core.steps.mask_turns import MaskTurns

_PARTS_OF_STEP = 8
"""Prompts in progress leave 1 / _PARTS_OF_STEP of a step's prompt tokens to waiting requests, so that a long prompt
does not keep short ones from starting."""
_ANY_NUMBER = 1 << 30
"""More prompt tokens than any step can have."""


@dataclass(slots=True, eq=False)
class Grant:
    """Compute positions [start, start + num_tokens) of a request.

    It must not be changed when it has been made. It is not a frozen dataclass because a step makes hundreds, and a
    frozen one takes three times as long to make.
    """

    request: Request  # written by: plan
    start: int  # written by: plan
    num_tokens: int  # written by: plan
    num_promised: int
    """The most tokens that it may yield; 0 if it ends before the last known token, as a chunk of a prompt does."""
    # written by: plan
    is_admitted: bool = False
    """Whether the request was admitted in this step, so its row is new to the runner."""  # written by: plan


@dataclass(slots=True, kw_only=True)
class _Prompts:
    """The prompts in progress that have not been continued in this step, and the tokens that they may have together."""

    left: list[Request]
    """Most deserving last."""  # written by: plan
    room: int  # written by: plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The grants of one step. Invariant: each request has at most one."""

    grants: tuple[Grant, ...]
    num_preempted: int = 0
    is_decode: bool = False
    """Whether every grant is for one position of a request that was admitted before, and promises one token."""


class StepBudget(Protocol):
    """What is left of one step."""

    def take_decode(self) -> bool:
        """Take one token for a running request, if there is room."""
        ...

    def take_decodes(self, num_requests: int) -> int:
        """Take one token for each of several running requests while there is room; return for how many."""
        ...

    def offer_prefill(self, wanted: int) -> int:
        """Return how many of the wanted prompt tokens may be computed; takes nothing."""
        ...

    def take_prefill(self, wanted: int, *, ends: bool) -> int:
        """Take the tokens that `offer_prefill` would return; return their number. `ends`: the prompt ends with them."""
        ...

    @property
    def can_admit(self) -> bool:
        """Whether one more request may start to run."""
        ...

    def admit(self) -> None:
        """Count one more running request."""
        ...


class Budget(Protocol):
    """How much a step may do."""

    @property
    def prefill_first(self) -> bool:
        """Whether a step that computes prompts computes nothing else, and comes before steps that decode."""
        ...

    @property
    def max_prefills(self) -> int:
        """Prompts that one step may compute parts of."""
        ...

    def open(self, num_running: int, *, max_prefill_tokens: int | None = None) -> StepBudget:
        """Begin a step, with a further limit on its prompt tokens if one is given."""
        ...


class StepReserve(Protocol):
    """How many pages must stay available for running requests while one step admits others."""

    def num_reserved(self, candidate: Request, *, num_available: int) -> int:
        """Return the pages that must stay available beyond those of the candidate's known tokens.

        Args:
            candidate: waiting.
            num_available: pages that are available now; if they are plenty, the answer may be more than needed.
        """
        ...

    def exceeds(self, candidate: Request, *, num_available: int) -> bool:
        """Return True only if `num_reserved` is certainly more than `num_available`; False proves nothing.

        Args:
            candidate: waiting.
            num_available: pages that are available now, less those of the candidate's known tokens.
        """
        ...

    def admit(self, request: Request, *, num_to_complete: int) -> None:
        """Count a request as running; it still needs `num_to_complete` pages for tokens already known."""
        ...


class Reserve(Protocol):
    """How many pages are kept for the outputs of running requests."""

    def on_step(self) -> None:
        """Note that a step passed without preemption."""
        ...

    def on_preempt(self) -> None:
        """Note that requests were preempted, because memory ran out."""
        ...

    def on_end(self, request: Request) -> None:
        """Note that a request has ended, with the output that it has."""
        ...

    def open(self, running: Iterable[Request], *, page_size: int, num_to_complete: int) -> StepReserve:
        """Begin a step; running requests still need `num_to_complete` pages for tokens already known."""
        ...


class Victim(Protocol):
    """Which request is preempted when memory runs out."""

    def __call__(self, running: Sequence[Request]) -> Request | None:
        """Return the request to preempt, or None if nothing is running."""
        ...


class SkipAhead(Protocol):
    """How far admission may look past a request that does not fit."""

    @property
    def num_starved(self) -> int:
        """Requests that others have passed as often as they may."""
        ...

    def begin_step(self, waiting: Container[Request]) -> None:
        """Reset this step's allowance of skipped requests."""
        ...

    def is_barred(self, request: Request) -> bool:
        """Return whether a request of higher priority was passed over in this step; admission then ends."""
        ...

    def pass_over(self, request: Request) -> bool:
        """Return whether the requests behind this one, which does not fit now, may go first."""
        ...

    def admitted(self, request: Request) -> None:
        """Note that a request was admitted before those passed over in this step."""
        ...


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


class ChunkSizes(Protocol):
    """How long a chunk of a prompt may be, where steps should take equal time."""

    def tokens(self, start: int, most: int) -> int:
        """Return how many tokens from position `start` on take no more time than `most` at the start of a prompt."""
        ...

    def worth(self, start: int, count: int) -> int:
        """Return how many tokens at the start of a prompt take as long as `count` from position `start` on."""
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
        "_budget", "_chunk_align", "_chunk_sizes", "_kv", "_mask_turns", "_max_scored", "_notes", "_pace",
        "_preemption", "_reserve", "_skip_ahead", "_turns", "_victim",
    )  # fmt: skip

    def __init__(
        self,
        *,
        kv: AnyKV,
        budget: Budget,
        reserve: Reserve,
        victim: Victim,
        skip_ahead: SkipAhead,
        max_scored: int = _ANY_NUMBER,
        chunk_align: int = 1,
        preemption: PriorityPreemption | None = None,
        pace: Pace | None = None,
        turns: Turns | None = None,
        chunk_sizes: ChunkSizes | None = None,
        notes: Notes | None = None,
    ) -> None:
        """Keep the parts.

        Args:
            kv: gives pages and rows.
            budget: how much a step may do.
            reserve: how much memory is kept for outputs.
            victim: which request is preempted.
            skip_ahead: how far to look past a request that does not fit.
            max_scored: most prompt tokens of a request in one step if their log probabilities are wanted; each takes
                memory for the logits of the whole vocabulary.
            chunk_align: a part of a prompt that does not end it ends at a multiple of this many positions. A step must
                have room for that many prompt tokens.
            preemption: preempts running requests for waiting ones; None: only lack of memory preempts running requests.
            pace: limits the prompt tokens of steps; None: only the budget does.
            turns: which requests may be in a step; None: all.
            chunk_sizes: of long prompts; None: a chunk is as long as the budget allows.
            notes: gets the reasons of decisions; None: no reasons are kept.
        """
        self._preemption = preemption
        self._pace = pace
        self._turns = turns
        self._chunk_sizes = chunk_sizes
        self._notes = notes
        self._max_scored = max_scored
        self._chunk_align = chunk_align
        self._kv = kv
        self._budget = budget
        self._reserve = reserve
        self._victim = victim
        self._skip_ahead = skip_ahead
        self._mask_turns = MaskTurns(notes)

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
        budget = self._budget.open(len(state.running), max_prefill_tokens=room)
        grants: list[Grant] = []
        is_prefill_first = self._budget.prefill_first
        if not is_prefill_first:
            self._plan_decodes(state, budget, grants, shortage, sitting_out)
        num_decodes = len(grants)
        prompts = self._prompts(state, budget, sitting_out, num_decodes=num_decodes)
        self._plan_prompts(prompts, budget, grants, shortage, least=state.waiting.top_priority)
        num_preempted = 0
        if not is_prefill_first:
            num_preempted = self._preempt(state, shortage)
            self._note_step(num_preempted)
        self._admit(state, now_s, budget, grants, shortage, prompts, num_decodes=num_decodes)
        self._plan_prompts(prompts, budget, grants, shortage)
        num_others = len(grants) - num_decodes
        if is_prefill_first and not grants:
            self._plan_decodes(state, budget, grants, shortage, sitting_out)
        num_later = self._preempt(state, shortage)
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

    def _preempt(self, state: EngineState, shortage: Shortage) -> int:
        """Move the requests that have lost their pages to the queue; return how many."""
        preempted, shortage.preempted = shortage.preempted, []
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

    def _plan_decodes(
        self,
        state: EngineState,
        budget: StepBudget,
        grants: list[Grant],
        shortage: Shortage,
        sitting_out: Container[Request],
    ) -> None:
        """Grant one position to every request whose other positions have all been launched."""
        page_size, excluded = self._kv.page_size, shortage.excluded
        running = state.running
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

    def _prompts(
        self, state: EngineState, budget: StepBudget, sitting_out: Container[Request], *, num_decodes: int
    ) -> _Prompts:
        """Return the prompts in progress; part of the step is left for requests that wait to start."""
        if num_decodes == len(state.running):  # all decode
            return _Prompts(left=[], room=0)
        room = budget.offer_prefill(_ANY_NUMBER)
        if state.waiting.num_candidates and self._kv.num_free_rows and self._budget.max_prefills > 1:
            room -= room // _PARTS_OF_STEP
        is_first = self._budget.prefill_first
        left = [request for request in reversed(state.running) if _is_in_progress(request, prefill_first=is_first)]
        if sitting_out:
            left = [request for request in left if request not in sitting_out]
        return _Prompts(left=left, room=room)

    def _plan_prompts(
        self, prompts: _Prompts, budget: StepBudget, grants: list[Grant], shortage: Shortage, *, least: float = -inf
    ) -> None:
        """Continue the prompts in progress of at least a priority, most deserving first."""
        while prompts.left and prompts.left[-1].priority >= least:
            request, room = prompts.left.pop(), prompts.room
            if request in shortage.excluded:
                continue
            start = request.num_launched
            num_missing = request.num_known + request.num_unseen - start
            count = self._chunk(request, start, num_missing, self._offered(budget, start, num_missing, room))
            if count < num_missing and self._notes is not None:
                self._note_chunk(request, count, num_missing, room)
            if count and shortage.grow(request, start + count, grants):
                taken = budget.take_prefill(self._worth(start, count), ends=count == num_missing)
                prompts.room = max(0, prompts.room - taken)  # the least chunk may be worth more
                if request.timeline is not None:
                    request.timeline.chunk(count)
                grants.append(Grant(request, start, count, request.num_promised_at(start + count)))

    def _admit(
        self,
        state: EngineState,
        now_s: float,
        budget: StepBudget,
        grants: list[Grant],
        shortage: Shortage,
        prompts: _Prompts,
        *,
        num_decodes: int,
    ) -> None:
        """Admit waiting requests while budget, rows and memory last, unless a running request lacks memory.

        What is free or becomes free then is for that one: a stream of short requests could take it in every step. So a
        waiting request that would fit comes a step later.

        `prompts` that are left go on before the first request that is not of higher priority. Requests that are parked
        or wait for copies count as running for those of lower priority.
        """
        kv, waiting = self._kv, state.waiting
        if not len(waiting) or shortage.excluded:
            if self._notes is not None and len(waiting):
                self._notes.note(Reason.CLOSED_FOR_MEMORY, None, shortage.excluded[-1])
            return
        if state.held and budget.can_admit and not kv.num_free_rows:
            give_back(state, kv)
        had_place = has_place = budget.can_admit and kv.num_free_rows > 0
        has_tokens = budget.offer_prefill(1) > 0
        if not has_tokens or not (has_place or self._preemption):
            if self._notes is not None:
                self._notes.note(
                    Reason.CLOSED_FOR_TOKENS if kv.num_free_rows else Reason.CLOSED_FOR_PLACES,
                    None, None, len(state.running),
                )  # fmt: skip
            return
        self._skip_ahead.begin_step(waiting)
        if kv.adapters is not None:
            kv.adapters.begin_step(waiting)
        # Whether declining a request has no effect, except that its cached prefix counts as used.
        is_plain = self._notes is None and self._preemption is None and kv.tiers is None and not kv.num_retained
        last_space: KVSpace | None = None  # where the last request was placed; None: look again
        reserve: StepReserve | None = None  # it reads all running requests, so only if one could be admitted
        admitted: list[Request] = []
        claims: list[Claim] = []
        claims_of: int | None = None  # `claims` are those above this priority; None: look them up again
        is_declined = False
        num_available = 0
        for request in waiting.examine(now_s, first=self._preemption and self._preemption.favoured):
            if prompts.left and prompts.left[-1].priority >= request.priority:
                self._plan_prompts(prompts, budget, grants, shortage, least=request.priority)
                if shortage.excluded:
                    if self._notes is not None:
                        self._notes.note(Reason.CLOSED_FOR_MEMORY, None, shortage.excluded[-1])
                    break
                has_tokens = budget.offer_prefill(1) > 0
                has_place = budget.can_admit and kv.num_free_rows > 0
                last_space = None
                waiting.match(request)  # pages of its match may have been taken for the prompts
            if self._skip_ahead.is_barred(request):
                break
            if not has_tokens:
                if self._notes is not None:
                    self._notes.note(Reason.NO_TOKENS, request)
                break
            if claims_of != request.priority:
                before, claims_of = claims, request.priority
                claims = waiting.claims_above(claims_of)
                if claims != before:
                    reserve = None
            if waiting.hold_back(request, claims):
                continue
            if not has_place:
                if self._notes is not None:
                    self._notes.note(Reason.NO_PLACE, request, None, len(state.running), kv.num_free_rows)
                if self._preemption is not None and not had_place:
                    shortage.excluded += self._preemption.ask(state, request)
                break
            if kv.adapters is not None and not kv.adapters.may_admit(request):
                if self._notes is not None:
                    self._notes.note(Reason.NO_SLOT, request)
                continue
            if waiting.defer(request):
                if self._notes is not None:
                    self._notes.note(Reason.PARKED, request, waiting.parked_on(request), request.num_matched)
                claims_of = None
                continue
            if kv.num_free_rows <= len(claims):
                is_declined = True
                if self._notes is not None:
                    self._notes.note(Reason.PLACE_KEPT, request, claims[0][0], kv.num_free_rows, len(claims))
                if self._preemption is not None:
                    shortage.excluded += self._preemption.ask(state, request)
                if self._skip_ahead.pass_over(request):
                    continue
                break
            space = waiting.place(request)
            if space is not last_space:
                last_space, reserve, num_available = space, None, space.num_available
            if reserve is None:
                running = kv.beside(request, state.running)
                claims_there = [claim for claim in claims if claim[0].kv_rank == request.kv_rank]
                reserve = self._open_reserve(running, claims_there, all_decode=num_decodes == len(state.running))
            num_matched = waiting.num_usable(request)
            num_wanted = space.num_missing(request, num_matched)
            if is_plain and reserve.exceeds(request, num_available=num_available - num_wanted):
                is_declined = True
                if request.num_matched:
                    space.touch(request)
                if self._skip_ahead.pass_over(request):
                    continue
                break
            num_reserved = reserve.num_reserved(request, num_available=space.num_available)
            if waiting.recall(request, num_reserved=num_reserved, now_s=now_s):
                claims_of = None
                if self._notes is not None:
                    self._notes.note(Reason.RECALLING, request)
                continue
            num_missing = request.num_known - num_matched
            count = self._chunk(request, num_matched, num_missing, self._offered(budget, num_matched, num_missing))
            if not count:
                if self._notes is not None:
                    self._notes.note(Reason.NO_TOKENS, request)
                break
            count = space.admit(request, max_tokens=count, num_reserved=num_reserved)
            if not count:
                is_declined = True
                if self._preemption is not None:
                    reserved_beside = partial(self._reserved_beside, request, claims)
                    shortage.excluded += self._preemption.ask(
                        state, request, num_reserved=num_reserved, reserved_beside=reserved_beside
                    )
                is_passed_over = self._skip_ahead.pass_over(request)
                if self._notes is not None:
                    reason = Reason.PASSED_OVER if is_passed_over else Reason.NO_MEMORY
                    self._notes.note(reason, request, None, num_wanted, num_reserved, space.num_available)
                if is_passed_over:
                    continue
                break
            if request.explains and not request.admitted_s:
                request.admitted_s = now_s
            if request.timeline is not None:
                request.timeline.chunk(count)
            if self._notes is not None:
                num_wanted = request.num_known - request.num_matched
                self._notes.note(Reason.ADMITTED, request, None, request.num_matched, count, num_wanted)
            budget.take_prefill(
                self._worth(request.num_matched, count), ends=request.num_matched + count == request.num_known
            )
            budget.admit()
            reserve.admit(request, num_to_complete=space.num_to_complete(request))
            waiting.admitted(request)
            self._skip_ahead.admitted(request)
            state.run(request)
            admitted.append(request)
            start = request.num_matched
            grants.append(Grant(request, start, count, request.num_promised_at(start + count), is_admitted=True))
            has_tokens = budget.offer_prefill(1) > 0
            has_place = budget.can_admit and kv.num_free_rows > 0
            num_available = space.num_available
        waiting.end_pass(admitted)
        if is_declined and (not admitted or kv.num_free_by_rank):  # others may have been admitted on other ranks
            waiting.end_copies()
        if is_declined and state.held:  # only after the pass, because the order must not change during it
            give_back(state, kv)

    def _open_reserve(self, running: Sequence[Request], claims: Sequence[Claim], *, all_decode: bool) -> StepReserve:
        page_size, num_to_complete = self._kv.page_size, sum(num_pages for _, num_pages in claims)
        if not all_decode:  # decoding requests have pages for all tokens already known
            lacking = [request for request in running if request.num_known > request.num_pages * page_size]
            num_to_complete += sum(map(self._kv.num_to_complete, lacking))
        running = [*running, *(claimant for claimant, _ in claims)]
        return self._reserve.open(running, page_size=page_size, num_to_complete=num_to_complete)

    def _reserved_beside(self, candidate: Request, claims: Sequence[Claim], running: Sequence[Request]) -> int:
        """Return the pages that must stay available for `running` and `claims` if a candidate runs beside them only."""
        return self._open_reserve(running, claims, all_decode=False).num_reserved(candidate, num_available=0)

    def _note_chunk(self, request: Request, count: int, num_missing: int, room: int) -> None:
        assert self._notes is not None
        if count:
            self._notes.note(Reason.CHUNKED, request, None, count, num_missing, room)
        else:
            self._notes.note(Reason.NO_CHUNK, request, None, num_missing)

    def _chunk(self, request: Request, start: int, num_missing: int, most: int) -> int:
        """Return how many positions to compute from `start` on, at most `most`; 0 if no aligned end is within reach, or
        the end of an image that must be computed as a whole.

        Where log probabilities of the prompt are wanted, and fewer positions than `chunk_align` fit in the memory for
        them, the end is not aligned.
        """
        count = min(most, self._max_scored) if request.num_unscored else most
        if request.images is not None:
            count = request.images.whole(start, min(count, num_missing))
        align = self._chunk_align
        if align == 1 or count >= num_missing:
            return count
        aligned = (start + count) // align * align - start
        return count if aligned <= 0 < request.num_unscored else max(0, aligned)

    def _offered(self, budget: StepBudget, start: int, num_missing: int, room: int = _ANY_NUMBER) -> int:
        """Return how many of the missing positions from `start` on the budget and `room` have time for."""
        most = min(budget.offer_prefill(num_missing), room)
        if self._chunk_sizes is None:
            return most
        return min(most, self._chunk_sizes.tokens(start, min(budget.offer_prefill(_ANY_NUMBER), room)))

    def _worth(self, start: int, count: int) -> int:
        """Return the tokens of the budget that a chunk takes."""
        return count if self._chunk_sizes is None else self._chunk_sizes.worth(start, count)


class Shortage:
    """Finds pages when none are left, within one step. Invariant: an excluded request gets no grant in this step."""

    __slots__ = ("_kv", "_notes", "_relieved", "_state", "_victim", "excluded", "preempted", "revoked")

    def __init__(self, state: EngineState, kv: AnyKV, victim: Victim, notes: Notes | None = None) -> None:
        self._notes = notes
        self._state = state
        self._kv = kv
        self._victim = victim
        self._relieved: set[int] = set()
        """Ranks where a victim was found that can be preempted in the next step only."""  # written by: grow
        self.excluded: list[Request] = []
        """Requests that were preempted, will be in the next step, or could not get a page."""  # written by: grow, plan
        self.preempted: list[Request] = []
        """Those that have lost their pages, and are not in the queue yet."""  # written by: grow, plan
        self.revoked: list[Request] = []
        """Excluded requests that have a grant already, which must be taken back."""  # written by: grow, plan

    def grow(self, request: Request, num_tokens: int, grants: Sequence[Grant]) -> bool:
        """Give a request pages for its first `num_tokens` positions, preempting worse-ranked ones if needed."""
        while not self._kv.grow(request, num_tokens):
            if give_back(self._state, self._kv, to=request):
                continue
            if request.kv_rank in self._relieved:
                self.excluded.append(request)
                if self._notes is not None:
                    self._notes.note(Reason.NO_PAGE, request)
                return False
            victim = self._victim(self._without_grant(request, grants)) or request
            if victim is request and (lower := self._victim(self._lower_with_grant(request, grants))):
                victim = lower
                self.revoked.append(victim)
            self.excluded.append(victim)
            if victim.num_in_flight:
                self._relieved.add(request.kv_rank)
                if self._notes is not None:
                    self._notes.note(Reason.MUST_LEAVE, victim, request)
                if victim is not request:
                    self.excluded.append(request)
                    if self._notes is not None:
                        self._notes.note(Reason.NO_PAGE, request)
                return False
            if self._notes is not None:
                self._notes.note(Reason.PREEMPTED, victim, request)
            self._kv.release(victim)
            self.preempted.append(victim)
            if victim is request:
                return False
        return True

    def _without_grant(self, request: Request, grants: Sequence[Grant]) -> list[Request]:
        taken = {id(grant.request) for grant in grants} | {id(one) for one in self.excluded}
        return [one for one in self._kv.beside(request, self._state.running) if id(one) not in taken]

    def _lower_with_grant(self, request: Request, grants: Sequence[Grant]) -> list[Request]:
        granted = [grant.request for grant in grants if grant.request.priority < request.priority]
        return [one for one in self._kv.beside(request, granted) if one not in self.excluded]


def _is_in_progress(request: Request, *, prefill_first: bool) -> bool:
    """Return whether a running request lacks more than its last token; one that lacks only that one decodes.

    With `prefill_first`, the last token of a prompt counts as in progress too: as a decode it would wait for all
    prompts.
    """
    num_missing = request.num_known + request.num_unseen - request.num_launched
    return num_missing > (request.pool is None) or (
        prefill_first and num_missing > 0 and request.num_launched < request.num_prompt
    )
