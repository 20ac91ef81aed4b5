"""`/dashboard`, and the live data that it shows."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pagewood.server.dashboard.live_data import Live
from pagewood.server.http.errors import unavailable
from pagewood.server.http.operations import Operation
from pagewood.server.pages import page
from pagewood.server.protocols.common.formats import EVENTS
from pagewood.server.protocols.common.models import Models
from pagewood.server.protocols.common.respond import json_response, until_disconnect

_MAX_FIND = 200
_MAX_EMPTY = 3
"""Messages to wait for data of the engine; then the answer is sent without such data."""


def page_routes() -> list[Route]:
    """Return the routes of pages."""
    return [Route("/dashboard", _dashboard, methods=["GET"])]


async def _dashboard(request: Request) -> Response:
    return page("dashboard")


@dataclass(frozen=True, slots=True)
class DashboardEndpoints:
    """Live data of the server."""

    models: Models

    def operations(self) -> list[Operation]:
        """Return the operations."""
        return [
            Operation(
                name="Watch",
                tag="Dashboard",
                method="GET",
                path="/dashboard/events",
                endpoint=self.watch,
                answer=Live,
                event=Live,
                last_event=None,
                admin=True,
                query={
                    "find": {
                        "type": "string",
                        "maxLength": _MAX_FIND,
                        "description": "A part of names of requests; those that have it are in the data even if they "
                        "are far back in the queue.",
                    }
                },
            )
        ]

    async def watch(self, request: Request) -> ASGIApp:
        """Return live data: requests, steps, KV memory, prefix cache, rates and processes.

        With `Accept: text/event-stream` it is a stream of some messages a second, without an end; otherwise one.
        """
        service = self.models.chosen(request)
        find = request.query_params.get("find", "").strip()[:_MAX_FIND]
        messages = service.watchers.follow(service.live, service.status, service.model_name, find=find)
        if "text/event-stream" in request.headers.get("accept", ""):
            return _EventsResponse(messages)
        async with aclosing(messages):
            message, num_empty = await anext(messages, None), 0
            while message is not None and num_empty < _MAX_EMPTY and msgspec.json.decode(message)["engine"] is None:
                message, num_empty = await anext(messages, None), num_empty + 1
            if message is None:
                raise unavailable(f"The model '{service.model_name}' was unloaded.", code="model_unloaded")
            return json_response(message)


@dataclass(frozen=True, slots=True)
class _EventsResponse:
    """An ASGI response with messages as events, until the client leaves."""

    messages: AsyncGenerator[bytes]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the messages."""
        headers = [
            (b"content-type", EVENTS.encode()),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await until_disconnect(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with aclosing(self.messages) as messages:
            async for message in messages:
                await send({"type": "http.response.body", "body": b"data: " + message + b"\n\n", "more_body": True})
