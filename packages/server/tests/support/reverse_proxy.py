"""A reverse proxy as a process of its own: `python reverse_proxy.py PORT PREFIX {strip,keep}`; it prints its port.

It passes requests below the prefix on to a server on this machine, and uses a connection to the server again for the
next client, as nginx does.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager, suppress
from subprocess import PIPE, Popen

LIMIT = 2**20
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def body(reader: asyncio.StreamReader, head: bytes) -> AsyncGenerator[bytes]:
    """Yield the body that follows a head, as it is sent."""
    fields = {
        name.strip().lower(): value.strip() for name, _, value in (x.partition(b":") for x in head.split(b"\r\n"))
    }
    if b"chunked" in fields.get(b"transfer-encoding", b""):
        while True:
            line = await reader.readuntil(b"\r\n")
            size = int(line, 16)
            yield line + await reader.readexactly(size + 2)
            if not size:
                return
    left = int(fields.get(b"content-length", b"0"))
    while left:
        piece = await reader.read(min(left, LIMIT))
        if not piece:
            raise ConnectionError
        left -= len(piece)
        yield piece


class Proxy:
    """Passes requests on. Invariant: no two clients use one connection at the same time."""

    def __init__(self, port: int, prefix: str, *, strips: bool) -> None:
        self._port = port
        self._prefix = prefix.encode()
        self._strips = strips
        self._idle: list[Pair] = []  # written by: exchange

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client."""
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                method, target, rest = head.split(b" ", 2)
                if not target.startswith(self._prefix + b"/"):
                    writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                    continue
                if self._strips:
                    target = target.removeprefix(self._prefix)
                await self.exchange(reader, writer, b" ".join([method, target, rest]))
        writer.close()

    async def exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        """Pass one request and its answer on."""
        if not self._idle:
            self._idle.append(await asyncio.open_connection("127.0.0.1", self._port, limit=LIMIT))
        server = self._idle.pop()
        try:
            server[1].write(head)
            async for piece in body(reader, head):
                server[1].write(piece)
                await server[1].drain()
            answer = b"HTTP/1.1 100"
            while answer.startswith(b"HTTP/1.1 100"):
                answer = await server[0].readuntil(b"\r\n\r\n")
            writer.write(answer)
            async for piece in body(server[0], answer):
                writer.write(piece)
                await writer.drain()
        except BaseException:
            server[1].close()
            raise
        if b"connection: close" in answer.lower():
            server[1].close()
        else:
            self._idle.append(server)


@contextmanager
def proxying(port: int, prefix: str, *, strips: bool) -> Generator[str]:
    """Run a proxy before a server on a port; yield the URL of the server behind it."""
    command = [sys.executable, __file__, str(port), prefix, "strip" if strips else "keep"]
    with Popen(command, stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}{prefix}"
        finally:
            process.terminate()


async def _main() -> None:
    port, prefix, way = sys.argv[1:]
    proxy = Proxy(int(port), prefix, strips=way == "strip")
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=LIMIT)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main())
