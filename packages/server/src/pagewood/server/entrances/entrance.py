"""The application of an entrance: it has the first HTTP process answer every request."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from starlette.types import Receive, Scope, Send

from pagewood.server.entrances.messages import (
    Asked,
    Failed,
    FromEntrance,
    Piece,
    Received,
    Started,
    ToEntrance,
    Wanted,
    Written,
)
from pagewood.server.entrances.outbox import Outbox
from pagewood.server.http.connections import BodyWriter, body_writer_of
from pagewood.server.http.exchange import Exchange, begin_exchange, new_id


class _Passage:
    """The messages of one exchange. Pieces are written on the spot while its task waits, so a token wakes no task.

    Invariant: what is written reaches the client in the order of the messages.
    """

    __slots__ = ("_arrived", "_messages", "_writer")

    def __init__(self, writer: BodyWriter | None) -> None:
        self._writer = writer
        self._messages: deque[ToEntrance] = deque()
        self._arrived: asyncio.Future[None] | None = None  # written by: put, next
        """Set while the task waits, which it does only if no message is left."""

    def put(self, message: ToEntrance) -> None:
        """Take a message."""
        arrived = self._arrived
        writer = None if arrived is None else self._writer
        if isinstance(message, Piece) and message.is_plain and writer is not None and writer.is_open:
            writer.write(message.data)
            return
        self._messages.append(message)
        if arrived is not None:
            self._arrived = None
            if not arrived.done():
                arrived.set_result(None)

    async def next(self) -> ToEntrance:
        """Wait for the next message."""
        while not self._messages:
            self._arrived = asyncio.get_running_loop().create_future()
            try:
                await self._arrived
            finally:
                self._arrived = None
        return self._messages.popleft()


class Entrance:
    """An ASGI application that passes requests on, and answers back.

    Args:
        outbox: to the first HTTP process.
        is_crowded: whether too many connections are open.
    """

    __slots__ = ("_is_crowded", "_num_asked", "_outbox", "_passages")

    def __init__(self, outbox: Outbox[FromEntrance], *, is_crowded: Callable[[], bool]) -> None:
        self._outbox, self._is_crowded = outbox, is_crowded
        self._num_asked = 0  # written by: __call__
        self._passages: dict[int, _Passage] = {}  # contents written by: __call__

    def take(self, message: ToEntrance) -> None:
        """Take a message; one for an exchange that is over is dropped."""
        passage = self._passages.get(message.number)
        if passage is not None:
            passage.put(message)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        number = self._num_asked
        self._num_asked += 1
        passage = self._passages[number] = _Passage(body_writer_of(scope))
        exchange = Exchange(
            request_id=new_id(), method=scope["method"], path=scope["path"], client="", started_s=time.monotonic()
        )
        begin_exchange(scope, exchange)  # connections look there for the type of the answer
        self._outbox.put(_asked(number, scope, is_crowded=self._is_crowded()))
        listening: asyncio.Task[None] | None = None
        is_whole = False
        try:
            while not is_whole:
                match await passage.next():
                    case Wanted():
                        listening = asyncio.create_task(self._listen(number, receive))
                    case Started(status=status, headers=headers):
                        exchange.media_type = dict(headers).get(b"content-type", b"").decode("latin-1")
                        await send({"type": "http.response.start", "status": status, "headers": [*headers]})
                    case Piece(data=data, more=more, asks=asks):
                        await send({"type": "http.response.body", "body": data, "more_body": more})
                        is_whole = not more
                        if asks:
                            self._outbox.put(Written(number))
                    case Failed():
                        return  # uvicorn closes the connection
        finally:
            del self._passages[number]
            if listening is not None:
                listening.cancel()
            if not is_whole:
                self._outbox.put(Received(number, is_gone=True))

    async def _listen(self, number: int, receive: Receive) -> None:
        """Pass on what comes next from the client."""
        message = await receive()
        if message["type"] == "http.disconnect":
            self._outbox.put(Received(number, is_gone=True))
        else:
            self._outbox.put(Received(number, message.get("body", b""), message.get("more_body", False)))


def _asked(number: int, scope: Scope, *, is_crowded: bool) -> Asked:
    return Asked(
        number=number,
        method=scope["method"],
        path=scope["path"],
        raw_path=scope["raw_path"],
        query=scope["query_string"],
        headers=tuple((name, value) for name, value in scope["headers"]),
        http_version=scope["http_version"],
        scheme=scope["scheme"],
        client=scope["client"],
        server=scope["server"],
        is_crowded=is_crowded,
    )
