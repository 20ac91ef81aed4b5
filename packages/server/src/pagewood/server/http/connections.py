"""HTTP connections: uvicorn's protocol with limits on the head of a request, on idle time, and on their number."""

from __future__ import annotations

import asyncio
import logging
import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import httptools
import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from pagewood.server.http.errors import ApiError
from pagewood.server.http.exchange import Exchange, error_headers, exchange_of, new_id
from pagewood.server.http.limits import HttpLimits
from pagewood.server.protocols.common.formats import EVENTS, LINES

WARN_EVERY_S = 10.0
INTERIM_RESPONSE = b"HTTP/1.1 100 Continue\r\n\r\n"
BODY_WRITER = "pagewood.body_writer"
"""Extension of an ASGI scope: a `BodyWriter`."""
FILLERS = {EVENTS: b"3\r\n:\n\n\r\n", LINES: b"1\r\n \r\n"}
"""Content type of a stream -> a chunk without meaning: a comment, or a space before the next JSON value."""

_log = logging.getLogger(__name__)


class Connections:
    """The open connections.

    A new connection beyond the limit closes the one that has been idle longest. If none is idle, the new connection
    uses one of a few spare places, or is closed if these are taken. Idle connections are those without a complete head
    of a request.

    Invariant: `_idle` is a subset of `_open`, in the order in which they became idle.
    """

    __slots__ = ("_idle", "_limits", "_open", "_warned_s")

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._open: set[asyncio.Transport] = set()  # written by: add, remove
        self._idle: dict[asyncio.Transport, None] = {}  # written by: add, remove, mark_busy, mark_idle
        self._warned_s = float("-inf")  # written by: _warn

    def __len__(self) -> int:
        return len(self._open)

    @property
    def is_crowded(self) -> bool:
        """Whether more connections are open than the limit allows."""
        return len(self._open) > self._limits.max_connections

    def add(self, transport: asyncio.Transport) -> None:
        """Take in a new connection, and close another one or this one if there are too many."""
        if len(self._open) >= self._limits.max_connections:
            self._warn()
            oldest = next(iter(self._idle), None)
            if oldest is not None:
                self.remove(oldest)
                oldest.abort()
            elif len(self._open) >= self._limits.max_connections + self._limits.num_spare_connections:
                transport.abort()
                return
        self._open.add(transport)
        self._idle[transport] = None

    def remove(self, transport: asyncio.Transport) -> None:
        """Forget a connection; does nothing if it was refused or removed before."""
        self._open.discard(transport)
        self._idle.pop(transport, None)

    def mark_busy(self, transport: asyncio.Transport) -> None:
        """Note that a connection has a request."""
        self._idle.pop(transport, None)

    def mark_idle(self, transport: asyncio.Transport) -> None:
        """Note that the last request of a connection is answered."""
        if transport in self._open:
            self._idle[transport] = None

    def _warn(self) -> None:
        now_s = time.monotonic()
        if now_s - self._warned_s >= WARN_EVERY_S:
            self._warned_s = now_s
            _log.warning("%d connections are open, the limit is %d", len(self._open), self._limits.max_connections)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What an HTTP server serves."""

    app: ASGIApp
    limits: HttpLimits
    """Limits of connections and heads."""
    connections: Connections


class BodyWriter(Protocol):
    """Writes pieces of one streamed body at once, without the coroutine of ASGI's `send`, which every token would pay.

    It writes the same bytes as `send` would; the beginning and the end of a body are for `send`.
    """

    @property
    def is_open(self) -> bool:
        """Whether a piece may be written now: the body has begun, and its client keeps up with reading it."""
        ...

    def write(self, data: bytes) -> None:
        """Write a piece, which is not empty, of a body that is open."""
        ...


class ChunkWriter:
    """Writes pieces to the connection of this process. Satisfies `BodyWriter`."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def is_open(self) -> bool:
        """Whether a piece may be written now: the body has begun, and its client keeps up with reading it."""
        cycle = self._cycle
        return cycle.chunked_encoding is True and not (
            cycle.flow.write_paused or cycle.disconnected or cycle.response_complete
        )

    def write(self, data: bytes) -> None:
        """Write a piece, which is not empty, of a body that is open."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def body_writer_of(scope: Scope) -> BodyWriter | None:
    """Return the writer of pieces of the answer's body; None: the ASGI server has only `send`."""
    return scope.get("extensions", {}).get(BODY_WRITER)


