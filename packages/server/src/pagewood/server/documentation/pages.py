"""`/openapi.json`, the page `/docs` that shows it, and `/` for browsers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from pagewood.server.documentation.openapi import openapi
from pagewood.server.http.operations import Operation
from pagewood.server.http.root_path import root_path_of
from pagewood.server.pages import page
from pagewood.server.protocols.common.respond import json_response

_HEADERS = {
    # The pages are whole: they load nothing, and talk to this server only.
    "content-security-policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
}


HEARTBEAT = "Ollama is running"
"""Ollama's clients recognise a server by this answer."""
OPEN_PATHS = frozenset({"/", "/dashboard", "/docs", "/openapi.json"})
"""Paths that need no key: their content is the same for every server."""


class Documentation:
    """The documentation of some operations. The document is made at the first request for it."""

    __slots__ = ("_making", "_operations")

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._operations = operations
        self._making: asyncio.Task[dict[str, Any]] | None = None  # written by: openapi

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/", self.home, methods=["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]),
            Route("/docs", self.docs, methods=["GET"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
        ]

    async def openapi(self, request: Request) -> Response:
        """Return the OpenAPI document."""
        if self._making is None:  # it takes a tenth of a second, and only one thread at a time can do it
            self._making = asyncio.create_task(asyncio.to_thread(openapi, self._operations))
        document = await asyncio.shield(self._making)
        servers = [{"url": root_path_of(request.scope) or "/"}]
        return json_response(msgspec.json.encode({**document, "servers": servers}))

    async def docs(self, request: Request) -> Response:
        """Return the page that shows it."""
        return HTMLResponse(_page("docs.html"), headers=_HEADERS)

    async def home(self, request: Request) -> Response:
        """Return the chat page to a browser, and the words that Ollama's clients look for to other clients.

        Other methods get 404, as at any unknown path.
        """
        if request.method not in ("GET", "HEAD"):
            raise HTTPException(404)
        return page("chat") if "text/html" in request.headers.get("accept", "") else PlainTextResponse(HEARTBEAT)


@cache
def _page(name: str) -> str:
    return files(__package__ or "").joinpath(name).read_text(encoding="utf-8")
