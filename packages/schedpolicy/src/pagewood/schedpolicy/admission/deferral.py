"""Requests that repeat a prompt which is being computed wait for it, and then find it cached."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Generic, TypeVar

from pagewood.schedpolicy.counts import require_count
from pagewood.schedpolicy.pages import round_up
from pagewood.schedpolicy.requests import HasPrompt

Q = TypeVar("Q", bound=HasPrompt)


@dataclass(slots=True, kw_only=True, eq=False)
class _Leader(Generic[Q]):
    """A running request whose prompt is being computed."""

    request: Q
    num_prompt: int
    """Tokens of its prompt that other requests can match: whole pages."""
    num_shared: dict[int, int] = field(default_factory=dict[int, int])
    """Tokens shared with the requests compared so far, by their arrival."""  # written by: deferral
    wake_ups: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Heap of (computed tokens of the leader at which to wake a request, its arrival)."""  # written by: deferral


@dataclass(slots=True, kw_only=True, eq=False)
class _Parked(Generic[Q]):
    """A waiting request that is parked."""

    request: Q
    leader: _Leader[Q] | None
    """None once the request is ready."""  # written by: deferral
    num_awaited: int = 0
    """Leading tokens that the leader has computed when it wakes the request."""  # written by: deferral


class InBatchDeferral(Generic[Q]):
    """Parks a waiting request while a running one computes a prompt that it repeats, so the prefix is computed once.

    A request parks on a leader (a running request with a prompt in progress) if the leader will raise the request's
    match by `min_shared` tokens or more. It becomes ready when the leader has computed all but less than `min_shared`
    of the tokens that the two share, and when the leader stops. The caller takes a parked request out of its queue,
    with `Order.park`, and puts it back with `Order.add` when it is ready: parked requests cost nothing in a pass.

    Invariant: every parked request that is not ready is parked on one leader; every leader has been started, has not
    been stopped, and at the last `ready` had at least `min_shared` tokens of its prompt to compute. So every parked
    request becomes ready: its leader makes progress or stops.

    Cost: two prompts that share enough agree in the tokens [m, m + min_shared), where m is the match of the waiting
    one. So leaders are kept by that window, for each m that occurs in a pass, and one candidate costs a small `window`
    and a lookup. Prefixes are compared only if the windows agree, and once for each pair of a leader and a request. A
    pass compares about `max_compared` tokens at most. A later candidate is parked provisionally on the first leader
    with its window. A later pass compares it, before any new candidate, and makes it ready if it shares too little. So
    a repeat is never admitted because the comparisons were used up.

    In every pass, call `ready`, then `defer` for each candidate, and `start` for each admitted one. Call `stop` for
    each request that has ended or was preempted, and `discard` for each parked request that has ended.

    Source: in-batch prefix caching of SGLang, which moves such requests to the end of the queue in every pass.
    """

    __slots__ = (
        "_leaders", "_max_compared", "_min_shared", "_num_compared", "_page_size", "_parked", "_unverified",
        "_windows", "_woken",
    )  # fmt: skip

    def __init__(self, *, min_shared: int = 32, page_size: int = 1, max_compared: int = 2_000_000) -> None:
        """Start with no leaders and no parked requests.

        Args:
            min_shared: Tokens of prefill that waiting must save, >= 1; rounded up to whole pages.
            page_size: Tokens of a page, >= 1: the cache shares whole pages only.
            max_compared: Tokens that one pass compares, >= 1; the last comparison may exceed it.

        Raises:
            ValueError: An argument is out of range.
        """
        for name, value in (("min_shared", min_shared), ("page_size", page_size), ("max_compared", max_compared)):
            require_count(name, value, least=1)
        self._page_size = page_size
        self._min_shared = round_up(min_shared, page_size)
        self._max_compared = max_compared
        self._num_compared = 0  # in this pass; written by: ready, _compare
        self._leaders: dict[int, _Leader[Q]] = {}  # by arrival, in the order of `start`; written by: start, stop, ready
        self._parked: dict[int, _Parked[Q]] = {}  # by arrival, ready ones included; written by: _park, discard, ready
        # Arrivals parked provisionally, oldest first; written by: _park, _verify, _wake, discard.
        self._unverified: dict[int, None] = {}
        self._woken: list[_Parked[Q]] = []  # to be returned by `ready`; written by: _wake, ready
        # Leaders by their tokens [m, m + min_shared), for each m that occurred in this pass; written by: start, stop,
        # ready, defer.
        self._windows: dict[int, dict[bytes, list[_Leader[Q]]]] = {}

    def start(self, request: Q) -> None:
        """Report that the prompt of a request is being computed from now on; other requests may park on it.

        Raises:
            ValueError: The request is parked.
        """
        if request.arrival in self._parked:
            raise ValueError(f"request must not be parked when it starts, got arrival {request.arrival}")
        leader = _Leader(request=request, num_prompt=self._whole_pages(request.num_prompt))
        if leader.num_prompt - self._whole_pages(request.num_computed) >= self._min_shared:
            self._leaders[request.arrival] = leader
            for offset, windows in self._windows.items():
                self._index(leader, offset, windows)

    def stop(self, request: Q) -> None:
        """Report that a running request has ended or was preempted; requests that are not leaders are ignored.

        The requests that are parked on it become ready.
        """
        leader = self._leaders.pop(request.arrival, None)
        if leader is not None:
            self._windows.clear()
            for _, arrival in leader.wake_ups:
                self._wake(leader, arrival)

    def defer(self, request: Q) -> bool:
        """Park a waiting request if the prompt of a leader will raise its match by `min_shared` tokens or more.

        Returns:
            Whether the request is parked now.

        Raises:
            ValueError: The request is parked already.
        """
        if request.arrival in self._parked:
            raise ValueError(f"arrival must be unique among parked requests, got {request.arrival} again")
        offset = request.num_matched
        end = offset + self._min_shared
        if not self._leaders or end >= request.num_tokens or end > request.num_prompt:
            return False
        windows = self._windows.get(offset)
        if windows is None:
            windows = self._windows[offset] = {}
            for leader in self._leaders.values():
                self._index(leader, offset, windows)
        return any(self._park(request, leader) for leader in windows.get(request.window(offset, end), ()))

    def leader_of(self, request: Q) -> Q | None:
        """Return the running request that a parked one waits for; None if it is not parked, or is ready."""
        parked = self._parked.get(request.arrival)
        return None if parked is None or parked.leader is None else parked.leader.request

    def num_awaited(self, request: Q) -> int:
        """Return how many leading tokens of a parked request its leader holds when it is ready, whole pages.

        So they need no memory beside that of the leader. 0 for one that is ready, because its leader has stopped.
        """
        parked = self._parked[request.arrival]
        return 0 if parked.leader is None else parked.num_awaited

    def discard(self, request: Q) -> None:
        """Forget a parked request that has ended; other requests are ignored."""
        self._parked.pop(request.arrival, None)
        self._unverified.pop(request.arrival, None)

    def ready(self) -> list[Q]:
        """Begin a pass: take out the parked requests that are ready, and return them by arrival."""
        self._num_compared = 0
        self._windows.clear()
        for leader in list(self._leaders.values()):
            num_computed = self._whole_pages(leader.request.num_computed)
            while leader.wake_ups and leader.wake_ups[0][0] <= num_computed:
                self._wake(leader, heappop(leader.wake_ups)[1])
            if leader.num_prompt - num_computed < self._min_shared:
                del self._leaders[leader.request.arrival]
        while self._unverified and self._num_compared < self._max_compared:
            self._verify(self._parked[next(iter(self._unverified))])
        woken = [parked.request for parked in self._woken if self._parked.get(parked.request.arrival) is parked]
        self._woken.clear()
        for request in woken:
            del self._parked[request.arrival]
        woken.sort(key=lambda request: request.arrival)
        return woken

    def __contains__(self, request: Q) -> bool:
        """Return whether a request is parked here."""
        return request.arrival in self._parked

    def __iter__(self) -> Iterator[Q]:
        """Yield the parked requests, ready ones included."""
        for parked in self._parked.values():
            yield parked.request

    def __len__(self) -> int:
        """Return how many requests are parked here."""
        return len(self._parked)

    def _whole_pages(self, num_tokens: int) -> int:
        return num_tokens // self._page_size * self._page_size

    def _index(self, leader: _Leader[Q], offset: int, windows: dict[bytes, list[_Leader[Q]]]) -> None:
        end = offset + self._min_shared
        if end <= leader.num_prompt:
            windows.setdefault(leader.request.window(offset, end), []).append(leader)

    def _park(self, request: Q, leader: _Leader[Q]) -> bool:
        """Park a request on a leader if that saves enough, or provisionally if this is not known yet."""
        parked = _Parked(request=request, leader=leader)
        is_known = self._compare(request, leader)
        if not self._await(parked, leader):
            return False
        self._parked[request.arrival] = parked
        if not is_known:
            self._unverified[request.arrival] = None
        return True

    def _verify(self, parked: _Parked[Q]) -> None:
        """Compare a request that was parked provisionally, and wake it if it shares too little with its leader."""
        leader = parked.leader
        assert leader is not None, "a ready request needs no comparison"
        del self._unverified[parked.request.arrival]
        self._compare(parked.request, leader)
        if not self._await(parked, leader):
            parked.leader = None
            self._woken.append(parked)

    def _compare(self, request: Q, leader: _Leader[Q]) -> bool:
        """Find how many tokens the two share; return False if that is unknown and the comparisons are used up."""
        if request.arrival in leader.num_shared:
            return True
        if self._num_compared >= self._max_compared:
            return False
        self._num_compared += min(request.num_prompt, leader.num_prompt)
        leader.num_shared[request.arrival] = request.num_shared(leader.request)
        return True

    def _await(self, parked: _Parked[Q], leader: _Leader[Q]) -> bool:
        """Record when the leader wakes the request; return False if it need not wait for the leader."""
        request = parked.request
        num_shared = leader.num_shared.get(request.arrival, request.num_prompt)
        num_usable = min(self._whole_pages(min(num_shared, request.num_tokens - 1)), leader.num_prompt)
        num_computed = self._whole_pages(leader.request.num_computed)
        if num_usable - max(request.num_matched, num_computed) < self._min_shared:
            return False
        parked.num_awaited = num_usable - self._min_shared + self._page_size  # the first whole page that wakes it
        heappush(leader.wake_ups, (parked.num_awaited, request.arrival))
        return True

    def _wake(self, leader: _Leader[Q], arrival: int) -> None:
        """Mark a request as ready if it is still parked on the leader."""
        parked = self._parked.get(arrival)
        if parked is not None and parked.leader is leader:
            parked.leader = None
            self._unverified.pop(arrival, None)
            self._woken.append(parked)
