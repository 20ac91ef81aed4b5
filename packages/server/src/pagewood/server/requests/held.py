"""The requests that wait to be sent again, in their order, and which of them may be sent now."""

from __future__ import annotations

from collections.abc import Iterable

SUSPECT_DEATHS = 2
"""A request is suspected after that many deaths in a row of processes that held it."""


class Held:
    """Requests that were not sent, or must be sent again.

    Suspects are sent one by one: the next ones when those before have got on, twice as many each time. Those of three
    deaths or more are always alone, so what dies with one of them dies of it.

    Invariant: of requests with `SUSPECT_DEATHS` deaths or more, only those that `take` has returned together are under
    way without having got on.
    """

    __slots__ = ("_held", "_num_at_once", "_probes")

    def __init__(self) -> None:
        self._held: dict[str, int] = {}  # written by: hold, drop, take
        """Id -> deaths in a row, in the order of their arrival."""
        self._probes: set[str] = set()  # written by: take, excuse, died
        """Suspects that were sent and have not got on yet."""
        self._num_at_once = 1  # written by: excuse, died

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, request_id: str, *, num_deaths: int = 0) -> None:
        """Hold a request that was in that many deaths in a row."""
        self._held[request_id] = num_deaths

    def drop(self, request_id: str) -> bool:
        """Note that a request has got on or is gone; return whether the next suspects may follow."""
        self._held.pop(request_id, None)
        return self.excuse(request_id)

    def excuse(self, request_id: str) -> bool:
        """Suspect a request under way no longer; return whether the next suspects may follow."""
        if request_id not in self._probes:
            return False
        self._probes.discard(request_id)
        if not self._probes:
            self._num_at_once *= 2
        return not self._probes and bool(self._held)

    def died(self, request_ids: Iterable[str]) -> None:
        """Note that a process died with these requests; they are held again under other ids, or have ended."""
        self._probes.difference_update(request_ids)
        self._num_at_once = 1

    def take(self) -> list[str]:
        """Remove and return the requests that may be sent now, in their order."""
        found = [request_id for request_id, num in self._held.items() if num < SUSPECT_DEATHS]
        if not self._probes:
            few = [request_id for request_id, num in self._held.items() if num == SUSPECT_DEATHS]
            alone = [request_id for request_id, num in self._held.items() if num > SUSPECT_DEATHS]
            suspects = few[: self._num_at_once] or alone[:1]
            self._probes.update(suspects)
            found += suspects
        for request_id in found:
            del self._held[request_id]
        return found
