"""One simulated replica: policies, a queue, counted pages and a machine, in virtual time."""

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

from pagewood.schedpolicy.admission.deadlines import Load
from pagewood.schedpolicy.admission.quotas import Quotas
from pagewood.schedpolicy.counts import require_count
from pagewood.schedpolicy.memory.reserve import StepReserve
from pagewood.schedpolicy.preemption.victim import choose_victim, deserving
from pagewood.schedpolicy.simulation.cache import BlockCache, PrefixCache
from pagewood.schedpolicy.simulation.decisions import Decision, OnDecision
from pagewood.schedpolicy.simulation.decoding import Decoding
from pagewood.schedpolicy.simulation.machine import Machine
from pagewood.schedpolicy.simulation.memory import Memory
from pagewood.schedpolicy.simulation.metrics import Observations
from pagewood.schedpolicy.simulation.policies import Policies
from pagewood.schedpolicy.simulation.queue import Queue
from pagewood.schedpolicy.simulation.recorder import Recorder
from pagewood.schedpolicy.simulation.request import SimRequest
from pagewood.schedpolicy.steps.budget import StepBudget
from pagewood.schedpolicy.steps.latency import pairs_of

_PARTS_OF_STEP = 8
"""Prompts in progress leave 1 / _PARTS_OF_STEP of a step's prompt tokens to waiting requests, as in pagewood-engine."""
OnRequest: TypeAlias = Callable[[SimRequest], None]
"""Gets a request of a replica at the end of a step; it does not call the replica."""

_ANY_NUMBER = 1 << 30
"""More prompt tokens than any step can have."""


@dataclass(slots=True, kw_only=True)
class _Prompts:
    """The prompts in progress without a grant in the present step, and the tokens that are left for them."""

    left: list[SimRequest]
    """Most deserving last."""  # written by: replica
    room: int  # written by: replica


