"""A raw HTTP client, and a server over a real socket for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from socket import SO_SNDBUF, SOL_SOCKET
from typing import Any

from memory_server import MemoryServer
from near_entrance import behind_an_entrance
from pagewood.server.http.http_server import http_server
from pagewood.server.http.listening import bind

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def post(body: bytes | dict[str, Any], *headers: str, path: str = "/v1/completions") -> bytes:
    """Return a request with a JSON body, as it is sent."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", *headers]
    if not any(header.lower().startswith(("content-length", "transfer-encoding")) for header in headers):
        lines.append(f"Content-Length: {len(content)}")
    return "\r\n".join([*lines, "", ""]).encode() + content


class Socket:
    """A raw client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of the next response; interim responses are skipped."""
        while True:
            head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 30)).decode("latin-1")
            status = int(head.split()[1])
            if status != 100:
                break
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head.split("\r\n")[1:-2])}
        if "content-length" in headers:
            return status, headers, await self.reader.readexactly(int(headers["content-length"]))
        body = b""
        while size := int(await self.reader.readline(), 16):
            body += await self.reader.readexactly(size + 2)
        return status, headers, body

    async def error(self) -> tuple[int, str]:
        """Return status and code of the next response, which must be an error in OpenAI's form with an id."""
        status, headers, body = await self.answer()
        assert headers["content-type"] == "application/json"
        assert headers["x-request-id"]
        error = json.loads(body)["error"]
        assert list(error) == ["message", "type", "param", "code"]
        return status, error["code"]

    async def is_closed(self) -> bool:
        """Wait until the server closes the connection; what it still sends is dropped."""
        with suppress(ConnectionError):
            await asyncio.wait_for(self.reader.read(), 30)
        return True

    def close(self) -> None:
        """Close both directions."""
        self.writer.close()


Connect = Callable[[], Any]


@asynccontextmanager
async def listening(
    server: MemoryServer, *, buffer_bytes: int | None = None, is_passed: bool = False
) -> AsyncGenerator[Connect]:
    """Serve on a port of this machine; yield a function that connects. Sockets have buffers of a given length.

    `is_passed`: an entrance has the connections.
    """
    socket = bind("127.0.0.1", 0)
    if buffer_bytes is not None:
        socket.setsockopt(SOL_SOCKET, SO_SNDBUF, buffer_bytes)
    port = socket.getsockname()[1]
    site = server.frontend.site()
    http = http_server(behind_an_entrance(site) if is_passed else site, stop_grace_s=4)
    serving = asyncio.create_task(http.serve(sockets=[socket]))
    sockets: list[Socket] = []

    async def connect() -> Socket:
        sockets.append(Socket(*await asyncio.open_connection("127.0.0.1", port)))
        return sockets[-1]

    await server.until(lambda: http.started)
    try:
        yield connect
    finally:
        for one in sockets:
            one.close()
        http.should_exit = True  # not ours
        await serving
