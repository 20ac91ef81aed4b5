"""How much memory to reserve for tokens that requests will generate."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pagewood.schedpolicy.pages import pages_of
from pagewood.schedpolicy.requests import Request, Running, Waiting

# Limit on the reserved part of `max_new_tokens`: few requests generate more.
_MAX_RESERVED_TOKENS = 4096
# Tokens that each remaining request should be able to generate before the next preemption.
_HEADROOM_TOKENS = 20


class NewTokenRatio:
    """Estimates the part of their allowed output that requests will generate.

    Reserving all of it leaves memory idle; reserving nothing causes too many preemptions. The ratio decays a little in
    every step and jumps up when memory has run out and a request was preempted. Then it holds for `hold_steps`, so that
    the freed memory is not filled at once with new requests that cause the next preemption.

    Invariant: `min_factor * init <= ratio <= 1`.

    The ratio is not reset when the engine becomes idle: it was learned from the requests, and idle time does not make
    it wrong. If the next requests differ, a ratio that is too high decays, and one that is too low costs one
    preemption.

    Source: `new_token_ratio` of SGLang; the hold is ours.
    """

    __slots__ = ("_decay", "_min_ratio", "_num_held", "_ratio", "hold_steps")

    def __init__(
        self, *, init: float = 0.7, min_factor: float = 0.14, decay_steps: int = 600, hold_steps: int = 60
    ) -> None:
        """Start at `init`; SGLang starts at 0.7 times the configured conservativeness, and 1 at most.

        Args:
            init: Initial ratio, in (0, 1].
            min_factor: The least ratio, as a part of `init`, in [0, 1].
            decay_steps: Steps from `init` to the least ratio, >= 1.
            hold_steps: Steps without decay after a preemption, >= 0.

        Raises:
            ValueError: An argument is out of range.
        """
        if not 0 < init <= 1:
            raise ValueError(f"init must be in (0, 1], got {init}")
        if not 0 <= min_factor <= 1:
            raise ValueError(f"min_factor must be in [0, 1], got {min_factor}")
        if decay_steps < 1:
            raise ValueError(f"decay_steps must be >= 1, got {decay_steps}")
        if hold_steps < 0:
            raise ValueError(f"hold_steps must be >= 0, got {hold_steps}")
        self.hold_steps = hold_steps
        self._min_ratio = init * min_factor
        self._decay = (init - self._min_ratio) / decay_steps
        self._ratio = init  # written by: on_step, on_preempt
        self._num_held = 0  # steps still to hold; written by: on_step, on_preempt

    @property
    def ratio(self) -> float:
        """The estimate, in (0, 1], or 0 if `min_factor` is 0."""
        return self._ratio

    def on_step(self) -> None:
        """Record a step without preemption."""
        if self._num_held:
            self._num_held -= 1
        else:
            self._ratio = max(self._min_ratio, self._ratio - self._decay)

    def on_preempt(self, survivors: Iterable[Running]) -> None:
        """Record that memory ran out and requests were preempted.

        By SGLang's formula the ratio becomes the part of their allowed output that the survivors have generated so far,
        plus 20 tokens each; here only if that is more than the present ratio.
        """
        num_expected, num_allowed = 0, 1
        for request in survivors:
            num_expected += request.num_generated + _HEADROOM_TOKENS
            num_allowed += request.max_new_tokens
        self._ratio = max(self._ratio, min(1.0, num_expected / num_allowed))
        self._num_held = self.hold_steps

    def reserved_tokens(self, running: Iterable[Request], *, page_size: int) -> int:
        """Estimate the memory that running requests need beyond the pages of their `num_tokens`.

        Returns:
            Tokens, a multiple of `page_size`.
        """
        num_pages = 0
        for request in running:
            num_new = self._estimate(request.max_new_tokens - request.num_generated)
            num_pages += pages_of(request.num_tokens + num_new, page_size) - pages_of(request.num_tokens, page_size)
        return num_pages * page_size

    def open(self, running: Iterable[Running], *, page_size: int, num_to_complete: int) -> "StepReserve":
        """Return the reserve of one step; reads each running request once.

        Args:
            running: Requests that run when the step begins.
            page_size: Tokens of a page.
            num_to_complete: Pages that these requests still need for their `num_tokens`.
        """
        running = tuple(running)
        num_to_come = self.reserved_tokens(running, page_size=page_size) // page_size
        return StepReserve(
            ratio=self, page_size=page_size, num_running=len(running), num_pages=num_to_complete + num_to_come
        )

    def wanted_tokens(self, waiting: Waiting, *, page_size: int) -> int:
        """Estimate the memory that a waiting request needs from admission to its end, beyond its cached prefix.

        Returns:
            Tokens, a multiple of `page_size`.
        """
        num_tokens = waiting.num_tokens + self._estimate(waiting.max_new_tokens - waiting.num_generated)
        return (pages_of(num_tokens, page_size) - waiting.num_matched // page_size) * page_size

    def _estimate(self, num_allowed: int) -> int:
        return math.ceil(self._ratio * min(max(num_allowed, 0), _MAX_RESERVED_TOKENS))


@dataclass(slots=True, kw_only=True)
class StepReserve:
    """Memory reserved in one step while requests are admitted; made by `NewTokenRatio.open`.

    Invariant: `num_pages` is `NewTokenRatio.reserved_tokens` of all running requests, including those admitted in this
    step, plus what completes their prompts; in pages. The cost of an admission does not depend on how many run.

    Attributes:
        ratio: Estimates what requests will generate.
        page_size: Tokens of a page.
        num_running: Running requests.
        num_pages: Available pages that they are expected to take.
    """

    ratio: NewTokenRatio
    page_size: int
    num_running: int  # written by: admit
    num_pages: int  # written by: admit

    def num_reserved(self, candidate: Request) -> int:
        """Return how many pages must remain after a request got pages for its `num_tokens`; 0 if it runs alone."""
        return self.num_pages + self._to_come(candidate) if self.num_running else 0

    def admit(self, request: Request, *, num_to_complete: int) -> None:
        """Count an admitted request that still needs `num_to_complete` pages for its `num_tokens`."""
        self.num_running += 1
        self.num_pages += num_to_complete + self._to_come(request)

    def _to_come(self, request: Request) -> int:
        return self.ratio.reserved_tokens((request,), page_size=self.page_size) // self.page_size
