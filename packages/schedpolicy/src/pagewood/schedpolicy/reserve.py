"""How much memory to reserve for tokens that requests will generate."""

import math
from collections import deque
from collections.abc import Iterable

from pagewood.schedpolicy.pages import pages_of
from pagewood.schedpolicy.requests import Request, Running, Waiting

# Limit on the tokens that one request is expected to generate from now on: few requests generate more.
_MAX_RESERVED_TOKENS = 4096
# Progress of a request is counted in hundredths of its limit.
_NUM_PARTS = 100
# Ended requests by which others are judged.
_NUM_OBSERVED = 64
# Imagined requests that use all of their limit: they stand for what has not been observed yet.
_NUM_IMAGINED = 4
# Moments of the future at which the demand for memory is estimated.
_NUM_MOMENTS = 16
# Sums of probabilities that differ by less count as equal, so that the order of summation does not matter.
_ROUNDING = 1e-6


class NewTokenRatio:
    """Learns which part of their allowed output requests generate, and from it how much memory they will need.

    Let `S(x)` be the part of the requests that generate more than the part `x` of their limit. A request that is at
    `x` now is expected to run still at `y` with the probability `S(y) / S(x)`. So `h` steps from now, running requests
    are expected to hold in total

        demand(h) = sum of prompt + S(y) / S(x) * (generated + h),  with y = (generated + h) / limit <= 1

    tokens. What they will need beyond their present pages is the largest demand to come, less that of now. Requests
    that start together need their outputs at the same time; of requests at different points, the ends of some make
    room for others, and hardly anything is reserved. A prompt counts also after the end, because it may be shared.

    `S` is the estimate of Kaplan and Meier from the last 64 requests that ended and those that run: short answers end
    first, so the ended ones alone would seem short. Four imagined requests that use all of their limit stand for
    what is not known. So at first all requests are expected to use all of their limit, and no admission leads to a
    preemption. Early ends lower the estimate.

    If memory has run out all the same, all requests are expected to use all of their limit for `hold_steps` steps, so
    that the freed memory is not filled at once with requests that cause the next preemption.

    Invariant: `0 < ratio <= 1`.

    Source: SGLang's `new_token_ratio` for the aim; the look ahead as in LightLLM's Past-Future scheduler (arXiv
    2507.10150), which draws lengths where this takes probabilities.
    """

    __slots__ = ("_latest", "_num_ended", "_num_held", "hold_steps", "scale")

    def __init__(self, *, scale: float = 1.0, hold_steps: int = 60) -> None:
        """Know nothing of outputs.

        Args:
            scale: Factor of what is reserved, > 0 and finite; below 1 more requests run, and more are preempted.
            hold_steps: Steps of caution after a preemption, >= 0.

        Raises:
            ValueError: An argument is out of range.
        """
        if not 0 < scale < math.inf:
            raise ValueError(f"scale must be > 0 and finite, got {scale}")
        if hold_steps < 0:
            raise ValueError(f"hold_steps must be >= 0, got {hold_steps}")
        self.scale = scale
        self.hold_steps = hold_steps
        self._num_held = 0  # steps of caution that are left; written by: on_step, on_preempt
        self._latest: deque[int] = deque()  # at which part the latest requests ended; written by: on_end
        self._num_ended = [0] * (_NUM_PARTS + 1)  # how many of them ended at each part; written by: on_end

    @property
    def ratio(self) -> float:
        """The part of its allowed output that a request which starts now is expected to generate."""
        return sum(self.survival(())[1:]) / _NUM_PARTS

    def on_step(self) -> None:
        """Record a step without preemption."""
        if self._num_held:
            self._num_held -= 1

    def on_preempt(self) -> None:
        """Record that memory ran out and requests were preempted."""
        self._num_held = self.hold_steps

    def on_end(self, request: Running) -> None:
        """Record that a request ended by itself; one that was cancelled says nothing about others."""
        if request.max_new_tokens < 1:
            return
        if len(self._latest) == _NUM_OBSERVED:
            self._num_ended[self._latest.popleft()] -= 1
        part = part_of(request)
        self._latest.append(part)
        self._num_ended[part] += 1

    def survival(self, running: Iterable[Running]) -> list[float]:
        """Return `S`, estimated from ended and running requests.

        Returns:
            For each number of hundredths of the limit, from 0 to 100: the share of requests that do not end before, in
            (0, 1].
        """
        if self._num_held:
            return [1.0] * (_NUM_PARTS + 1)
        num_beyond = self._num_ended.copy()
        for request in running:
            num_beyond[part_of(request)] += 1
        # The share of the requests that reach a part and do not end there. A request at its limit has not ended early.
        num_came, going_on = _NUM_IMAGINED + num_beyond[_NUM_PARTS], [1.0] * _NUM_PARTS
        for part in range(_NUM_PARTS - 1, -1, -1):
            num_came += num_beyond[part]
            going_on[part] = 1 - self._num_ended[part] / num_came
        found = [1.0]
        for share in going_on:
            found.append(found[-1] * share)
        return found

    def reserved_tokens(self, running: Iterable[Running], *, page_size: int) -> int:
        """Estimate the memory that running requests need beyond the pages of their `num_tokens`.

        Returns:
            Tokens, a multiple of `page_size`.
        """
        return self.open(running, page_size=page_size, num_to_complete=0).num_pages * page_size

    def open(self, running: Iterable[Running], *, page_size: int, num_to_complete: int) -> "StepReserve":
        """Return the reserve of one step; reads each running request once.

        Args:
            running: Requests that run when the step begins.
            page_size: Tokens of a page.
            num_to_complete: Pages that these requests still need for their `num_tokens`.
        """
        return StepReserve(self, tuple(running), page_size=page_size, num_to_complete=num_to_complete)

    def wanted_tokens(self, waiting: Waiting, *, page_size: int) -> int:
        """Estimate the memory that a waiting request needs from admission to its end, beyond its cached prefix.

        Returns:
            Tokens, a multiple of `page_size`.
        """
        num_pages = pages_of(waiting.num_tokens, page_size) - waiting.num_matched // page_size
        return num_pages * page_size + self.reserved_tokens((waiting,), page_size=page_size)


