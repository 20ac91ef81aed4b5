"""Who runs in the next step, and how many tokens: decides, and asks the KV space for the room."""

from __future__ import annotations

from bisect import insort
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

from pagewood.engine.core.kv import KVSpace
from pagewood.engine.core.state import EngineState, Request, deserving

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


class StepReserve(Protocol):
    """What is kept from those who are admitted in one step."""

    def beside(self, candidate: Request) -> int:
        """Return how many pages must be left when a waiting request has those of all its known tokens."""
        ...

    def admit(self, request: Request, *, num_to_complete: int) -> None:
        """Take note that a request runs that still lacks so many pages for its known tokens."""
        ...


class Reserve(Protocol):
    """How much memory is kept for the outputs of running requests."""

    def on_step(self) -> None:
        """A step passed without preemption."""
        ...

    def on_preempt(self, survivors: Iterable[Request]) -> None:
        """A request had to give up its pages."""
        ...

    def open(self, running: Iterable[Request], *, page_size: int, num_to_complete: int) -> StepReserve:
        """Begin a step in which requests are admitted; the running ones lack so many pages for their known tokens."""
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
        reserve = self._open_reserve(state.running)
        in_progress = PromptsInProgress(state.running, page_size=kv.page_size)
        admitted: list[Request] = []
        for request in islice(state.waiting.ordered(now_s), _MAX_EXAMINED):
            kv.probe(request)
            count = budget.offer_prefill(request.num_known - request.num_matched)
            if not count or not budget.can_admit or not kv.num_free_rows:
                break
            if self._defer_repeats and in_progress.are_repeated_by(request):
                continue
            num_reserved = reserve.beside(request)
            if kv.recall(request, num_reserved=num_reserved):
                continue
            count = kv.admit(request, max_tokens=count, num_reserved=num_reserved)
            if not count:
                if self._skip_ahead.pass_over(request):
                    continue
                break
            budget.take_prefill(count)
            budget.admit()
            reserve.admit(request, num_to_complete=self._num_to_complete(request))
            in_progress.add(request)
            self._skip_ahead.admitted(request)
            insort(state.running, request, key=deserving)
            admitted.append(request)
            start = request.num_matched
            grants.append(Grant(request, start, count, start + count == request.num_known, True))
        for request in admitted:
            state.waiting.admit(request)

    def _open_reserve(self, running: Sequence[Request]) -> StepReserve:
        num_to_complete = sum(map(self._num_to_complete, running))
        return self._reserve.open(running, page_size=self._kv.page_size, num_to_complete=num_to_complete)

    def _num_to_complete(self, request: Request) -> int:
        """Pages that a running request lacks for its known tokens."""
        return max(0, -(-request.num_known // self._kv.page_size) - request.num_pages)


class PromptsInProgress:
    """The prompts that are being computed, to find those in the queue that repeat one.

    Two prompts share so many tokens exactly if those prefixes are equal, so sets of prefixes answer, one for each
    length that is asked for.

    Source: SGLang's in-batch prefix caching, which sorts such a request to the end of the queue.
    """

    __slots__ = ("_min_shared", "_page_size", "_prefixes", "_running")

    def __init__(self, running: Iterable[Request], *, page_size: int) -> None:
        self._page_size = page_size
        self._min_shared = -(-_MIN_SHARED_TOKENS // page_size) * page_size
        self._running = [request for request in running if request.num_computed < request.num_prompt]
        self._prefixes: dict[int, set[bytes]] = {}
        """Of those that will be published, by length in tokens."""  # written by: add, are_repeated_by

    def add(self, request: Request) -> None:
        """Count a request in that has just been admitted, if its prompt is to be computed."""
        if request.num_computed < request.num_prompt:
            self._running.append(request)
            for num_tokens, prefixes in self._prefixes.items():
                if self._will_publish(request, num_tokens):
                    prefixes.add(request.prefix(num_tokens))

    def are_repeated_by(self, request: Request) -> bool:
        """Whether waiting for one of them to be published would save a good part of the request's prefill."""
        num_shared = request.num_matched + self._min_shared
        if num_shared >= request.num_known:
            return False
        prefixes = self._prefixes.get(num_shared)
        if prefixes is None:
            prefixes = {r.prefix(num_shared) for r in self._running if self._will_publish(r, num_shared)}
            self._prefixes[num_shared] = prefixes
        return bool(prefixes) and request.prefix(num_shared) in prefixes

    def _will_publish(self, running: Request, num_tokens: int) -> bool:
        return running.num_published * self._page_size < num_tokens <= running.num_prompt


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
