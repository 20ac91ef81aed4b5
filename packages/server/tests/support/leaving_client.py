"""An ASGI client that can leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.types import Message, Scope

from memory_server import MemoryServer

CHAT = "/v1/chat/completions"


class Client:
    """An ASGI client that reads one message at a time, and can leave at any time."""

    def __init__(self, server: MemoryServer, body: dict[str, Any], *, path: str = CHAT) -> None:
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._outgoing: asyncio.Queue[Message] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": json.dumps(body).encode()})
        scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"host", b"memory"), (b"content-type", b"application/json")],
            "server": ("memory", 80),
        }
        self.served = asyncio.create_task(self._serve(server, scope))

    async def _serve(self, server: MemoryServer, scope: Scope) -> None:
        await server.app(scope, self._incoming.get, self._outgoing.put)

    async def messages(self) -> AsyncIterator[Message]:
        """Yield what the server sends."""
        while True:
            message = await self._outgoing.get()
            yield message
            if message["type"] == "http.response.body" and not message.get("more_body"):
                return

    async def leave(self) -> None:
        """Close the connection, and wait until the server has noticed."""
        self._incoming.put_nowait({"type": "http.disconnect"})
        await self.served
