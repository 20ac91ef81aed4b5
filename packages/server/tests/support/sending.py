"""How the requests of an attack are sent: whole, slowly, in pieces, without reading, over many connections."""

from __future__ import annotations

import re
import socket
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

INDEX = "@INDEX@"
"""Stands in a body for a number that differs in each request, so that nothing of the one before is remembered."""
NO_END = "no end"
"""A request that has not ended when the attack does."""
_CODE = re.compile(rb'"(?:code|type)": ?"(\w+)"')
_HEAD_KEPT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """Requests that are sent again and again over several connections."""

    name: str
    path: str = "/v1/chat/completions"
    body: Callable[[], dict[str, Any] | bytes] = bytes
    """Made once, before the attack begins."""
    ends: frozenset[str]
    """How its requests may end: a status, with the code of the error if there is one. Some request ends so, or none
    has ended at the end of the attack and `NO_END` is among these."""
    method: str = "POST"
    num_parallel: int = 4
    key: str | None = None
    """None: one that the server knows."""
    headers: tuple[str, ...] = ()
    send: Callable[[Sending], None] = field(default=lambda sending: sending.whole())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """One connection of an attack, again and again: what a way of sending needs."""

    attack: Attack
    address: tuple[str, int]
    key: str
    content: bytes
    is_over: threading.Event
    counts: Counter[str]

    def head(self, length: int | None, *more: str) -> bytes:
        """Return the head of a request with a body of `length`."""
        lines = [
            f"{self.attack.method} {self.attack.path} HTTP/1.1",
            "Host: 127.0.0.1",
            f"Authorization: Bearer {self.attack.key or self.key}",
            "Content-Type: application/json",
            *self.attack.headers,
            *more,
        ]
        if length is not None:
            lines.append(f"Content-Length: {length}")
        return "\r\n".join([*lines, "", ""]).encode()

    def connect(self) -> socket.socket:
        """Return a connection."""
        return socket.create_connection(self.address, timeout=60)

    def numbered(self, number: int) -> bytes:
        """Return the content of a request."""
        return self.content.replace(INDEX.encode(), b"%d" % number)

    def whole(self) -> None:
        """Send requests and read their answers."""
        number = threading.get_ident() % 10_000 * 100_000
        while not self.is_over.is_set():
            number += 1
            content = self.numbered(number)
            with self.connect() as connection:
                connection.settimeout(0.2)
                with suppress(OSError):  # refused before its end
                    self._send(connection, self.head(len(content), "Connection: close") + content)
                self._read(connection)

    def unread(self) -> None:
        """Send requests whose answers are never read, and keep their connections."""
        connections: list[socket.socket] = []
        while not self.is_over.wait(0.02):
            if len(connections) < 64:
                connection = self.connect()
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                content = self.numbered(len(connections))
                connection.sendall(self.head(len(content)) + content)
                connections.append(connection)
        self.counts[NO_END] += len(connections)

    def idle(self) -> None:
        """Open connections, and send nothing."""
        connections: list[socket.socket] = []
        while not self.is_over.wait(0.002):
            if len(connections) < 200:
                connections.append(self.connect())
        self.counts[NO_END] += len(connections)

    def slow_heads(self) -> None:
        """Send heads byte by byte, over many connections."""
        self._slowly(self.head(1)[:-2], num_connections=100)

    def slow_bodies(self) -> None:
        """Send bodies byte by byte, over many connections."""
        self._slowly(self.head(100_000) + b'{"' + b" " * 90_000, num_connections=100, at_once=len(self.head(100_000)))

    def pipelined(self) -> None:
        """Send a thousand requests at once over one connection, and read the answers."""
        while not self.is_over.is_set():
            request = self.head(len(self.content)) + self.content
            with self.connect() as connection:
                connection.settimeout(0.2)
                with suppress(OSError):
                    self._send(connection, request * 1_000)
                self._read(connection)

    def tiny_chunks(self) -> None:
        """Send a body in chunks of one byte each."""
        while not self.is_over.is_set():
            content = b"".join(b"1\r\n%c\r\n" % byte for byte in self.content) + b"0\r\n\r\n"
            with self.connect() as connection:
                connection.settimeout(0.2)
                with suppress(OSError):
                    self._send(connection, self.head(None, "Connection: close", "Transfer-Encoding: chunked") + content)
                self._read(connection)

    def leave(self) -> None:
        """Send requests, and leave before their answers."""
        number = threading.get_ident() % 10_000 * 100_000
        while not self.is_over.wait(0.002):
            number += 1
            content = self.numbered(number)
            with self.connect() as connection:
                connection.sendall(self.head(len(content)) + content)
            self.counts[NO_END] += 1

    def _slowly(self, data: bytes, *, num_connections: int, at_once: int = 1) -> None:
        connections = [self.connect() for _ in range(num_connections)]
        for connection in connections:
            connection.sendall(data[:at_once])
        for place in range(at_once, len(data)):
            if self.is_over.wait(0.1):
                break
            for connection in connections:
                with suppress(OSError):
                    connection.sendall(data[place : place + 1])
        self.counts[NO_END] += num_connections

    def _send(self, connection: socket.socket, data: bytes) -> None:
        left = memoryview(data)
        while left and not self.is_over.is_set():
            with suppress(TimeoutError):
                left = left[connection.send(left[: 1 << 20]) :]

    def _read(self, connection: socket.socket) -> None:
        """Read to the end of the connection, and count how the first answer ended."""
        found = b""
        while not self.is_over.is_set():
            try:
                data = connection.recv(1 << 20)
            except TimeoutError:
                continue
            except OSError:
                break
            if not data:
                self.counts[_end_of(found) if found else NO_END] += 1
                return
            if len(found) < _HEAD_KEPT:
                found += data[:_HEAD_KEPT]
        self.counts[NO_END] += 1


def _end_of(answer: bytes) -> str:
    """Return the status of an answer, with the code of its error."""
    status = answer.split(b" ", 2)[1].decode()
    codes = [] if status == "200" else _CODE.findall(answer)
    return f"{status} {codes[-1].decode()}" if codes else status
