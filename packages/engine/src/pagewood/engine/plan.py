"""Who runs in the next step, and how many tokens: decides, and asks the KV space for the room."""

from __future__ import annotations

from bisect import insort
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

from pagewood.engine.kv import KVSpace
from pagewood.engine.state import EngineState, Request, deserving

_MIN_SHARED_TOKENS = 32
"""A waiting request defers to a prompt in progress if at least so much of its own prefill would be saved."""
_MAX_EXAMINED = 256
"""Waiting requests that one step looks at."""


class Grant(NamedTuple):
    """Compute positions [start, start + num_tokens) of a request; a tuple, because a step makes hundreds."""

    request: Request
    start: int
    num_tokens: int
    samples: bool
    """Whether the token after them is sampled."""
    admitted: bool
    """Whether its row is new to the runner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step: its grants, each request at most once."""

    grants: tuple[Grant, ...]
    num_preempted: int = 0


class StepBudget(Protocol):
    """What is left of one step."""

    def take_decode(self) -> bool:
        """Take one token for a running request, if there is room."""
        ...

    def offer_prefill(self, wanted: int) -> int:
        """Return how many of the wanted prompt tokens may be computed; takes nothing."""
        ...

    def take_prefill(self, wanted: int) -> int:
        """Take what would be offered, and return it."""
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

    def open(self, num_running: int) -> StepBudget:
        """Begin a step."""
        ...


class Reserve(Protocol):
    """How much memory is kept for the outputs of running requests."""

    def on_step(self) -> None:
        """A step passed without preemption."""
        ...

    def on_preempt(self, survivors: Iterable[Request]) -> None:
        """A request had to give up its pages."""
        ...

    def reserved_tokens(self, running: Iterable[Request], *, page_size: int) -> int:
        """Estimate what these requests will need beyond the pages of their known tokens, in tokens of whole pages."""
        ...


class Victim(Protocol):
    """Who yields when memory runs out."""

    def __call__(self, running: Sequence[Request]) -> Request | None:
        """Return the request to preempt; None of none."""
        ...


class SkipAhead(Protocol):
    """How far admission may look past a request that does not fit."""

    def begin_step(self, waiting: Container[Request]) -> None:
        """Allow as many requests as ever to be passed over."""
        ...

    def pass_over(self, request: Request) -> bool:
        """Whether the requests behind this one, which does not fit now, may go first."""
        ...

    def admitted(self, request: Request) -> None:
        """It runs, and got past those who were passed over before it."""
        ...


