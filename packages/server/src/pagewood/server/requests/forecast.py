"""The wait of a request, predicted from the server's rate of work while it had work."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable

HALF_LIFE_S = 10.0
"""Half-life of past work, in seconds during which there was work."""
LONGEST_RETRY_S = 60


class BusyRate:
    """Work done per second, measured only while there is work, so that idle times do not make it slower.

    Invariant: both sums have the same weights, so their quotient is a rate. Updates and queries take constant time.

    Args:
        clock: seconds.
    """

    __slots__ = ("_busy_s", "_clock", "_done", "_is_busy", "_seen_s")

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._done = 0.0  # written by: _pass, add
        self._busy_s = 0.0  # written by: _pass
        self._is_busy = False  # written by: set_busy
        self._seen_s = clock()  # written by: _pass

    def set_busy(self, is_busy: bool) -> None:
        """Note whether there is work from now on."""
        if is_busy is not self._is_busy:
            self._pass()
            self._is_busy = is_busy

    def add(self, amount: float) -> None:
        """Note that work was done; call it before `set_busy(False)`."""
        self._pass()
        self._done += amount

    def per_second(self) -> float | None:
        """Return the rate; None: no work was done yet."""
        self._pass()
        return self._done / self._busy_s if self._done and self._busy_s else None

    def _pass(self) -> None:
        now_s = self._clock()
        passed_s, self._seen_s = now_s - self._seen_s, now_s
        if self._is_busy and passed_s > 0:
            weight = 0.5 ** (passed_s / HALF_LIFE_S)
            self._done *= weight
            self._busy_s = self._busy_s * weight + passed_s


class Forecast:
    """Predicts when a new request would get its first answer, and when the server would have room for it.

    The unit of work before a first answer is a byte of a request's message. So the prediction needs no tokenizer, and
    follows the server's real state: cached prompts, taken rows, a slow device.

    Invariant: `_waiting` holds the bytes of requests without an answer by priority, and only positive numbers.

    Args:
        clock: seconds.
    """

    __slots__ = ("_begun", "_ended", "_requests", "_waiting")

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._begun = BusyRate(clock=clock)
        """Bytes of requests that got their first answer."""
        self._ended = BusyRate(clock=clock)
        """Requests that ended."""
        self._requests: dict[str, tuple[int, int]] = {}  # written by: sent, begun, dropped. Id -> priority, bytes
        self._waiting: Counter[int] = Counter()  # written by: sent, _remove

    def sent(self, request_id: str, *, num_bytes: int, priority: int) -> None:
        """Note a request that was sent to a tokenizer."""
        self._requests[request_id] = (priority, num_bytes)
        self._waiting[priority] += num_bytes
        self._begun.set_busy(True)
        self._ended.set_busy(True)

    def begun(self, request_id: str) -> None:
        """Note the first answer of a request; one that is not known changes nothing."""
        found = self._requests.pop(request_id, None)
        if found is not None:
            self._begun.add(found[1])
            self._remove(*found)

    def dropped(self, request_id: str) -> None:
        """Note that a request will get no answer; one that is not known changes nothing."""
        found = self._requests.pop(request_id, None)
        if found is not None:
            self._remove(*found)

    def ended(self, *, num_left: int) -> None:
        """Note the end of a request after which the server holds `num_left`."""
        self._ended.add(1)
        self._ended.set_busy(num_left > 0)

    def first_answer_s(self, *, num_bytes: int, priority: int) -> float | None:
        """Return the seconds until a new request would get its first answer; None: nothing was measured yet.

        Args:
            num_bytes: length of its message.
            priority: requests of lower priority do not delay it.
        """
        rate = self._begun.per_second()
        if rate is None:
            return None
        ahead = sum(waiting for other, waiting in self._waiting.items() if other >= priority)
        return (ahead + num_bytes) / rate

    def retry_after_s(self, num_requests: int) -> int:
        """Return after how many seconds that many requests will have ended: at least 1, at most `LONGEST_RETRY_S`."""
        rate = self._ended.per_second()
        return 1 if rate is None else retry_after(num_requests / rate)

    def _remove(self, priority: int, num_bytes: int) -> None:
        self._waiting[priority] -= num_bytes
        if not self._waiting[priority]:
            del self._waiting[priority]
        if not self._requests:
            self._begun.set_busy(False)


def retry_after(wait_s: float) -> int:
    """Return a wait as a value of `Retry-After`: whole seconds, at least 1, at most `LONGEST_RETRY_S`."""
    return max(1, min(LONGEST_RETRY_S, math.ceil(wait_s)))
