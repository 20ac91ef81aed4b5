"""An HTTP client that costs little per chunk: chunks are parsed as they arrive, and no task wakes until the end."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httptools


class HttpError(Exception):
    """A connection failed; `kind` is one word for the report."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Connection(asyncio.Protocol):
    """One connection, used by one request after the other."""

    __slots__ = ("_done", "_on_body", "_parser", "_transport", "is_reusable", "status")

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None  # written by: connection_made, connection_lost
        self._parser: Any = None  # written by: request
        self._on_body: Callable[[bytes], object] = bytes  # written by: request
        self._done: asyncio.Future[None] | None = None  # written by: request
        self.is_reusable = True  # written by: on_message_complete, connection_lost
        self.status = 0  # written by: request, on_headers_complete

    async def request(self, head: bytes, body: bytes, on_body: Callable[[bytes], object]) -> int:
        """Send a request, pass each part of the answer's body to `on_body`, and return the status.

        Raises:
            HttpError: the connection broke, or the answer is not HTTP.
        """
        if self._transport is None:
            raise HttpError("connection", "the connection is closed")
        self._parser, self._on_body, self.status = httptools.HttpResponseParser(self), on_body, 0
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(head + body)
        await self._done
        return self.status

    def close(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Parse the next bytes."""
        if self._done is None or self._done.done():
            self.close()  # nothing was asked for
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(HttpError("protocol", f"the answer is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request that is under way."""
        self._transport, self.is_reusable = None, False
        self._fail(HttpError("connection", f"the connection broke: {exc or 'the server closed it'}"))

    def _fail(self, error: HttpError) -> None:
        self.is_reusable = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self.close()

    # httptools

    def on_headers_complete(self) -> None:
        """Note the status."""
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Pass a part of the body on."""
        self._on_body(body)

    def on_message_complete(self) -> None:
        """End the request."""
        self.is_reusable = bool(self._parser.should_keep_alive())
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


class HttpClient:
    """Connections to one server. A connection that has ended its request is used again.

    Args:
        url: such as `http://127.0.0.1:8000`; its path is put before the path of each request.
        api_key: sent as `Authorization: Bearer`; None: not sent.
        trust: trusted certificates; None: those of the system.

    Raises:
        ValueError: `url` is not an http or https URL.
    """

    def __init__(self, url: str, *, api_key: str | None = None, trust: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url must be such as http://127.0.0.1:8000, got '{url}'")
        self._host = parts.hostname
        self._ssl = (trust or ssl.create_default_context()) if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        self._base = parts.path.rstrip("/")
        fields = [f"Host: {parts.netloc.rpartition('@')[2]}", "Content-Type: application/json", "Accept: */*"]
        if api_key is not None:
            fields.append(f"Authorization: Bearer {api_key}")
        self._fields = "\r\n".join(fields)
        self._idle: list[Connection] = []  # written by: send, close

    async def send(
        self, method: str, path: str, body: bytes, on_body: Callable[[bytes], object], *, limit_s: float
    ) -> int:
        """Send a request and return its status; a broken connection is not tried again.

        Raises:
            HttpError: of the kind "connection", "timeout" or "protocol".
        """
        head = (
            f"{method} {self._base}{path} HTTP/1.1\r\n{self._fields}\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode("latin-1")
        connection: Connection | None = None
        status = 0
        try:
            async with asyncio.timeout(limit_s):
                connection = await self._connection()
                status = await connection.request(head, body, on_body)
        except TimeoutError as error:
            raise HttpError("timeout", f"no complete answer within {limit_s:g} s") from error
        except OSError as error:
            raise HttpError("connection", f"cannot connect to {self._host}:{self._port}: {error}") from error
        finally:
            if connection is not None:
                if status and connection.is_reusable:
                    self._idle.append(connection)
                else:
                    connection.close()
        return status

    async def json(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Send a request and return the status and the whole answer.

        Raises:
            HttpError: as `send`.
        """
        parts: list[bytes] = []
        status = await self.send(method, path, body, parts.append, limit_s=60.0)
        return status, b"".join(parts)

    def close(self) -> None:
        """Close all connections."""
        while self._idle:
            self._idle.pop().close()

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._ssl)
        return connection
