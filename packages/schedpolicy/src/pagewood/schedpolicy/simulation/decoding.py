"""The decoding requests of a replica: the pages and tokens of their steps, without a loop over the requests."""

from heapq import heappop, heappush

from pagewood.schedpolicy.simulation.request import DecodeClock, SimRequest


class Decoding:
    """All requests that generate a token in every step.

    Invariant: `num_requests`, `kv_tokens` and the pages per step are those of the requests added and not removed, after
    `clock.num_steps` steps. Every method costs at most O(page_size), or O(log n) for n requests.
    """

    __slots__ = ("_crossing", "_ends", "_num_added", "_page_size", "clock", "kv_tokens", "num_requests")

    def __init__(self, *, page_size: int) -> None:
        """Start with no requests."""
        self.clock = DecodeClock()
        self.num_requests = 0  # written by: Decoding
        self.kv_tokens = 0
        """Tokens of all requests: the KV that the next step reads."""  # written by: Decoding
        self._page_size = page_size
        self._crossing = [0] * page_size
        """Requests that need a page in a step, by the step's number modulo the page size."""  # written by: Decoding
        # Heap of (end_step, arrival, number), stale entries included. The number is unique: a request that comes back
        # from another replica has the arrival of its stale entry.
        self._ends: list[tuple[int, int, int, SimRequest]] = []
        self._num_added = 0  # written by: add

    def add(self, request: SimRequest) -> None:
        """Add a request whose prompt is computed and whose first token is sampled."""
        request.start_decoding(self.clock)
        num_tokens = request.num_tokens
        request.end_step = self.clock.num_steps + request.num_output - request.num_generated
        self._num_added += 1
        heappush(self._ends, (request.end_step, request.arrival, self._num_added, request))
        self.num_requests += 1
        self.kv_tokens += num_tokens
        self._crossing[self._residue(num_tokens)] += 1

    def remove(self, request: SimRequest) -> int:
        """Remove a request; return how many of its tokens have their KV computed."""
        num_tokens = request.num_tokens
        request.stop_decoding()
        request.end_step = -1
        self.num_requests -= 1
        self.kv_tokens -= num_tokens
        self._crossing[self._residue(num_tokens)] -= 1
        return num_tokens - 1

    def num_new_pages(self, num_steps: int) -> int:
        """Return how many pages the next `num_steps` steps need together."""
        crossing, page_size = self._crossing, self._page_size
        first = self.clock.num_steps % page_size
        if num_steps == 1:
            return crossing[first]
        cycles, rest = divmod(num_steps, page_size)
        end = first + rest
        return cycles * self.num_requests + sum(crossing[first:end]) + sum(crossing[: max(0, end - page_size)])

    def steps_within(self, num_pages: int, *, at_most: int) -> int:
        """Return how many steps, up to `at_most`, need no more than `num_pages` pages together."""
        if self.num_new_pages(at_most) <= num_pages:
            return at_most
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
        """Steps until the first request has all its output; there must be at least one request."""
        while True:
            end_step, _, _, request = self._ends[0]
            if request.end_step == end_step:
                return end_step - self.clock.num_steps
            heappop(self._ends)

    def advance(self, num_steps: int) -> None:
        """Advance the clock by at most `steps_to_end` steps."""
        self.clock.num_steps += num_steps
        self.kv_tokens += num_steps * self.num_requests

    def pop_ended(self) -> SimRequest | None:
        """Return the oldest request that has all its output, or None; it still has to be removed."""
        while self._ends and self._ends[0][0] <= self.clock.num_steps:
            end_step, _, _, request = heappop(self._ends)
            if request.end_step == end_step:
                return request
        return None

    def _residue(self, num_tokens: int) -> int:
        # The next step writes position num_tokens - 1; a page begins where that is a multiple of its size.
        return (self.clock.num_steps - (num_tokens - 1)) % self._page_size