class HttpConnection(HttpToolsProtocol):
    """One connection: parses requests within limits, answers what cannot be parsed, and serves half-closed clients.

    `Upgrade` is ignored. The parser stops at the end of a head that has it, takes no body, and would read the body as
    the next request. So that request is not started; its head is passed to a new parser without `Upgrade`.

    It is a subclass because uvicorn's setting `http` takes a protocol class. The parser keeps the bytes of a head, of a
    trailer and of chunk extensions in memory until it passes them on. These bytes are counted, and the count starts
    again whenever the parser has passed on a head or a part of a body, so that they cannot grow beyond the limit.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: HttpLimits,
        connections: Connections,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._table = connections
        self._opened_s = time.monotonic()
        self._num_pending_bytes = 0  # written by: data_received, on_headers_complete, on_body, on_message_complete
        self._num_head_bytes = 0  # written by: on_message_begin, _count
        self._is_in_body = False  # written by: on_headers_complete, on_message_complete
        self._is_refused = False  # written by: _refuse
        self._deadline: asyncio.TimerHandle | None = None  # written by: _start_deadline, _stop_deadline
        self._peer_check: asyncio.TimerHandle | None = None  # written by: eof_received, _check_peer, connection_lost

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, and give its first request a deadline."""
        super().connection_made(transport)
        self._start_deadline(self._limits.head_timeout_s, self._head_late)
        self._table.add(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._table.remove(self.transport)
        self._stop_deadline()
        if self._peer_check is not None:
            self._peer_check.cancel()
            self._peer_check = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came, unless the connection only waits for its client to read a refusal."""
        if self._is_refused:
            return
        self._num_pending_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self.send_400_response(str(error))
        if self._is_refused or self.transport.is_closing():
            return
        if self._num_pending_bytes > self._limits.max_head_bytes:
            self._refuse(self._head_too_large())
        elif not self._is_in_body and not self._is_answering() and self._deadline is None:
            self._start_deadline(self._limits.head_timeout_s, self._head_late)

    def _parse(self, data: bytes) -> None:
        """Pass bytes to the parser.

        Raises:
            httptools.HttpParserError: they are not HTTP, or beyond a limit.
        """
        rest = memoryview(data)
        while rest:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as stop:
                rest = rest[stop.args[0] :]
                head = self._head_without_upgrade()
                self.parser = httptools.HttpRequestParser(
                    self
                )  # the old one drops all that follows `Connection: close`
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self.parser.feed_data(head)

    def _head_without_upgrade(self) -> bytes:
        """Return the last head, with all that says where its request ends."""
        version = self.parser.get_http_version().encode()
        fields = [b"%b: %b\r\n" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"%b %b HTTP/%b\r\n%b\r\n" % (self.parser.get_method(), self.url, version, b"".join(fields))

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep the connection for the answer if the client has sent a whole request; return whether it stays open.

        A client that has closed its connection looks like one that has only shut down its sending side. But data sent
        to a closed connection is answered with a reset. So the server sends bytes that clients skip.
        """
        if self._is_refused or not self._is_answering() or self.cycle.more_body or self._is_encrypted:
            return None
        self.cycle.keep_alive = False  # not ours
        if not self.pipeline:
            self.transport.write(self._probe())
        self._peer_check = self.loop.call_later(self._limits.peer_check_s, self._check_peer)
        return True

    def shutdown(self) -> None:
        """Close the connection as soon as it is idle."""
        if self._is_refused:
            self.transport.close()
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that the parser refused."""
        if self._num_head_bytes > self._limits.max_head_bytes:
            self._refuse(self._head_too_large())
        else:
            self._refuse(ApiError("The server received something that is not valid HTTP.", code="invalid_http"))

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._num_head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Take a piece of the request's target."""
        self._count(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. A field of the trailer is dropped, so that it cannot stand for a header."""
        self._count(name, value)
        if not self._is_in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request, unless its head will come again without `Upgrade`.

        Raises:
            ValueError: it asks for a tunnel.
        """
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("this server is no proxy")
        if self.parser.should_upgrade():
            return
        self._num_pending_bytes = 0
        self._is_in_body = True
        self._stop_deadline()
        self._table.mark_busy(self.transport)
        super().on_headers_complete()
        cast("Any", self.scope)["extensions"] = {BODY_WRITER: ChunkWriter(self.cycle)}

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._num_pending_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request, if it was started."""
        if self.parser.should_upgrade():
            return
        self._num_pending_bytes = 0
        self._is_in_body = False
        super().on_message_complete()
        if not self._is_answering():  # it was answered before it was complete
            self._stop_deadline()
            self._table.mark_idle(self.transport)

    def on_response_complete(self) -> None:
        """Wait for the next request, or a while for the rest of the one that has been answered."""
        super().on_response_complete()
        if self.transport.is_closing() or self.pipeline or self._is_answering():
            return
        if self._is_in_body:
            self._start_deadline(self._limits.linger_s, self.transport.abort)
        else:
            self._table.mark_idle(self.transport)

    def _probe(self) -> bytes:
        """Return bytes that do not change the meaning of the present response."""
        if not self.cycle.response_started:
            return INTERIM_RESPONSE if self.scope["http_version"] == "1.1" else b""
        return FILLERS.get(exchange_of(cast("Any", self.scope)).media_type, b"") if self.cycle.chunked_encoding else b""

    @property
    def _is_encrypted(self) -> bool:
        """Whether it uses TLS, which has no half-closed connections here."""
        return self.transport.get_extra_info("sslcontext") is not None

    def _is_answering(self) -> bool:
        """Return whether a request was received whose answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]

    def _count(self, *parts: bytes) -> None:
        """Add to the length of the head; an exception here makes the parser report a malformed request."""
        self._num_head_bytes += sum(map(len, parts)) + 4
        if self._num_head_bytes > self._limits.max_head_bytes:
            raise ValueError("the head of the request is too long")

    def _head_too_large(self) -> ApiError:
        return ApiError(
            f"The head of your request is longer than {self._limits.max_head_bytes} bytes.",
            status=431,
            code="headers_too_large",
        )

    def _head_late(self) -> None:
        """Close a connection whose next request has not come in time."""
        if self._num_pending_bytes:
            self._refuse(ApiError("The head of your request came too slowly.", status=408, code="request_timeout"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer with an error and end the connection, after a while in which the client can read the answer."""
        self._is_refused = True
        self._stop_deadline()
        exchange = Exchange(
            request_id=new_id(),
            method="-",
            path="-",
            client="-" if self.client is None else f"{self.client[0]}:{self.client[1]}",
            started_s=self._opened_s,
            status=error.status,
            is_complete=True,
            error_code=error.code,
        )
        exchange.log(time.monotonic())
        if self._is_answering():
            if self.pipeline or self.cycle.response_started:  # an error cannot be sent in the middle of another answer
                self.transport.close()
                return
            self.cycle.disconnected = True  # not ours
            self.cycle.message_event.set()
        body = error.body()
        headers = {**error_headers(exchange.request_id, error), "content-length": str(len(body)), "connection": "close"}
        lines = [f"{name}: {value}\r\n".encode("latin-1") for name, value in headers.items()]
        self.transport.write(b"".join([STATUS_LINE[error.status], *lines, b"\r\n", body]))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._start_deadline(self._limits.linger_s, self.transport.close)

    def _check_peer(self) -> None:
        """End the connection of a client that has closed it; until it is answered, look again later."""
        self._peer_check = None
        if self.transport.is_closing():
            return
        if _is_reset(self.transport.get_extra_info("socket").fileno()):
            self.transport.abort()
        else:
            self._peer_check = self.loop.call_later(self._limits.peer_check_s, self._check_peer)

    def _start_deadline(self, after_s: float, then: Callable[[], None]) -> None:
        self._stop_deadline()
        self._deadline = self.loop.call_later(after_s, then)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _is_reset(descriptor: int) -> bool:
    """Return whether both directions of a connection are closed."""
    poll = select.poll()
    poll.register(descriptor, 0)  # errors and hang-ups are always reported
    return bool(poll.poll(0))
