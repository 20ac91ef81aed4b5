"""The policies that a planner asks: how much a step may do, what is kept free, who yields, and who may pass whom."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Protocol

from pagewood.engine.core.request import Request


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