class Planner:
    """Decides steps. Invariant: a decode is never held up by a prompt, and the most deserving request by nothing.

    A request that cannot get a page takes it from the least deserving one without a grant in this step. One that
    still has a step in flight cannot be preempted at once: it is withheld from this step, and preempted in the next.
    """

    __slots__ = ("_budget", "_defer_repeats", "_kv", "_reserve", "_skip_ahead", "_victim")

    def __init__(
        self,
        *,
        kv: KVSpace,
        budget: Budget,
        reserve: Reserve,
        victim: Victim,
        skip_ahead: SkipAhead,
        defer_repeats: bool,
    ) -> None:
        """Take the parts.

        Args:
            kv: gives pages and rows.
            budget: how much a step may do.
            reserve: how much memory is kept for outputs.
            victim: who yields.
            skip_ahead: how far to look past a request that does not fit.
            defer_repeats: whether to hold back a prompt that repeats one in progress.
        """
        self._defer_repeats = defer_repeats
        self._kv = kv
        self._budget = budget
        self._reserve = reserve
        self._victim = victim
        self._skip_ahead = skip_ahead

    def plan(self, state: EngineState, now_s: float) -> StepPlan:
        """Decide the next step; moves requests between `waiting` and `running` and gives them pages."""
        budget = self._budget.open(len(state.running))
        shortage = Shortage(state, self._kv, self._victim)
        grants: list[Grant] = []
        self._plan_decodes(state, budget, grants, shortage)
        self._plan_prompts(state, budget, grants, shortage)
        for request in shortage.preempted:
            state.running.remove(request)
            state.waiting.stop(request)
            self._kv.follow(request)
            state.waiting.add(request)
        if shortage.preempted:
            self._reserve.on_preempt(state.running)
        else:
            self._reserve.on_step()
        if len(state.waiting) and not shortage.excluded:
            self._admit(state, now_s, budget, grants)
        return StepPlan(grants=tuple(grants), num_preempted=len(shortage.preempted))

    def _plan_decodes(self, state: EngineState, budget: StepBudget, grants: list[Grant], shortage: Shortage) -> None:
        """Grant the next position of every request that has computed all others."""
        page_size = self._kv.page_size
        decoding: list[Request] = []
        full: list[Request] = []
        for request in state.running:
            length = request.num_known + request.num_unseen
            if length - request.num_launched == 1 and length < request.max_length:
                decoding.append(request)
                if length > request.num_pages * page_size:
                    full.append(request)
        grown = self._kv.add_page_to_each(full)
        for request in decoding:
            if shortage.excluded and request in shortage.excluded:
                continue
            if not budget.take_decode():
                return
            start = request.num_launched
            if grown or start < request.num_pages * page_size or shortage.grow(request, start + 1, grants):
                grants.append(Grant(request, start, 1, True, False))

    def _plan_prompts(self, state: EngineState, budget: StepBudget, grants: list[Grant], shortage: Shortage) -> None:
        """Continue the prompts in progress."""
        for request in state.running:
            start = request.num_launched
            num_missing = request.num_known + request.num_unseen - start
            if num_missing <= 1 or request in shortage.excluded:
                continue
            count = budget.offer_prefill(num_missing)
            if count and shortage.grow(request, start + count, grants):
                budget.take_prefill(count)
                grants.append(Grant(request, start, count, count == num_missing, False))

    def _admit(self, state: EngineState, now_s: float, budget: StepBudget, grants: list[Grant]) -> None:
        """Start waiting requests while budget, rows and memory last."""
        kv = self._kv
        if not budget.can_admit or not kv.num_free_rows or not budget.offer_prefill(1):
            return
        for request in kv.changed():
            state.waiting.update(request)
        self._skip_ahead.begin_step(state.waiting)
        admitted: list[Request] = []
        for request in islice(state.waiting.ordered(now_s), _MAX_EXAMINED):
            kv.probe(request)
            count = budget.offer_prefill(request.num_known - request.num_matched)
            if not count or not budget.can_admit or not kv.num_free_rows:
                break
            if self._defer_repeats and self._repeats_a_prompt_in_progress(request, state.running):
                continue
            num_reserved = self._reserved_pages(state.running, request)
            if kv.recall(request, num_reserved=num_reserved):
                continue
            count = kv.admit(request, max_tokens=count, num_reserved=num_reserved)
            if not count:
                if self._skip_ahead.pass_over(request):
                    continue
                break
            budget.take_prefill(count)
            budget.admit()
            self._skip_ahead.admitted(request)
            insort(state.running, request, key=deserving)
            admitted.append(request)
            start = request.num_matched
            grants.append(Grant(request, start, count, start + count == request.num_known, True))
        for request in admitted:
            state.waiting.admit(request)

    def _reserved_pages(self, running: Sequence[Request], candidate: Request) -> int:
        """Pages that running requests and the candidate will probably need beyond the candidate's known tokens."""
        if not running:
            return 0
        page_size = self._kv.page_size
        to_complete = sum(max(0, -(-request.num_known // page_size) - request.num_pages) for request in running)
        return to_complete + self._reserve.reserved_tokens([*running, candidate], page_size=page_size) // page_size

    def _repeats_a_prompt_in_progress(self, request: Request, running: Sequence[Request]) -> bool:
        """Whether waiting for a running request's prompt to be published would save a good part of the prefill.

        Source: SGLang's in-batch prefix caching, which sorts such a request to the end of the queue.
        """
        page_size = self._kv.page_size
        num_shared = request.num_matched + -(-_MIN_SHARED_TOKENS // page_size) * page_size
        if num_shared >= request.num_known:
            return False
        for other in running:
            if (
                other.num_computed < other.num_prompt
                and other.num_published * page_size < num_shared <= other.num_prompt
                and other.namespace == request.namespace
                and (other.tokens[:num_shared] == request.tokens[:num_shared]).all()
            ):
                return True
        return False


class Shortage:
    """Finds pages when there are none left, within one step. Invariant: who is excluded gets no grant in this step."""

    __slots__ = ("_is_relief_coming", "_kv", "_state", "_victim", "excluded", "preempted")

    def __init__(self, state: EngineState, kv: KVSpace, victim: Victim) -> None:
        self._state = state
        self._kv = kv
        self._victim = victim
        self._is_relief_coming = False
        """Whether somebody is withheld, who can be preempted in the next step."""  # written by: grow
        self.excluded: list[Request] = []
        """Those preempted, withheld or without a page."""  # written by: grow
        self.preempted: list[Request] = []  # written by: grow

    def grow(self, request: Request, num_tokens: int, grants: Sequence[Grant]) -> bool:
        """Give the request pages for its first num_tokens positions, at the cost of less deserving ones."""
        while not self._kv.grow(request, num_tokens):
            if self._is_relief_coming:
                self.excluded.append(request)
                return False
            victim = self._victim(self._without_grant(grants)) or request
            self.excluded.append(victim)
            if victim.num_in_flight:
                self._is_relief_coming = True
                if victim is not request:
                    self.excluded.append(request)
                return False
            self._kv.release(victim)
            self.preempted.append(victim)
            if victim is request:
                return False
        return True

    def _without_grant(self, grants: Sequence[Grant]) -> list[Request]:
        taken = {id(grant.request) for grant in grants} | {id(request) for request in self.excluded}
        return [request for request in self._state.running if id(request) not in taken]
