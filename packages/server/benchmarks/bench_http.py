"""What one request over a kept-alive connection costs in the HTTP process, with uvicorn's protocol and with ours."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from pagewood.server.http.connections import Connections, HttpConnection
from pagewood.server.http.limits import HttpLimits

REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\nUser-Agent: bench\r\nAccept: */*\r\n\r\n"
LIMITS = HttpLimits()
PROTOCOLS = {
    "uvicorn": HttpToolsProtocol,
    "ours": partial(HttpConnection, limits=LIMITS, connections=Connections(LIMITS)),
}


class Transport(asyncio.Transport):
    """Drops what is written."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Drop it."""

    def is_closing(self) -> bool:
        """Return False."""
        return False


async def answer(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"15")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b'{"status":"ok"}'})


@pytest.mark.parametrize("name", PROTOCOLS)
def test_request(benchmark: Any, name: str) -> None:
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        config = uvicorn.Config(answer, lifespan="off", log_config=None, access_log=False)
        protocol: Any = PROTOCOLS[name](config, ServerState(), {}, loop)
        protocol.connection_made(Transport())

        async def request() -> None:
            protocol.data_received(REQUEST)
            await protocol.cycle.message_event.wait()

        benchmark(lambda: runner.run(request()))
