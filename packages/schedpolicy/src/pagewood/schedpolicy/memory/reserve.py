"""How much memory to reserve for tokens that requests will generate."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pagewood.schedpolicy.counts import require_count, require_real
from pagewood.schedpolicy.memory.demand import Demand
from pagewood.schedpolicy.memory.lengths import MAX_EXPECTED_TOKENS, NUM_PARTS, num_at_parts, part_of
from pagewood.schedpolicy.memory.look_ahead import NUM_MOMENTS, LookAhead
from pagewood.schedpolicy.pages import pages_of
from pagewood.schedpolicy.requests import Running, Waiting

if TYPE_CHECKING:
    from pagewood.schedpolicy.memory.columns import LengthReader, Lengths

# Ended requests by which others are judged.
_NUM_OBSERVED = 64
# Imagined requests that use all of their limit: they stand for outputs that are not observed yet.
_NUM_IMAGINED = 4
# From this number of running requests on, columns are faster than a loop over the requests.
_NUM_MANY = 24


class NewTokenRatio:
    """Learns which part of their allowed output requests generate, and from it how much memory they will need.

    Let `S(x)` be the part of the requests that generate more than the part `x` of their limit. A request that is at
    `x` now is expected to run still at `y` with the probability `S(y) / S(x)`. So `h` steps from now, running requests
    are expected to hold in total

        demand(h) = sum of prompt + S(y) / S(x) * (generated + h),  with y = (generated + h) / limit <= 1

    tokens. The pages that they will need beyond their present ones are the largest future demand minus the present one.
    Requests that start together need memory for their outputs at the same time. Among requests at different points,
    some end and make room for others, so hardly anything is reserved. A prompt counts even after its request ends,
    because it may be shared.

    `S` is the estimate of Kaplan and Meier from the last 64 requests that ended and those that run: short answers end
    first, so the ended ones alone would seem short. Four imagined requests that use all of their limit stand for
    outputs that are not observed yet. So at first all requests are expected to use all of their limit, and no admission
    leads to a preemption. Early ends lower the estimate.

    If memory has run out all the same, all requests are expected to use all of their limit for `hold_steps` steps, so
    that the freed memory is not filled at once with requests that cause the next preemption.

    Invariant: `0 < ratio <= 1`.

    Source: SGLang's `new_token_ratio` for the aim; the look ahead as in LightLLM's Past-Future scheduler (arXiv
    2507.10150), which draws random lengths instead of computing with probabilities.
    """

    __slots__ = ("_latest", "_num_ended", "_num_held", "_reader", "hold_steps", "scale", "worst_moment")

    def __init__(self, *, scale: float = 1.0, hold_steps: int = 60) -> None:
        """Start without observed outputs.

        Args:
            scale: Factor of the reserve, > 0 and finite; below 1 more requests run, and more are preempted.
            hold_steps: Steps of caution after a preemption, >= 0.

        Raises:
            ValueError: An argument is out of range.
        """
        require_real("scale", scale)
        if not 0 < scale < math.inf:
            raise ValueError(f"scale must be > 0 and finite, got {scale}")
        require_count("hold_steps", hold_steps, least=0)
        self.scale = scale
        self.hold_steps = hold_steps
        self._num_held = 0  # steps of caution that are left; written by: on_step, on_preempt
        self._latest: deque[int] = deque()  # parts at which the latest requests ended; written by: on_end
        self._num_ended = [0] * (NUM_PARTS + 1)  # latest requests that ended at each part; written by: on_end
        self._reader = _open_reader()
        self.worst_moment: int | None = None
        """The moment of the largest demand when a step last looked at all moments; None if a request was admitted
        since, or if all limits fit."""  # written by: StepReserve

    @property
    def ratio(self) -> float:
        """Expected output of a request that starts now, as a part of its allowed output."""
        return sum(self.survival(())[1:]) / NUM_PARTS

    @property
    def expects_ends(self) -> bool:
        """Whether ends before the limit are expected: some requests have ended, and no steps of caution are left."""
        return not self._num_held and bool(self._latest)

    def on_step(self, num_steps: int = 1) -> None:
        """Record steps without preemption."""
        if self._num_held:
            self._num_held = max(0, self._num_held - num_steps)

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
        return self.survival_beside(num_at_parts(running))

    def survival_beside(self, num_running: Sequence[int]) -> list[float]:
        """Return `survival`, given the number of running requests at each part."""
        if not self.expects_ends:
            return [1.0] * (NUM_PARTS + 1)
        found: list[float] = []
        share = 1.0
        num_came = _NUM_IMAGINED + len(self._latest) + sum(num_running)  # requests that reach the part
        for num_here, num_ended in zip(num_running, self._num_ended, strict=True):
            found.append(share)
            if num_ended:
                share *= 1 - num_ended / num_came
            num_came -= num_here + num_ended
        return found  # a request that ended at its limit has not ended early, so the last `share` is left out

    def reserved_tokens(self, running: Iterable[Running], *, page_size: int) -> int:
        """Estimate the memory that running requests need beyond the pages of their `num_tokens`.

        Returns:
            Tokens, a multiple of `page_size`.
        """
        return self.open(running, page_size=page_size, num_to_complete=0).num_pages * page_size

    def open(self, running: Iterable[Running], *, page_size: int, num_to_complete: int) -> "StepReserve":
        """Return the reserve of one step; reads each running request once.

        Args:
            running: Requests that run when the step begins. Their prompts and limits must not change: they are read
                again only if other requests run than at the last call.
            page_size: Tokens of a page.
            num_to_complete: Pages that these requests still need for their `num_tokens`.
        """
        requests, reader = tuple(running), self._reader
        lengths = reader.read(requests, page_size=page_size) if reader and len(requests) >= _NUM_MANY else None
        return StepReserve(self, requests, lengths, page_size=page_size, num_to_complete=num_to_complete)

    def wanted_tokens(self, waiting: Waiting, *, page_size: int) -> int:
        """Estimate the memory that a waiting request needs from admission to its end, beyond its cached prefix.

        Returns:
            Tokens, a multiple of `page_size`.
        """
        num_pages = pages_of(waiting.num_tokens, page_size) - waiting.num_matched // page_size
        return num_pages * page_size + self.reserved_tokens((waiting,), page_size=page_size)


def _open_reader() -> "LengthReader | None":
    """Return a reader of many lengths at once; None without numpy, which is optional."""
    try:
        from pagewood.schedpolicy.memory.columns import LengthReader
    except ModuleNotFoundError:
        return None
    return LengthReader()


class StepReserve:
    """Memory reserved in one step while requests are admitted; made by `NewTokenRatio.open`.

    The demand is that of a `LookAhead`. The time of a query does not depend on the number of running requests, unless
    the candidate has the largest limit of all. Candidates like an earlier one take hardly any time. Nothing is
    estimated while there is room for the limits of all.
    """

    __slots__ = (
        "_admitted", "_began", "_demand", "_glimpse", "_lengths", "_most", "_num_most", "_num_to_complete",
        "_page_size", "_ratio", "_survival",
    )  # fmt: skip

    def __init__(
        self,
        ratio: NewTokenRatio,
        running: tuple[Running, ...],
        lengths: "Lengths | None",
        *,
        page_size: int,
        num_to_complete: int,
    ) -> None:
        """Begin with the requests that run when the step begins, and with their `lengths` if they are many."""
        self._ratio = ratio
        self._page_size = page_size
        self._num_to_complete = num_to_complete  # written by: admit
        self._began = running
        self._lengths = lengths
        self._admitted: list[Running] = []  # contents written by: admit
        if lengths is None:
            limit = max((request.max_new_tokens for request in running), default=0)
        else:
            limit = lengths.kept.max_limit
        self._num_most = min(limit, MAX_EXPECTED_TOKENS)  # steps to look ahead; written by: StepReserve
        self._most: int | None = None  # pages, if all use all of their limit; written by: admit, _num_most_pages
        self._survival: list[float] | None = None  # written by: _expect
        self._demand: Demand | None = None  # at all moments; written by: _whole_demand
        self._glimpse: Demand | None = None  # at a single moment; written by: exceeds

    @property
    def num_running(self) -> int:
        """Running requests."""
        return len(self._began) + len(self._admitted)

    @property
    def num_pages(self) -> int:
        """Available pages that running requests are expected to take."""
        if not self.num_running:
            return self._num_to_complete
        return self._num_to_complete + self._whole_demand().worst()

    def num_reserved(self, candidate: Running, *, num_available: int = 0) -> int:
        """Return how many pages must remain after a request got pages for its `num_tokens`; 0 if it runs alone.

        Args:
            candidate: waits to be admitted.
            num_available: pages that can be given away. If they suffice for the limits of all requests, the pages of
                these limits are returned, which may be more than expected.
        """
        if not self.num_running:
            return 0
        most = self._num_most_pages() + self._most_of(candidate)
        most = math.ceil(self._ratio.scale * most) + self._num_to_complete
        if most + pages_of(candidate.num_tokens, self._page_size) <= num_available:
            self._ratio.worst_moment = None
            return most
        self._num_most = self._steps_beside(candidate)
        demand = self._whole_demand()
        worst = demand.worst_with(candidate)
        self._ratio.worst_moment = demand.worst_moment
        return self._num_to_complete + worst

    def exceeds(self, candidate: Running, *, num_available: int) -> bool:
        """Return whether `num_reserved` is certainly more than `num_available`, in a fraction of its time.

        Looks only at the moment of the largest demand when all moments were last looked at. False means unknown: then
        call `num_reserved`. After an admission the answer is False.

        Args:
            candidate: waits to be admitted.
            num_available: pages that can be given away, less those that the candidate needs for its `num_tokens`.
        """
        number = self._ratio.worst_moment
        if number is None or not (self._began or self._admitted):
            return False
        num_most = self._steps_beside(candidate)
        for demand in (self._demand, self._glimpse):
            if demand is not None and demand.num_most == num_most:
                break
        else:
            demand = self._glimpse = self._expect(num_most, number)
        if self._num_to_complete + demand.worst_with(candidate) <= num_available:
            return False
        self._num_most = num_most
        return True

    def admit(self, request: Running, *, num_to_complete: int) -> None:
        """Count an admitted request that still needs `num_to_complete` pages for its `num_tokens`."""
        self._ratio.worst_moment = None
        self._num_to_complete += num_to_complete
        self._admitted.append(request)
        self._num_most = self._steps_beside(request)
        if self._most is not None:
            self._most += self._most_of(request)
        for demand in (self._demand, self._glimpse):
            if demand is not None:
                demand.add(request)

    def _num_most_pages(self) -> int:
        """Return the additional pages of the running requests if each uses its whole limit."""
        if self._most is None:
            if self._lengths is None:
                self._most = sum(map(self._most_of, self._began))
            else:
                self._most = self._lengths.num_most_pages()
            self._most += sum(map(self._most_of, self._admitted))
        return self._most

    def _most_of(self, request: Running) -> int:
        """Return the additional pages of a request if it uses its whole limit."""
        num_tokens, page_size = request.num_tokens, self._page_size
        num_left = max(0, min(request.max_new_tokens - request.num_generated, MAX_EXPECTED_TOKENS))
        return -(-(num_tokens + num_left) // page_size) - -(-num_tokens // page_size)

    def _steps_beside(self, request: Running) -> int:
        """Return how many steps to look ahead if a request runs too: never fewer than before in this step."""
        return max(self._num_most, min(request.max_new_tokens, MAX_EXPECTED_TOKENS))

    def _whole_demand(self) -> Demand:
        if self._demand is None or self._demand.num_most != self._num_most:
            self._demand = self._expect(self._num_most)
        return self._demand

    def _expect(self, num_most: int, number: int | None = None) -> Demand:
        """Return the demand of all running requests, at all moments or only at the moment `number`."""
        ratio, lengths = self._ratio, self._lengths
        if self._survival is None:
            num_running: list[int] = []
            if ratio.expects_ends:
                num_running = num_at_parts(self._began) if lengths is None else lengths.num_at_parts()
            self._survival = ratio.survival_beside(num_running)
        ahead = LookAhead(self._survival, num_most=num_most, page_size=self._page_size, number=number)
        if lengths is None:
            demand = Demand(ahead, [0.0] * (NUM_MOMENTS if number is None else 1), scale=ratio.scale)
            for request in self._began:
                demand.add(request)
        else:
            demand = Demand(ahead, lengths.growth(ahead), scale=ratio.scale)
        for request in self._admitted:
            demand.add(request)
        return demand
