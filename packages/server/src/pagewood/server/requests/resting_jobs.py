"""Lines of batches rest while other requests are there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pagewood.server.requests.live_group import HoldMode, LiveGroup

REST_S = 0.05
"""Seconds without another request after which the lines go on; the next request often follows at once."""


class RestingJobs:
    """Pauses lines of batches when another request comes, and goes on with them when there is none.

    A paused line keeps its memory until others lack it, and a pause takes the way of a request, before the request for
    which it is made. So a request waits for no more than the steps that are under way.

    Invariant: while there are other requests, at most `num_beside` lines are computed.

    Args:
        hold: pauses the requests of a group, or goes on with them.
        num_beside: lines that go on beside other requests.
    """

    __slots__ = ("_hold", "_lines", "_num_beside", "_others", "_timer")

    def __init__(self, hold: Callable[[LiveGroup, HoldMode], None], *, num_beside: int) -> None:
        self._hold = hold
        self._num_beside = num_beside
        self._lines: dict[LiveGroup, None] = {}  # written by: begin, end. In the order of their arrival
        self._others: set[LiveGroup] = set()  # written by: begin, end
        self._timer: asyncio.TimerHandle | None = None  # written by: begin, end, _go_on

    @property
    def must_rest(self) -> bool:
        """Whether a line that begins now must begin paused."""
        is_busy = bool(self._others) or self._timer is not None
        return is_busy and sum(not one.is_paused for one in self._lines) >= self._num_beside

    def begin(self, group: LiveGroup) -> None:
        """Note a group whose requests are going to be sent."""
        if group.caller.is_job:
            self._lines[group] = None
            return
        self._others.add(group)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif len(self._others) == 1:
            for line in [one for one in self._lines if not one.is_paused][self._num_beside :]:
                self._hold(line, "in_place")

    def end(self, group: LiveGroup) -> None:
        """Note a group that is closed; one that is not known, or closed already, changes nothing."""
        if group in self._lines:
            del self._lines[group]
            self._fill()
        elif group in self._others:
            self._others.discard(group)
            if not self._others and self._lines:
                self._timer = asyncio.get_running_loop().call_later(REST_S, self._go_on)

    def _fill(self) -> None:
        """Go on with as many lines as may be computed now."""
        if not self.must_rest and (resting := next((one for one in self._lines if one.is_paused), None)) is not None:
            self._hold(resting, "resume")

    def _go_on(self) -> None:
        self._timer = None
        for line in self._lines:
            if line.is_paused:
                self._hold(line, "resume")
