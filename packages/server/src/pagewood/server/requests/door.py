"""Whether a new request is let in: places and the shares of tenants, the predicted wait, draining, and the stop."""

from __future__ import annotations

from typing import Protocol

from pagewood.server.http.errors import overloaded, too_late, too_many_at_once, unavailable
from pagewood.server.keys.caller import Caller
from pagewood.server.observe.incidents import Incidents
from pagewood.server.requests.forecast import Forecast, retry_after

KEPT_SHARE = 16
"""One of this many places is kept for tenants that hold few."""


class NumHeld(Protocol):
    """Counts the places that are taken or reserved."""

    def __call__(self, tenant: str | None = None) -> int:
        """Return how many a tenant has; None: all tenants."""
        ...


class Door:
    """Lets requests in or refuses them with an error.

    No tenant can take all places: of the last ones (`KEPT_SHARE`), a tenant gets those with which it holds no more than
    it leaves.

    Args:
        limit: largest number of requests.
        max_first_answer_s: requests whose first answer is predicted to take longer are refused; None: no limit.
        incidents: where refused requests are counted.
        forecast: predicts.
    """

    __slots__ = ("_forecast", "_incidents", "_limit", "_max_first_answer_s", "is_closed", "is_draining")

    def __init__(
        self, *, limit: int, max_first_answer_s: float | None, incidents: Incidents, forecast: Forecast
    ) -> None:
        self._limit = limit
        self._max_first_answer_s = max_first_answer_s
        self._incidents = incidents
        self._forecast = forecast
        self.is_closed = False  # written by: LiveRequests
        """Whether the server stops."""
        self.is_draining = False  # written by: LiveRequests
        """Whether the server computes nothing more for the time being."""

    def check_open(self, *, is_computed: bool) -> None:
        """Refuse requests while the server takes none.

        Args:
            is_computed: whether the engine computes something for them.

        Raises:
            ApiError: it stops, or is draining.
        """
        if self.is_closed:
            raise unavailable("The server is shutting down.", code="shutting_down")
        if self.is_draining and is_computed:
            raise unavailable("The server is draining: it takes no new requests.", code="draining")

    def check_number(self, caller: Caller, num_requests: int, *, num_prompts: int, prompt_param: str) -> None:
        """Refuse more requests at once than could ever be held.

        Raises:
            ApiError: they are too many.
        """
        most = self._limit - self._num_kept(caller)
        if num_requests > most:
            is_several = num_requests > num_prompts
            param, what = ("n", "answers") if is_several else (prompt_param, "prompts")
            raise too_many_at_once(num_requests, most, param=param, what=what)

    def check_places(self, caller: Caller, num_requests: int, num_held: NumHeld) -> None:
        """Refuse requests for which there is no place. In the kept places, a tenant holds at most as many as it leaves.

        Raises:
            ApiError: no place is free for them.
        """
        num_left, num_kept = self._limit - num_held() - num_requests, self._num_kept(caller)
        if num_left >= num_kept or 0 < num_left >= num_held(caller.tenant) + num_requests:
            return
        self._incidents.refused["full"] += 1
        raise overloaded(self._limit - num_kept, retry_after_s=self._forecast.retry_after_s(num_kept - num_left))

    def check_delay(self, *, num_bytes: int, priority: int) -> None:
        """Refuse a request that would get its first answer too late.

        Args:
            num_bytes: length of its messages.
            priority: the highest of them.

        Raises:
            ApiError: it would, by what was measured.
        """
        if self._max_first_answer_s is None:
            return
        wait_s = self._forecast.first_answer_s(num_bytes=num_bytes, priority=priority)
        if wait_s is not None and wait_s > self._max_first_answer_s:
            self._incidents.refused["late"] += 1
            raise too_late(
                wait_s, self._max_first_answer_s, retry_after_s=retry_after(wait_s - self._max_first_answer_s)
            )

    def _num_kept(self, caller: Caller) -> int:
        """Return how many places are kept from a tenant, for others that hold few; there are none without tenants."""
        return self._limit // KEPT_SHARE if caller.tenant else 0
