"""The requests of a replica that decode: what a step of them takes, and when it is over, without counting them."""

from heapq import heappop, heappush

from pagewood.schedpolicy.simulation.request import DecodeClock, SimRequest


class Decoding:
    """All requests that generate a token in every step.

    Invariant: `num_requests`, `kv_tokens` and the pages per step are those of the requests added and not removed,
    after `clock.num_steps` steps. None of the questions costs more than O(page_size), however many requests there are.
    """

    __slots__ = ("_crossing", "_ends", "_page_size", "clock", "kv_tokens", "num_requests")

    def __init__(self, *, page_size: int) -> None:
        """Start with nobody."""
        self.clock = DecodeClock()
        self.num_requests = 0  # written by: Decoding
        self.kv_tokens = 0
        """Tokens of all of them: what the next step reads."""  # written by: Decoding
        self._page_size = page_size
        self._crossing = [0] * page_size
        """Requests that need a page in steps of that residue."""  # written by: Decoding
        self._ends: list[tuple[int, int, SimRequest]] = []  # heap of (end_step, arrival), stale entries included

    def add(self, request: SimRequest) -> None:
        """Let a request decode whose prompt is computed, and whose first token is there."""
        request.start_decoding(self.clock)
        num_tokens = request.num_tokens
        request.end_step = self.clock.num_steps + request.num_output - request.num_generated
        heappush(self._ends, (request.end_step, request.arrival, request))
        self.num_requests += 1
        self.kv_tokens += num_tokens
        self._crossing[self._residue(num_tokens)] += 1

    def remove(self, request: SimRequest) -> int:
        """Let a request decode no more; return how many tokens have their KV computed."""
        num_tokens = request.num_tokens
        request.stop_decoding()
        request.end_step = -1
        self.num_requests -= 1
        self.kv_tokens -= num_tokens
        self._crossing[self._residue(num_tokens)] -= 1
        return num_tokens - 1

    def num_new_pages(self, num_steps: int) -> int:
        """Return how many pages the next steps need in all."""
        cycles, rest = divmod(num_steps, self._page_size)
        first = self.clock.num_steps
        crossing, page_size = self._crossing, self._page_size
        partial = sum(crossing[(first + step) % page_size] for step in range(rest))
        return cycles * self.num_requests + partial

    def steps_within(self, num_pages: int, *, at_most: int) -> int:
        """Return how many steps, up to `at_most`, need no more than `num_pages` pages together."""
        cycles = min(num_pages // self.num_requests, at_most // self._page_size)
        num_steps, left = cycles * self._page_size, num_pages - cycles * self.num_requests
        first = self.clock.num_steps
        while num_steps < at_most:
            left -= self._crossing[(first + num_steps) % self._page_size]
            if left < 0:
                break
            num_steps += 1
        return num_steps

    @property
    def steps_to_end(self) -> int:
        """Steps until the first request has all its output; there must be a request."""
        while True:
            end_step, _, request = self._ends[0]
            if request.end_step == end_step:
                return end_step - self.clock.num_steps
            heappop(self._ends)

    def advance(self, num_steps: int) -> None:
        """Let time pass, no more than `steps_to_end`."""
        self.clock.num_steps += num_steps
        self.kv_tokens += num_steps * self.num_requests

    def pop_ended(self) -> SimRequest | None:
        """Return a request that has all its output, oldest first; it decodes until it is removed."""
        while self._ends and self._ends[0][0] <= self.clock.num_steps:
            end_step, _, request = heappop(self._ends)
            if request.end_step == end_step:
                return request
        return None

    def _residue(self, num_tokens: int) -> int:
        # The next step writes position num_tokens - 1; a page begins where that is a multiple of its size.
        return (self.clock.num_steps - (num_tokens - 1)) % self._page_size