class Replica:
    """Runs steps: decodes first, then prompts in progress, then admissions, in the same order as the engine's planner.

    Time moves from event to event. A step with prompt tokens is one event. Consecutive steps in which the same requests
    decode and no waiting request could be admitted are one event, up to the first end of a request, the first
    preemption, or the next arrival.

    Invariant: between events, every request sent here is waiting, running or recorded; a running request either decodes
    or is in `_prefilling`.
    """

    __slots__ = (
        "_completing", "_decoding", "_inbox", "_index", "_is_decoding", "_machine", "_memory", "_num_run_steps",
        "_on_computed", "_on_decision", "_on_end", "_overlaps", "_policies", "_preempted", "_prefilling", "_prefills",
        "_queue", "_recorder", "_run_started_s", "_running", "_taken", "_withdrawn", "end_s",
    )  # fmt: skip

    def __init__(
        self,
        *,
        index: int,
        policies: Policies,
        machine: Machine,
        num_pages: int,
        page_size: int,
        overlaps: bool = False,
        make_cache: Callable[[], PrefixCache] = BlockCache,
        on_decision: OnDecision | None = None,
        on_computed: OnRequest | None = None,
        on_end: OnRequest | None = None,
    ) -> None:
        """Start idle, with an empty cache.

        Args:
            index: Its number.
            policies: Its policies.
            machine: Determines the duration of steps.
            num_pages: Pages of KV, >= 1.
            page_size: Tokens per page, >= 1.
            overlaps: Whether a step is decided while the one before it runs; see `Fleet`.
            make_cache: Makes the empty prefix cache.
            on_decision: Gets every decision; None to record none.
            on_computed: Gets every request whose prompt has been computed.
            on_end: Gets every request that has all its output or was refused.

        Raises:
            ValueError: `num_pages` or `page_size` is out of range.
        """
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            require_count(name, value, least=1)
        self._index = index
        self._on_decision = on_decision
        self._on_computed = on_computed
        self._on_end = on_end
        self._overlaps = overlaps
        self._recorder = Recorder(index)
        self._policies = policies
        self._machine = machine
        self._memory = Memory(num_pages=num_pages, page_size=page_size, cache=make_cache())
        self._decoding = Decoding(page_size=page_size)
        self._queue = Queue(policies.order, self._memory, deferral=policies.deferral)
        self._running: dict[int, SimRequest] = {}  # by arrival
        self._prefilling: list[SimRequest] = []  # running requests with prompts in progress, most deserving first
        self._prefills: list[tuple[SimRequest, int]] = []  # prompt tokens of the present step
        self._preempted: list[SimRequest] = []  # in the present step, not in the queue yet
        self._completing: list[SimRequest] = []  # lack only their last prompt token, computed like a decode
        self._inbox: list[SimRequest] = []  # arrived since the last event
        self._taken: list[SimRequest] = []  # arrived in the last step, and the present one was decided before
        self._withdrawn: list[SimRequest] = []  # leave when the present step ends
        self._run_started_s = 0.0
        self._num_run_steps = 0
        self._is_decoding = False  # whether requests decode in the present steps
        self.end_s = inf
        """Time when the present steps end; infinite while idle."""  # written by: replica

    @property
    def observed(self) -> Observations:
        """Observations so far."""
        return self._recorder.observed

    @property
    def num_outstanding(self) -> int:
        """Requests sent here that have not ended."""
        return len(self._inbox) + len(self._taken) + len(self._queue) + len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait to run."""
        return len(self._queue)

    @property
    def kv_use(self) -> float:
        """Part of the pages that running requests hold."""
        return self._memory.num_used / self._memory.num_pages

    def arrive(self, request: SimRequest, now_s: float) -> None:
        """Accept a request; it is considered when the present step ends.

        `now_s` must not be before the last event or after `end_s`.
        """
        self._inbox.append(request)
        if self.end_s == inf:
            self._run_started_s = self.end_s = now_s  # an event now, after all requests that arrive at this time
        else:
            self._end_run_with_step(now_s)

    def receive(self, request: SimRequest, num_pages: int) -> None:
        """Cache the first pages of a request, which another replica has computed."""
        self._memory.receive(request, num_pages)

    def withdraw(self, request: SimRequest, now_s: float) -> None:
        """Stop a request when the present step ends; its end is not recorded. What it has computed stays cached."""
        self._withdrawn.append(request)
        self._end_run_with_step(now_s)

    def progress(self, request: SimRequest, now_s: float) -> tuple[int, float]:
        """Return the tokens that a request has generated until now, and the time of the last of them."""
        if not request.is_decoding:
            return request.num_generated, request.last_token_s
        num_steps, decoding = 0, self._decoding
        if self._is_decoding and not self._prefills and not self._completing:
            args = decoding.num_requests, decoding.kv_tokens
            elapsed_s = now_s - self._run_started_s
            num_steps = self._machine.num_decode_steps(elapsed_s, *args, at_most=self._num_run_steps)
            num_steps -= num_steps > 0 and self._machine.decode_s(num_steps, *args) > elapsed_s
        last_token_s = self._run_started_s + self._machine.decode_s(
            num_steps, decoding.num_requests, decoding.kv_tokens
        )
        return min(request.num_generated + num_steps, request.num_output - 1), last_token_s

    def take_events(self) -> list[tuple[str, list[int]]]:
        """Return the KV events since the last call; only a `BlockCache` has any."""
        cache = self._memory.cache
        return cache.take_events() if isinstance(cache, BlockCache) else []

    def finish_run(self) -> None:
        """End the present steps at `end_s`, and start the next."""
        now_s, decoding, num_steps = self.end_s, self._decoding, self._num_run_steps
        if self._on_decision is not None and num_steps:
            self._on_decision(self._decision())
        self._recorder.ran(
            self._run_started_s,
            now_s,
            num_steps,
            [*((request, 1) for request in self._completing), *self._prefills],
            decoding if self._is_decoding else None,
            self._machine,
        )
        ended: dict[int, SimRequest] = {}  # by arrival; one that was preempted may be found twice
        if self._is_decoding:
            if num_steps > 1:  # the pages of the first step were taken when it began, and the reserve has counted it
                self._memory.take_singly(decoding.num_new_pages(num_steps) - decoding.num_new_pages(1))
                self._policies.reserve.on_step(num_steps - 1)
            decoding.advance(num_steps)
            while (request := decoding.pop_ended()) is not None:
                ended[request.arrival] = request
        # Pages that are used last are evicted last, so requests are processed in the order of the grants.
        for request in sorted((*ended.values(), *self._completing), key=deserving):
            if request.is_decoding:
                self._end(request, self._stop_decoding(request), now_s)
            else:
                self._computed(request, 1, now_s)
        for request, num_tokens in self._prefills:
            self._computed(request, num_tokens, now_s)
        if self._withdrawn:
            self._drop_withdrawn()
        if self._inbox or self._taken:
            self._take(now_s)
        self._start(now_s)

    def _take(self, now_s: float) -> None:
        """Queue what has arrived; if steps overlap and the next one is decided already, a step later."""
        queued, arrived = self._taken, self._inbox
        for request in arrived:
            request.arrived_s = now_s
        if self._overlaps and (self._running or self._queue):
            self._taken = arrived
        else:
            queued, self._taken = [*queued, *arrived], []
        self._inbox = []
        for request in queued:
            refusal = self._refusal(request, now_s)
            if refusal:
                self._note_end(request, now_s, refused=refusal)
            else:
                self._enqueue(request)

    def _decision(self) -> Decision:
        """Return the work of the present steps, which has not been applied to the requests yet."""
        decoding = [request for request in self._running.values() if self._is_decoding and request.is_decoding]
        decoding += self._completing
        return Decision(
            replica=self._index,
            began_s=self._run_started_s,
            num_steps=self._num_run_steps,
            running=tuple(sorted(self._running)),
            decodes=tuple(sorted((request.arrival, request.num_tokens - 1) for request in decoding)),
            prompts=tuple((request.arrival, request.num_computed, num) for request, num in self._prefills),
        )

    def _start(self, now_s: float) -> None:
        """Decide the next step, and how often it repeats."""
        policies, memory = self._policies, self._memory
        self._prefills, self._completing = [], []
        self._run_started_s = now_s
        self._is_decoding = False
        self._num_run_steps = 0
        if not self._queue and not self._running:
            self.end_s = inf
            return
        if self._queue.begin_step():
            self._prefilling.sort(key=deserving)
        budget, top_priority = policies.budget.open(len(self._running)), self._queue.top_priority
        is_prefill_first, has_preempted = policies.budget.prefill_first, False
        if not is_prefill_first:
            has_preempted = self._decode(budget)
        prompts = self._open_prompts(budget)
        has_preempted |= self._continue_prompts(prompts, budget, least=top_priority)
        if not is_prefill_first:
            self._note_step(has_preempted)
        self._requeue()
        is_later = not has_preempted and self._admit(prompts, budget, now_s)
        is_later |= self._continue_prompts(prompts, budget)
        if is_prefill_first:
            if not self._prefills:
                is_later |= self._decode(budget)
            self._note_step(has_preempted or is_later)
        elif is_later and not has_preempted:
            policies.reserve.on_preempt()
        has_preempted |= is_later
        self._requeue()
        self._recorder.moment(now_s, num_running=len(self._running), num_waiting=len(self._queue), memory=memory)
        if self._prefills or self._completing:
            self._num_run_steps = 1
            self.end_s = now_s + self._step_s()
        elif self._is_decoding:
            self._set_run(self._num_alike())
        else:
            assert has_preempted, "a waiting request must fit when no request runs"
            self._start(now_s)

    def _step_s(self) -> float:
        """Return how long the step just decided takes, if it computes prompts.

        The last token of a prompt that was begun in an earlier step takes as long as a decode: the device computes the
        same, whether prompts come first or not.
        """
        decoding = self._decoding
        last = [
            request
            for request, _ in self._prefills
            if _lacks_one(request) and request.num_computed > request.num_matched
        ]
        prompts = [(request, num) for request, num in self._prefills if request not in last]
        singles = [*self._completing, *last]
        return self._machine.model.step_s(
            num_prefill=sum(num for _, num in prompts),
            num_decode=len(singles) + (decoding.num_requests if self._is_decoding else 0),
            num_kv=sum(request.num_tokens for request in singles) + (decoding.kv_tokens if self._is_decoding else 0),
            num_pairs=sum(pairs_of(request.num_computed, num) for request, num in prompts),
        )

    def _note_step(self, has_preempted: bool) -> None:
        if has_preempted:
            self._policies.reserve.on_preempt()
        else:
            self._policies.reserve.on_step()

    def _end_run_with_step(self, now_s: float) -> None:
        """End a run of decode steps with the step that runs now."""
        if self._num_run_steps > 1:
            decoding, elapsed_s = self._decoding, now_s - self._run_started_s
            num_steps = self._machine.num_decode_steps(
                elapsed_s, decoding.num_requests, decoding.kv_tokens, at_most=self._num_run_steps
            )
            self._set_run(max(1, num_steps))

    def _drop_withdrawn(self) -> None:
        """Remove the withdrawn requests that have not ended in the last step."""
        for request in self._withdrawn:
            if request in self._inbox:
                self._inbox.remove(request)
            elif request in self._taken:
                self._taken.remove(request)
            elif self._running.get(request.arrival) is request:
                if request.is_decoding:
                    num_computed = self._stop_decoding(request)
                else:
                    self._prefilling.remove(request)
                    num_computed = request.num_computed
                self._memory.release(request, num_computed)
                del self._running[request.arrival]
                self._leave_batch(request)
            elif request in self._queue:
                self._queue.remove(request)
                self._recorder.observed.service.leave(request.tenant)
        self._withdrawn.clear()

    def _note_end(self, request: SimRequest, now_s: float, *, refused: str = "") -> None:
        if request in self._withdrawn:
            return
        if request.is_recorded:
            self._recorder.ended(request, now_s, refused=refused)
        if self._on_end is not None:
            self._on_end(request)

    def _set_run(self, num_steps: int) -> None:
        """Start a run of `num_steps` steps in which requests only decode."""
        decoding = self._decoding
        self._num_run_steps = num_steps
        self.end_s = self._run_started_s + self._machine.decode_s(num_steps, decoding.num_requests, decoding.kv_tokens)

    def _num_alike(self) -> int:
        """Return the number of steps, from the one just decided, in which requests can only decode."""
        decoding = self._decoding
        if self._taken or (self._queue and len(self._running) < self._policies.budget.max_running):
            return 1
        num_pages = self._memory.num_available + decoding.num_new_pages(1)  # the pages of the first step are taken
        return decoding.steps_within(num_pages, at_most=decoding.steps_to_end)

    def _decode(self, budget: StepBudget) -> bool:
        """Grant a token to every request that decodes or lacks just the last token of its prompt.

        Returns:
            Whether any request was preempted for them.
        """
        decoding, memory = self._decoding, self._memory
        completing = [request for request in self._prefilling if _lacks_one(request)]
        num_pages = sum([memory.pages_of(request.num_tokens) - request.num_pages for request in completing])
        num_new_pages = decoding.num_new_pages(1)
        if num_pages + num_new_pages <= memory.num_available:
            memory.take_singly(num_new_pages)
            for request in completing:
                memory.grow(request, request.num_tokens)
            has_preempted = False
        else:
            completing = self._decode_in_turn(completing)
            has_preempted = True
        if decoding.num_requests or completing:
            has_room = budget.take_decode(decoding.num_requests + len(completing))
            assert has_room, "max_step_tokens >= max_running"
        self._is_decoding = decoding.num_requests > 0
        self._completing = completing
        return has_preempted

    def _decode_in_turn(self, completing: list[SimRequest]) -> list[SimRequest]:
        """Give the decoding requests their pages, most deserving first, and preempt others when there are none left.

        Pages are taken and requests preempted in the same order as in pagewood-engine, because the order decides which
        pages are evicted.

        Returns:
            Those of `completing` that still run.
        """
        memory, without_grant = self._memory, dict(self._running)
        decoding = [request for request in self._running.values() if request.is_decoding]
        for request in sorted((*decoding, *completing), key=deserving):
            is_running = request.arrival in self._running
            if is_running and (request.num_tokens - 1) % memory.page_size == 0:
                while is_running and not memory.num_available:
                    del without_grant[self._preempt(list(without_grant.values()))]
                    is_running = request.arrival in self._running
                if is_running and request.is_decoding:
                    memory.take_singly(1)
                elif is_running:
                    memory.grow(request, request.num_tokens)
            without_grant.pop(request.arrival, None)
        return [request for request in completing if request.arrival in self._running]

    def _open_prompts(self, budget: StepBudget) -> "_Prompts":
        """Return the prompts in progress; part of the step is left for requests that wait to start."""
        if not self._prefilling:
            return _Prompts(left=[], room=0)
        room, limits = budget.offer_prefill(_ANY_NUMBER), self._policies.budget
        if self._queue.num_candidates and len(self._running) < limits.max_running and limits.max_prefills > 1:
            room -= room // _PARTS_OF_STEP
        return _Prompts(left=self._prefilling[::-1], room=room)

    def _continue_prompts(self, prompts: "_Prompts", budget: StepBudget, *, least: float = -inf) -> bool:
        """Grant tokens to prompts in progress of at least a priority; return whether any request was preempted."""
        has_preempted = False
        while prompts.left and prompts.left[-1].priority >= least:
            request = prompts.left.pop()
            is_in_prompt = request.num_computed < request.num_prompt and self._policies.budget.prefill_first
            if request.arrival not in self._running or (_lacks_one(request) and not is_in_prompt):
                continue  # it was preempted for a more deserving one, or decodes
            num_missing = request.num_tokens - request.num_computed
            num_tokens = min(budget.offer_prefill(num_missing), prompts.room)
            while num_tokens and request.arrival in self._running:
                if self._memory.grow(request, request.num_computed + num_tokens):
                    prompts.room -= budget.take_prefill(num_tokens, ends=num_tokens == num_missing)
                    self._prefills.append((request, num_tokens))
                    break
                self._preempt_for(request)
                has_preempted = True
        return has_preempted

    def _preempt_for(self, request: SimRequest) -> None:
        """Preempt a request without a grant in this step, or one of lower priority rather than `request` itself."""
        candidates = self._without_grant()
        if choose_victim(candidates, rank=self._policies.victim) is request:
            lower = [one for one in self._running.values() if one.priority < request.priority]
            candidates = [one for one in lower if one not in candidates] or candidates
        self._preempt(candidates)

    def _without_grant(self) -> list[SimRequest]:
        """Return the running requests without a grant in the present step."""
        granted = {request.arrival for request in (*self._completing, *(request for request, _ in self._prefills))}
        running = self._running.values()
        return [one for one in running if one.arrival not in granted and not (self._is_decoding and one.is_decoding)]

    def _admit(self, prompts: "_Prompts", budget: StepBudget, now_s: float) -> bool:
        """Admit waiting requests while budget and memory last.

        A prompt in progress goes on before the waiting requests that are not of higher priority. Parked requests count
        as running for those of lower priority.

        Returns:
            Whether any request was preempted for such a prompt.
        """
        if not self._queue or not budget.can_admit:
            return False
        policies, memory = self._policies, self._memory
        passing = self._queue.ordered(now_s)
        policies.skip_ahead.begin_step(self._queue)
        reserve: StepReserve | None = None
        claims: list[tuple[SimRequest, int]] = []
        has_preempted = False
        full_tenants: set[str] = set()
        admitted: list[SimRequest] = []
        deferred: list[SimRequest] = []
        for request in passing:
            if prompts.left and prompts.left[-1].priority >= request.priority:
                has_preempted = self._continue_prompts(prompts, budget, least=request.priority)
                reserve = None
            if has_preempted or not budget.can_admit or policies.skip_ahead.is_barred(request):
                break
            before, claims = claims, self._queue.claims_above(request.priority)
            if claims != before:
                reserve = None
            if policies.quotas is not None and not self._has_quota(request, policies.quotas, full_tenants, claims):
                continue
            if self._queue.defer(request):
                deferred.append(request)
                continue
            if len(self._running) + len(claims) >= policies.budget.max_running:
                if policies.skip_ahead.pass_over(request):
                    continue
                break
            if reserve is None:
                reserve = self._open_reserve(claims)
            num_reserved = reserve.num_reserved(request, num_available=memory.num_available)
            num_tokens = self._fit(request, budget, num_reserved=num_reserved)
            if num_tokens:
                request.num_computed = request.num_matched
                self._queue.start(request)
                reserve.admit(request, num_to_complete=memory.pages_of(request.num_tokens) - request.num_pages)
                budget.take_prefill(num_tokens, ends=request.num_computed + num_tokens == request.num_tokens)
                budget.admit()
                policies.skip_ahead.admitted(request)
                if policies.quotas is not None:
                    policies.quotas.admit(request)
                self._prefills.append((request, num_tokens))
                self._running[request.arrival] = request
                insort(self._prefilling, request, key=deserving)
                admitted.append(request)
            elif not policies.skip_ahead.pass_over(request):
                break
        for request in admitted:
            self._queue.admit(request)
            self._recorder.observed.service.leave(request.tenant)
            if request.num_hit < 0:
                request.num_hit = request.num_matched
                request.admitted_s = now_s
            else:
                request.num_recomputed += request.num_tokens - request.num_matched
        for request in deferred:
            self._queue.park(request)
        return has_preempted

    def _open_reserve(self, claims: Sequence[tuple[SimRequest, int]]) -> StepReserve:
        memory = self._memory
        num_to_complete = sum(num_pages for _, num_pages in claims)
        num_to_complete += sum(memory.pages_of(other.num_tokens) - other.num_pages for other in self._prefilling)
        if not self._is_decoding:  # the decoding requests have no pages for their next tokens yet
            num_to_complete += self._decoding.num_new_pages(1)
        running = (*self._running.values(), *(request for request, _ in claims))
        return self._policies.reserve.open(running, page_size=memory.page_size, num_to_complete=num_to_complete)

    def _has_quota(
        self,
        request: SimRequest,
        quotas: Quotas,
        full_tenants: set[str],
        claims: Sequence[tuple[SimRequest, int]],
    ) -> bool:
        """Return whether the tenant may run a request; checks a tenant at its `max_running` only once in a pass."""
        if request.tenant in full_tenants:
            return False
        claimants = [claimant for claimant, _ in claims if claimant.tenant == request.tenant]
        for claimant in claimants:
            quotas.admit(claimant)
        verdict = quotas.check(request)
        for claimant in claimants:
            quotas.stop(claimant)
        if verdict.short_of == "max_running":
            full_tenants.add(request.tenant)
        return verdict.fits

    def _fit(self, request: SimRequest, budget: StepBudget, *, num_reserved: int) -> int:
        """Give a waiting request pages for its first chunk, and return the chunk's tokens; 0 if it does not fit."""
        memory, known_matched = self._memory, request.num_matched
        num_matched = memory.matched_pages(request, memory.cache.match(request.keys))
        memory.lease(request, num_matched)
        request.num_matched = num_matched * memory.page_size
        num_tokens = budget.offer_prefill(request.num_tokens - request.num_matched)
        to_complete = memory.pages_of(request.num_tokens) - num_matched
        if not num_tokens or memory.num_available < to_complete + num_reserved:
            memory.unlease(request)
            request.num_matched = known_matched
            return 0
        memory.grow(request, request.num_matched + num_tokens)
        return num_tokens

    def _refusal(self, request: SimRequest, now_s: float) -> str:
        """Return why a request cannot be served; "" if it can."""
        memory, policies = self._memory, self._policies
        num_most = memory.pages_of(request.num_prompt + request.max_new_tokens - 1)
        if num_most > memory.num_pages:
            return f"needs up to {num_most} pages of {memory.num_pages}"
        if policies.quotas is not None and not (verdict := policies.quotas.can_ever_run(request)).fits:
            return verdict.reason
        if policies.feasibility is not None and request.deadline_s < inf:
            request.num_matched = memory.page_size * memory.matched_pages(request, memory.cache.match(request.keys))
            num_ahead = sum(other.num_tokens - other.num_matched for other in self._queue)
            num_ahead += sum(other.num_tokens - other.num_computed for other in self._prefilling)
            load = Load(
                num_prompt_tokens_ahead=num_ahead,
                num_decode=self._decoding.num_requests,
                num_kv=self._decoding.kv_tokens,
            )
            too_late = policies.feasibility.check(request, now_s, load)
            return "" if too_late is None else too_late.reason
        return ""

    def _enqueue(self, request: SimRequest) -> None:
        self._queue.add(request)
        self._recorder.observed.service.wait(request.tenant)

    def _computed(self, request: SimRequest, num_tokens: int, now_s: float) -> None:
        """Record computed prompt tokens of a request; after the last of them it gets a token."""
        is_in_prompt = request.num_computed < request.num_prompt
        request.num_computed += num_tokens
        is_complete = request.num_computed == request.num_tokens
        if is_in_prompt or not is_complete:  # output that is computed again is published at the end, as other output
            self._memory.publish(request, request.num_computed)
        if not is_complete:
            return
        self._prefilling.remove(request)
        num_computed = request.num_tokens
        request.generate_one()
        self._recorder.token_after_prompt(request, now_s)
        if self._on_computed is not None and request not in self._withdrawn:
            self._on_computed(request)
        if request.num_generated == request.num_output:
            self._end(request, num_computed, now_s)
        else:
            self._decoding.add(request)
            self._recorder.start_decoding(request)

    def _stop_decoding(self, request: SimRequest, *, has_next_page: bool = False) -> int:
        """Remove a request from the decoding ones, and return how many of its tokens are computed.

        `has_next_page`: whether it has a page for the token after them.
        """
        num_computed = self._decoding.remove(request)
        self._memory.settle(request, self._memory.pages_of(num_computed + has_next_page) - request.num_pages)
        self._recorder.stop_decoding(request)
        return num_computed

    def _preempt(self, candidates: list[SimRequest]) -> int:
        """Stop one of the candidates, which `_requeue` will queue; its computed tokens stay cached while there is room.

        Returns:
            Its arrival number.
        """
        request = choose_victim(candidates, rank=self._policies.victim)
        assert request is not None, "the request that needs memory is itself a candidate"
        if request.is_decoding:
            request.num_computed = self._stop_decoding(request, has_next_page=self._is_decoding)
            self._is_decoding &= self._decoding.num_requests > 0
        else:
            self._prefilling.remove(request)
            if request in self._completing:
                self._completing.remove(request)
        self._memory.release(request, request.num_computed)
        request.num_preemptions += 1
        del self._running[request.arrival]
        self._preempted.append(request)
        return request.arrival

    def _requeue(self) -> None:
        """Queue the requests that were preempted; not in a pass, in which the queue must not change."""
        for request in self._preempted:
            self._leave_batch(request)
            self._enqueue(request)
        self._preempted.clear()

    def _end(self, request: SimRequest, num_computed: int, now_s: float) -> None:
        self._memory.release(request, num_computed)
        del self._running[request.arrival]
        self._leave_batch(request)
        self._policies.reserve.on_end(request)
        self._note_end(request, now_s)

    def _leave_batch(self, request: SimRequest) -> None:
        self._queue.stop(request)
        if self._policies.quotas is not None:
            self._policies.quotas.stop(request)


def _lacks_one(request: SimRequest) -> bool:
    """Return whether only the last token of a prompt in progress is left, which is computed like a decode.

    With `prefill_first` this holds only for output that is computed again, not for the prompt itself.
    """
    return request.num_tokens - request.num_computed == 1
