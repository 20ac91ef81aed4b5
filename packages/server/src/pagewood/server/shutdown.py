"""The end of the server: it takes no new requests, lets running ones finish for a while, and then ends the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from pagewood.server.http.errors import ApiError, unavailable
from pagewood.server.observe.incidents import Incidents

if TYPE_CHECKING:
    import uvicorn

POLL_S = 0.02


class Closing(Protocol):
    """The requests that a server holds."""

    @property
    def num_live(self) -> int:
        """Requests that a client waits for."""
        ...

    def close_door(self) -> None:
        """Refuse all further requests."""
        ...

    def fail_all(self, error: ApiError) -> None:
        """End all requests with an error."""
        ...


class Shutdown:
    """Drains the server and then ends uvicorn. While it drains, HTTP is served: `/ready` has 503, and so do requests.

    Invariant: `is_draining` never becomes false again, and from then on `live` takes no new request.

    Args:
        live: the requests.
        drain_s: how long running requests may continue, seconds.
        incidents: where the requests are counted.
    """

    __slots__ = ("_begun", "_drain_s", "_incidents", "_live")

    def __init__(self, live: Closing, *, drain_s: float, incidents: Incidents) -> None:
        self._live = live
        self._drain_s = drain_s  # written by: begin
        self._incidents = incidents
        self._begun = asyncio.Event()

    @property
    def is_draining(self) -> bool:
        """Whether the server takes no new requests."""
        return self._begun.is_set()

    def begin(self, *, at_once: bool = False) -> None:
        """Begin to stop; with `at_once`, running requests get no time."""
        if at_once:
            self._drain_s = 0.0
        self._live.close_door()
        self._begun.set()

    async def while_open(self, work: Coroutine[Any, Any, None]) -> None:
        """Do some work until `begin`, and then cancel it."""
        working, begun = asyncio.create_task(work), asyncio.create_task(self._begun.wait())
        try:
            await asyncio.wait((working, begun), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            for task in (working, begun):
                task.cancel()
            await asyncio.gather(working, begun, return_exceptions=True)

    async def run(self, server: uvicorn.Server) -> None:
        """Wait for `begin`, then drain and end `server`, which would cut connections without an error."""
        await self._begun.wait()
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._drain_s
        num_before = self._live.num_live
        # Responses that are still being sent count as well: a slow client gets the rest of a complete answer.
        while (self._live.num_live or server.server_state.tasks) and loop.time() < end_s and self._drain_s:
            await asyncio.sleep(POLL_S)
        num_left = self._live.num_live
        self._incidents.num_drained += num_before - num_left
        self._incidents.num_cut_off += num_left
        self._live.fail_all(unavailable("The server is shutting down.", code="shutting_down"))
        server.should_exit = True  # not ours
