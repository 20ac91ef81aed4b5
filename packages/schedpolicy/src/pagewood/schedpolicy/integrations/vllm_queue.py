# pyright: basic, reportMissingImports=false
# (vLLM is not a dependency of this package)
"""A request queue of vLLM over an order, and the view of vLLM's requests that the order reads."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

from pagewood.schedpolicy import Order
from pagewood.schedpolicy.integrations.vllm_matches import LiveMatches

_BYTES_PER_BLOCK = 4


class QueuedRequest:
    """A request of vLLM as orders read it; see `FullWaiting`."""

    __slots__ = ("arrival", "block_size", "frozen", "is_parked", "num_blocks", "priority", "request")

    def __init__(self, request: Request, arrival: int, *, priority: int, block_size: int) -> None:
        self.request = request
        self.arrival = arrival
        self.priority = priority
        self.block_size = block_size
        self.num_blocks = 0  # leading blocks that are cached; written by: LiveMatches
        # The match at the time of the offer to the scheduler; later its own blocks count as cached before they are
        # computed.
        self.frozen: int | None = None  # written by: OrderedQueue
        self.is_parked = False  # written by: OrderedQueue

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt plus the tokens generated so far."""
        return self.request.num_tokens

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return self.request.num_output_tokens

    @property
    def max_new_tokens(self) -> int:
        """Limit on generated tokens."""
        return self.request.max_tokens

    @property
    def arrived_s(self) -> float:
        """Time of arrival, on the clock of `time.time`."""
        return self.request.arrival_time

    @property
    def num_matched(self) -> int:
        """Leading tokens that are cached now, as vLLM would match them: in whole blocks, not the last token."""
        if self.frozen is not None:
            return self.frozen
        return min(self.num_blocks, (self.request.num_tokens - 1) // self.block_size) * self.block_size

    @property
    def tenant(self) -> str:
        """The `tenant` of the extra arguments, or the cache salt."""
        return str(self._extra("tenant", self.request.cache_salt or ""))

    @property
    def deadline_s(self) -> float:
        """The time `deadline_s` after the arrival, or infinity."""
        return self.arrived_s + float(self._extra("deadline_s", math.inf))

    @property
    def service_class(self) -> str:
        """The `service_class` of the extra arguments."""
        return str(self._extra("service_class", ""))

    @property
    def tag(self) -> str:
        """The name of the LoRA adapter."""
        return self.request.lora_request.lora_name if self.request.lora_request else ""

    def prefix(self, num_tokens: int) -> bytes:
        """Return four bytes for each block, from the block hashes, which depend on all tokens before."""
        hashes = self.request.block_hashes[: num_tokens // self.block_size]
        return b"".join(bytes(block_hash)[:_BYTES_PER_BLOCK] for block_hash in hashes)

    def _extra(self, name: str, default: Any) -> Any:
        params = self.request.sampling_params
        extra = params.extra_args if params is not None else None
        return default if extra is None else extra.get(name, default)


class OrderedQueue(RequestQueue):
    """vLLM's waiting queue in the order of a policy.

    vLLM peeks at the first request, and then either pops it to run it, or pops it to skip it and prepends it at the end
    of the step. A popped request stays in the order until the next call shows which of the two happened.

    Invariant: the order has exactly the requests of this queue, and the one popped last until `settle`. Each request in
    the order has a live match, if there are any.

    Args:
        order: an empty order; only this queue changes it.
        matches: keeps the matches of waiting requests up to date; None if nothing is cached.
        has_priorities: whether the priorities of requests count.
        is_admitted: whether a popped request was popped to run.
        clock: returns the time, on the clock of `Request.arrival_time`.
    """

    def __init__(
        self,
        order: Order[QueuedRequest],
        *,
        matches: LiveMatches | None,
        has_priorities: bool,
        is_admitted: Callable[[Request], bool],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._order = order
        self._matches = matches
        self._has_priorities = has_priorities
        self._is_admitted = is_admitted
        self._clock = clock
        self._known: dict[str, QueuedRequest] = {}  # until they end, by id
        self._num_arrivals = 0
        self._head: QueuedRequest | None = None
        self._popped: QueuedRequest | None = None

    def begin_step(self) -> None:
        """Begin a step: choose the first request again, because time has passed."""
        self.settle()
        self._drop_head()

    def settle(self) -> None:
        """Take the request that was popped last out of the order."""
        popped, self._popped = self._popped, None
        if popped is None:
            return
        popped.is_parked = not self._is_admitted(popped.request)
        (self._order.park if popped.is_parked else self._order.admit)(popped)
        self._unwatch(popped)
        popped.frozen = None

    def ended(self, request: Request) -> None:
        """Note that a request has ended, whether it was waiting, popped or running."""
        self.settle()
        known = self._known.pop(request.request_id, None)
        if known is not None:
            if known in self._order:
                self._remove(known)
            self._order.stop(known)

    def add_request(self, request: Request) -> None:
        """Queue a request: a new one, or one that was preempted or skipped."""
        self.settle()
        self._drop_head()
        known = self._known.get(request.request_id)
        if known is None or known.request is not request:
            priority = -request.priority if self._has_priorities else 0
            block_size = self._matches.block_size if self._matches else 1
            known = QueuedRequest(request, self._num_arrivals, priority=priority, block_size=block_size)
            self._num_arrivals += 1
            self._known[request.request_id] = known
        elif not known.is_parked:
            self._order.stop(known)
        if self._matches is not None:
            self._matches.open(known)
        self._order.add(known)
        known.is_parked = False

    def prepend_request(self, request: Request) -> None:
        """Queue a request at its place in the order, which depends on its first arrival."""
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Queue requests at their places in the order."""
        for request in requests:
            self.add_request(request)

    def peek_request(self) -> Request:
        """Return the request that is next."""
        return self._first().request

    def pop_request(self) -> Request:
        """Take out the request that is next: the one that was peeked at, if nothing was added or removed since."""
        first = self._first()
        self._popped, self._head = first, None
        return first.request

    def remove_request(self, request: Request) -> None:
        """Remove a waiting request.

        Raises:
            ValueError: it does not wait here.
        """
        if self._waiting(request) is None:
            raise ValueError(f"request must be in the queue, got {request.request_id!r}")
        self.remove_requests([request])

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove the requests that wait here."""
        for request in requests:
            known = self._waiting(request)
            if known is not None:
                self._remove(known)

    def __bool__(self) -> bool:
        """Whether a request waits."""
        return len(self) > 0

    def __len__(self) -> int:
        """Return how many requests wait."""
        return len(self._order) - (self._popped is not None)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the waiting requests in their order."""
        self.settle()
        self._update()
        return iter([known.request for known in self._order.ordered(self._clock())])

    def _first(self) -> QueuedRequest:
        self.settle()
        if self._head is None:
            self._update()
            self._head = next(iter(self._order.ordered(self._clock())), None)
            if self._head is None:
                raise IndexError("the queue must not be empty")
            self._head.frozen = self._head.num_matched
        return self._head

    def _update(self) -> None:
        """Report changed matches to the order."""
        if self._matches is not None:
            for known in self._matches.changed():
                self._order.update(known)

    def _waiting(self, request: Request) -> QueuedRequest | None:
        self.settle()
        known = self._known.get(request.request_id)
        return known if known is not None and known in self._order else None

    def _remove(self, known: QueuedRequest) -> None:
        self._drop_head()
        self._order.remove(known)
        self._unwatch(known)

    def _drop_head(self) -> None:
        if self._head is not None:
            self._head.frozen = None
            if self._matches is not None:
                self._matches.note(self._head)
            self._head = None

    def _unwatch(self, known: QueuedRequest) -> None:
        if self._matches is not None:
            self._matches.close(known)
