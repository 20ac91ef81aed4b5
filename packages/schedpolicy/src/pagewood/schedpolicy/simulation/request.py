"""A request of the simulator: the attributes that policies read, and its progress."""

from array import array
from bisect import bisect_left
from collections.abc import Sequence

from pagewood.schedpolicy.simulation.cache import MatchWatch
from pagewood.schedpolicy.simulation.trace import TraceRequest

_NEVER_S = float("inf")


class DecodeClock:
    """Counts the decode steps of one replica, from which all decoding requests derive their tokens."""

    __slots__ = ("num_steps",)

    def __init__(self) -> None:
        """Start at 0."""
        self.num_steps = 0  # written by: decoding


class SimRequest:
    """One request on one replica; it has the attributes that the policies of this package read.

    Invariant: while it decodes, it has one more token after every step of the replica's clock.
    """

    __slots__ = (
        "_clock", "_num_generated", "_num_prompt_pages", "_page_size", "_prefix", "_since", "admitted_s", "arrival",
        "arrived_s", "deadline_s", "end_step", "first_token_s", "is_recorded", "keys", "last_token_s", "max_new_tokens",
        "num_computed", "num_hit", "num_leased", "num_matched", "num_output", "num_pages", "num_preemptions",
        "num_private", "num_prompt", "num_recomputed", "own_priority", "priority", "sent_s", "service_class", "tag",
        "tenant", "watch",
    )  # fmt: skip

    def __init__(self, arrival: int, spec: TraceRequest, keys: Sequence[int], page_size: int) -> None:
        """Start as a request that has just arrived.

        Args:
            arrival: Its number in the trace.
            spec: The request in the trace.
            keys: One key per whole page.
            page_size: Tokens per page.
        """
        self.arrival = arrival
        self.sent_s = spec.arrived_s
        self.arrived_s = spec.arrived_s
        """When the replica took it over, as in the engine: at the end of the step that ran when it was sent."""
        # written by: replica
        self.num_prompt = spec.num_prompt
        self.num_output = spec.num_output
        self.max_new_tokens = spec.max_new_tokens
        self.own_priority = spec.priority
        self.priority = spec.priority
        """Its own, or the higher one of a request that is parked behind its prompt."""  # written by: queue
        self.tenant = spec.tenant
        self.tag = spec.tag
        self.service_class = spec.tag
        self.deadline_s = _NEVER_S if spec.deadline_s is None else spec.arrived_s + spec.deadline_s
        self.keys = keys
        self._page_size = page_size
        self._num_prompt_pages = min(len(keys), spec.num_prompt // page_size)
        self.num_matched = 0
        """Tokens of cached prefix: live while it waits, fixed at admission."""  # written by: replica, queue
        self.num_computed = 0
        """Tokens whose KV is computed; not updated while it decodes."""  # written by: replica
        self.num_leased = 0
        """Leading pages that it has locked in the cache."""  # written by: memory
        self.num_pages = 0
        """Pages that it holds; not updated while it decodes."""  # written by: memory
        self.num_private = 0
        """Number of these that the cache does not own."""  # written by: memory
        self.end_step = -1
        """Step of the clock after which its output is complete; -1 unless it decodes."""  # written by: decoding
        self.watch: MatchWatch | None = None
        """Its live match; None unless it waits in the order and the cache has live matches."""  # written by: queue
        self.num_hit = -1
        """Tokens found in the cache at its first admission; -1 before."""  # written by: replica
        self.num_recomputed = 0
        """Tokens computed again after preemptions."""  # written by: replica
        self.num_preemptions = 0  # written by: replica
        self.admitted_s = _NEVER_S
        """Time of its first admission."""  # written by: replica
        self.first_token_s = _NEVER_S  # written by: recorder
        self.last_token_s = _NEVER_S
        """Time of its last token; not updated while it decodes."""  # written by: recorder
        self.is_recorded = True
        """Whether its end is recorded: not if it only computes a prompt for another replica."""  # written by: routed
        self._clock: DecodeClock | None = None
        self._num_generated = 0
        self._since = 0
        self._prefix: bytes | None = None

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        clock = self._clock
        return self._num_generated if clock is None else self._num_generated + clock.num_steps - self._since

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt plus the tokens generated so far."""
        return self.num_prompt + self.num_generated

    @property
    def is_decoding(self) -> bool:
        """Whether it generates a token in every step."""
        return self._clock is not None

    def prefix(self, num_tokens: int) -> bytes:
        """Return four bytes for each whole page of the first `num_tokens` tokens, prompt and output."""
        return self.window(0, num_tokens)

    def window(self, start: int, end: int) -> bytes:
        """Return four bytes for each page of the tokens [start, end)."""
        if self._prefix is None:
            self._prefix = array("i", self.keys).tobytes()
        return self._prefix[4 * (start // self._page_size) : 4 * (end // self._page_size)]

    def num_shared(self, other: "SimRequest") -> int:
        """Return the length in tokens of the common prefix of two prompts, in whole pages.

        A key identifies its page and all pages before it, so a binary search finds the length.
        """
        mine, theirs = self.keys, other.keys
        num_pages = min(self._num_prompt_pages, other._num_prompt_pages)
        return self._page_size * bisect_left(range(num_pages), True, key=lambda page: mine[page] != theirs[page])

    def resume(self, before: "SimRequest", num_generated: int, last_token_s: float) -> None:
        """Go on where another replica has stopped, as after a preemption."""
        self._num_generated = num_generated
        self.admitted_s, self.num_hit = before.admitted_s, before.num_hit
        self.first_token_s, self.last_token_s = before.first_token_s, last_token_s
        self.num_preemptions = before.num_preemptions + (before.num_hit >= 0)
        self.num_recomputed = before.num_recomputed

    def generate_one(self) -> None:
        """Add the token that follows a prompt."""
        self._num_generated += 1

    def start_decoding(self, clock: DecodeClock) -> None:
        """Gain a token with every step of `clock` from now on."""
        self._clock = clock
        self._since = clock.num_steps

    def stop_decoding(self) -> None:
        """Stop gaining tokens."""
        self._num_generated = self.num_generated
        self._clock = None