class StepReserve:
    """Memory reserved in one step while requests are admitted; made by `NewTokenRatio.open`.

    The demand is estimated at 16 moments, as what those that are expected to run at the moment before hold at this one;
    so it is never too low between two. To ask about a candidate takes a time that does not depend on how many run,
    unless its limit is larger than all of theirs. Nothing is estimated while there is room for all of their limits.

    Invariant: `_growth` counts all running requests, including those admitted in this step, once it is estimated.
    """

    __slots__ = (
        "_began", "_growth", "_limit", "_moments", "_most", "_num_to_complete", "_page_size", "_ratio", "_running",
        "_survival", "_top",
    )  # fmt: skip

    def __init__(
        self, ratio: NewTokenRatio, running: tuple[Running, ...], *, page_size: int, num_to_complete: int
    ) -> None:
        """Begin with the requests that run when the step begins."""
        self._ratio = ratio
        self._page_size = page_size
        self._num_to_complete = num_to_complete  # written by: admit
        self._began = running
        self._running = list(running)  # written by: admit
        self._limit = max((request.max_new_tokens for request in running), default=0)  # of all; written by: admit
        self._most = sum(map(self._most_of, running))  # pages, if all use all of their limit; written by: admit
        self._survival: list[float] = []  # written by: _look_ahead
        self._top = -1  # up to which output it was looked ahead, tokens; -1: not yet; written by: _look_ahead
        self._moments: list[tuple[int, int, int]] = []  # written by: _look_ahead
        """Number of each moment, and the steps from now to the moment before and to itself."""
        self._growth: list[float] = []  # pages beyond those held now, at each moment; written by: admit, _look_ahead

    @property
    def num_running(self) -> int:
        """Running requests."""
        return len(self._running)

    @property
    def num_pages(self) -> int:
        """Available pages that running requests are expected to take."""
        if self._running:
            self._look_ahead(self._limit)
        return self._num_to_complete + self._worst(self._growth)

    def num_reserved(self, candidate: Running, *, num_available: int = 0) -> int:
        """Return how many pages must remain after a request got pages for its `num_tokens`; 0 if it runs alone.

        Args:
            candidate: waits to be admitted.
            num_available: pages that can be given away. If they are enough for the limits of all requests, what these
                would take is returned, which may be more than is expected.
        """
        if not self._running:
            return 0
        most = math.ceil(self._ratio.scale * (self._most + self._most_of(candidate))) + self._num_to_complete
        if most + pages_of(candidate.num_tokens, self._page_size) <= num_available:
            return most
        self._look_ahead(max(candidate.max_new_tokens, self._limit))
        growth = self._growth.copy()
        self._count(candidate, growth)
        return self._num_to_complete + self._worst(growth)

    def admit(self, request: Running, *, num_to_complete: int) -> None:
        """Count an admitted request that still needs `num_to_complete` pages for its `num_tokens`."""
        self._num_to_complete += num_to_complete
        self._running.append(request)
        self._limit = max(self._limit, request.max_new_tokens)
        self._most += self._most_of(request)
        if self._top >= 0:
            self._count(request, self._growth)

    def _most_of(self, request: Running) -> int:
        """Return the pages that a request takes beyond its present ones if it uses all of its limit."""
        num_tokens, page_size = request.num_tokens, self._page_size
        num_left = max(0, min(request.max_new_tokens - request.num_generated, _MAX_RESERVED_TOKENS))
        return -(-(num_tokens + num_left) // page_size) - -(-num_tokens // page_size)

    def _look_ahead(self, num_most: int) -> None:
        """Unless that is done, choose the moments up to an output of `num_most` tokens, and count running requests."""
        num_most = min(num_most, _MAX_RESERVED_TOKENS)
        if self._top >= num_most:
            return
        self._top = num_most
        self._survival = self._ratio.survival(self._began)
        # They are denser soon, when most requests end.
        steps = [-(-num_most * number * number // _NUM_MOMENTS**2) for number in range(_NUM_MOMENTS + 1)]
        self._moments = [(number, steps[number], steps[number + 1]) for number in range(_NUM_MOMENTS)]
        self._growth = [0.0] * _NUM_MOMENTS
        for request in self._running:
            self._count(request, self._growth)

    def _count(self, request: Running, growth: list[float]) -> None:
        """Add what one request is expected to hold beyond its present pages, at each moment."""
        page_size, survival = self._page_size, self._survival
        num_tokens, num_generated, num_most = request.num_tokens, request.num_generated, request.max_new_tokens
        num_left = min(num_most - num_generated, _MAX_RESERVED_TOKENS)
        num_shared = -(-(num_tokens - num_generated) // page_size)  # it stays, as the pages of a prompt may do
        num_own = -(-num_tokens // page_size) - num_shared
        now = part_of(request)
        divisor = survival[min(now + 1, _NUM_PARTS)]
        for index, before, moment in self._moments:  # nothing is called here, because an engine does this in every step
            if before >= num_left:
                growth[index] -= num_own
                continue
            num_then = -(-(num_tokens + (moment if moment < num_left else num_left)) // page_size) - num_shared
            part = (num_generated + before) * _NUM_PARTS // num_most
            if part > now:
                growth[index] += num_then * survival[part] / divisor - num_own
            else:
                growth[index] += num_then - num_own

    def _worst(self, growth: list[float]) -> int:
        return max(0, math.ceil(self._ratio.scale * max(growth, default=0.0) - _ROUNDING))


def part_of(request: Request) -> int:
    """Return the part of its limit that a request has generated, in hundredths, rounded down."""
    if request.num_generated >= request.max_new_tokens:
        return _NUM_PARTS
    return request.num_generated * _NUM_PARTS // request.max_new_tokens
