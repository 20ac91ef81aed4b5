"""An exchange whose connection an entrance has, as the application of the first HTTP process sees it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from starlette.types import Message, Scope

from pagewood.server.entrances.messages import Asked, Failed, Piece, Received, Started, ToEntrance, Wanted, Written
from pagewood.server.http.connections import BODY_WRITER
from pagewood.server.http.exchange import CROWDED

WINDOW_BYTES = 64 * 1024
"""Bytes that may be on their way to an entrance before it says that it has written them."""


class PassedExchange:
    """The three callables of ASGI for it, and its `BodyWriter`.

    Invariant: at most `WINDOW_BYTES` and one piece are on their way, so a client that reads slowly is noticed here.

    Args:
        asked: its request.
        put: sends a message to its entrance.
    """

    __slots__ = (
        *("_arrived", "_asked", "_is_gone", "_is_over", "_is_streamed", "_is_wanted", "_num_unwritten", "_put"),
        *("_received", "_written"),
    )

    def __init__(self, asked: Asked, put: Callable[[ToEntrance], None]) -> None:
        self._asked, self._put = asked, put
        self._received: deque[Received] = deque()
        self._arrived = asyncio.Event()
        self._is_wanted = False  # written by: receive, take. Whether a `Wanted` is not answered yet
        self._is_gone = False  # written by: leave
        self._is_streamed = False  # written by: send. Whether the body has begun, and has no length
        self._is_over = False  # written by: send, end
        self._num_unwritten = 0  # written by: write, _send_piece, take
        self._written = asyncio.Event()

    def scope(self) -> Scope:
        """Return the scope of its request."""
        asked = self._asked
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": asked.http_version,
            "method": asked.method,
            "scheme": asked.scheme,
            "path": asked.path,
            "raw_path": asked.raw_path,
            "query_string": asked.query,
            "root_path": "",
            "headers": [*asked.headers],
            "client": asked.client,
            "server": asked.server,
            "state": {},
            "extensions": {BODY_WRITER: self, **({CROWDED: {}} if asked.is_crowded else {})},
        }

    def take(self, message: Received | Written) -> None:
        """Take what the entrance says of it."""
        match message:
            case Written():
                self._num_unwritten = 0
                self._written.set()
            case Received(is_gone=True):
                self.leave()
            case Received():
                self._is_wanted = False
                self._received.append(message)
                self._arrived.set()

    def leave(self) -> None:
        """Note that its client has left, or that its entrance has died."""
        self._is_gone = True
        self._arrived.set()
        self._written.set()

    def end(self) -> None:
        """Note that the application has ended."""
        if not self._is_over:
            self._is_over = True
            self._put(Failed(self._asked.number))

    async def receive(self) -> Message:
        """Wait for a part of the body, or the end of the connection."""
        while not (self._received or self._is_gone or self._is_over):
            if not self._is_wanted:
                self._is_wanted = True
                self._put(Wanted(self._asked.number))
            self._arrived.clear()
            await self._arrived.wait()
        if self._is_gone or self._is_over:
            return {"type": "http.disconnect"}
        found = self._received.popleft()
        return {"type": "http.request", "body": found.body, "more_body": found.more}

    async def send(self, message: Message) -> None:
        """Send the beginning of the answer, or a piece of its body; wait while the client reads slowly."""
        if self._is_gone:
            return
        if message["type"] == "http.response.start":
            headers = tuple((name, value) for name, value in message.get("headers", ()))
            has_length = any(name.lower() == b"content-length" for name, _ in headers)
            self._is_streamed = not has_length and self._asked.method != "HEAD"
            self._put(Started(self._asked.number, message["status"], headers))
        else:
            await self._send_piece(message.get("body", b""), more=message.get("more_body", False))

    @property
    def is_open(self) -> bool:
        """Whether a piece may be written now, see `BodyWriter`."""
        return self._is_streamed and self._num_unwritten <= WINDOW_BYTES and not self._is_gone and not self._is_over

    def write(self, data: bytes) -> None:
        """Write a piece, which is not empty, of a body that is open."""
        self._num_unwritten += len(data)
        self._put(Piece(self._asked.number, data, True))

    async def _send_piece(self, data: bytes, *, more: bool) -> None:
        self._num_unwritten += len(data)
        asks = more and self._num_unwritten > WINDOW_BYTES
        self._is_over = not more
        self._written.clear()
        self._put(Piece(self._asked.number, data, more, asks))
        if asks and not self._is_gone:
            await self._written.wait()
