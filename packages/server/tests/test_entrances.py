"""What an entrance and the first HTTP process say to each other, without processes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from starlette.types import Message, Receive, Scope, Send

from memory_server import MemoryServer
from pagewood.server.entrances.entrance import Entrance
from pagewood.server.entrances.entrances import PassedExchanges
from pagewood.server.entrances.messages import (
    Asked,
    Connected,
    Failed,
    Frame,
    FromEntrance,
    Piece,
    Received,
    Started,
    ToEntrance,
    Wanted,
    Written,
    encode,
    read_messages,
)
from pagewood.server.entrances.outbox import Outbox
from pagewood.server.entrances.passed_exchange import WINDOW_BYTES, PassedExchange
from pagewood.server.http.connections import BODY_WRITER
from pagewood.server.http.exchange import CROWDED
from pagewood.server.http.listening import bind, bind_first

pytestmark = pytest.mark.anyio


def asked(number: int = 0, *, method: str = "GET", is_crowded: bool = False) -> Asked:
    return Asked(
        number=number,
        method=method,
        path="/a b",
        raw_path=b"/a%20b",
        query=b"x=1",
        headers=((b"host", b"here"), (b"x-odd", b"\xff\x00")),
        http_version="1.1",
        scheme="https",
        client=("127.0.0.1", 5),
        server=("127.0.0.1", 8000),
        is_crowded=is_crowded,
    )


HOST = ((b"host", b"memory"),)
SCOPE: dict[str, Any] = {
    "type": "http",
    "method": "GET",
    "path": "/a b",
    "raw_path": b"/a%20b",
    "query_string": b"x=1",
    "headers": [(b"host", b"here"), (b"x-odd", b"\xff\x00")],
    "http_version": "1.1",
    "scheme": "https",
    "client": ("127.0.0.1", 5),
    "server": ("127.0.0.1", 8000),
}


async def turns(num: int = 20) -> None:
    """Let everything run that can."""
    for _ in range(num):
        await asyncio.sleep(0)


class First:
    """The first process, with an application, and what it has sent to two entrances."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Any]) -> None:
        self.sent: list[list[ToEntrance]] = [[], []]
        self.tasks: set[asyncio.Task[None]] = set()
        self.exchanges = PassedExchanges(app, [partial(self._send, 0), partial(self._send, 1)], tasks=self.tasks)

    def _send(self, entrance: int, frame: bytes) -> None:
        self.sent[entrance].extend(read_messages.decode(frame))

    def take(self, *messages: FromEntrance, entrance: int = 0, incarnation: int = 0) -> None:
        self.exchanges.take(Frame(entrance, incarnation, messages))


async def test_a_request_reaches_the_application_as_it_came() -> None:
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)
        seen.append([await receive(), await receive(), await receive()])
        await send({"type": "http.response.start", "status": 201, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    first = First(app)
    first.take(asked(3))
    await turns()
    assert first.sent[0] == [Wanted(3)]
    first.take(Received(3, b"one", True))
    await turns()
    assert first.sent[0] == [Wanted(3), Wanted(3)]
    first.take(Received(3, b"two", False))
    await turns()
    first.take(Received(3, is_gone=True))
    await turns()
    scope, (one, two, gone) = seen
    assert {name: scope[name] for name in SCOPE} == SCOPE
    assert CROWDED not in scope["extensions"]
    assert (one["body"], one["more_body"], two["body"], two["more_body"]) == (b"one", True, b"two", False)
    assert gone["type"] == "http.disconnect"
    assert first.sent[0][3:] == [Failed(3)]  # its client was gone, so nothing was sent
    assert not first.tasks


async def test_what_is_received_for_a_reader_that_gave_up_is_for_the_next_one() -> None:
    bodies: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        waiting = asyncio.create_task(receive())  # type: ignore[arg-type]
        await turns(3)
        waiting.cancel()
        await turns(3)
        bodies.append((await receive())["body"])

    first = First(app)
    first.take(asked())
    await turns()
    assert first.sent[0] == [Wanted(0)]
    first.take(Received(0, b"late"))
    await turns()
    assert bodies == [b"late"]


async def test_a_slow_client_holds_up_its_application_and_nothing_else() -> None:
    num_sent: dict[str, int] = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["query_string"].decode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for num in range(1000):
            await send({"type": "http.response.body", "body": b"x" * 1000, "more_body": num < 999})
            num_sent[name] = num + 1

    first = First(app)
    first.take(asked())
    await turns(100)
    most = WINDOW_BYTES // 1000 + 1
    assert num_sent["x=1"] == most - 1  # the last of them waits
    assert first.sent[0][-1] == Piece(0, b"x" * 1000, True, True)
    first.take(Written(0))
    await turns(100)
    assert num_sent["x=1"] == 2 * most - 1
    first.take(asked(), entrance=1)  # the other one reads everything
    while first.sent[1][-1:] != [Piece(0, b"x" * 1000, False)]:
        if first.sent[1] and first.sent[1][-1] == Piece(0, b"x" * 1000, True, True):
            first.sent[1].append(Wanted(9))
            first.take(Written(0), entrance=1)
        await asyncio.sleep(0)
    assert len(first.tasks) == 1
    first.exchanges.lost(0, next_incarnation=1)
    await turns(2000)
    assert num_sent["x=1"] == 1000  # nothing holds it up any more, and nothing is sent
    assert not first.tasks


async def test_a_writer_takes_pieces_until_the_window_is_full() -> None:
    sent: list[ToEntrance] = []
    exchange = PassedExchange(asked(), sent.append)
    assert not exchange.is_open
    await exchange.send({"type": "http.response.start", "status": 200, "headers": []})
    while exchange.is_open:
        exchange.write(b"y" * 100)
    assert WINDOW_BYTES < sum(len(one.data) for one in sent if isinstance(one, Piece)) <= WINDOW_BYTES + 100
    waiting = asyncio.create_task(exchange.send({"type": "http.response.body", "body": b"z", "more_body": True}))
    await turns()
    assert not waiting.done()
    assert sent[-1] == Piece(0, b"z", True, True)
    exchange.take(Written(0))
    await waiting
    assert exchange.is_open
    await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})
    assert not exchange.is_open
    for headers, method in (([(b"Content-Length", b"3")], "GET"), ([], "HEAD")):
        other = PassedExchange(asked(method=method), sent.append)
        await other.send({"type": "http.response.start", "status": 200, "headers": headers})
        assert not other.is_open


async def test_an_entrance_that_dies_takes_its_own_exchanges_with_it() -> None:
    ends: list[tuple[int, str]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        ends.append((id(scope), (await receive())["type"]))
        await send({"type": "http.response.body", "body": b"end"})

    first = First(app)
    first.take(Connected(3))
    first.take(Connected(4), asked(0), asked(1), entrance=1)
    first.take(asked(0))
    await turns()
    assert first.exchanges.num_connections == 7
    first.exchanges.lost(1, next_incarnation=1)
    await turns()
    assert [kind for _, kind in ends] == ["http.disconnect"] * 2
    assert first.exchanges.num_connections == 3
    assert not first.exchanges.is_there(1)
    assert first.sent[1] == [Started(0, 200, ()), Wanted(0), Started(1, 200, ()), Wanted(1)]  # and nothing for the next
    first.sent[1].clear()
    first.take(Received(0), asked(7), Connected(9), entrance=1)  # said before its death
    first.take(Connected(1), asked(0), entrance=1, incarnation=1)
    await turns()
    assert first.sent[1] == [Started(0, 200, ()), Wanted(0)]
    first.take(Received(0), entrance=1, incarnation=1)
    first.take(Received(0))
    await turns()
    assert first.sent[1][2:] == [Piece(0, b"end", False)]
    assert first.sent[0][-1] == Piece(0, b"end", False)
    assert first.exchanges.num_connections == 4
    assert not first.tasks


async def test_an_application_that_fails_ends_the_exchange(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("a defect")

    first = First(app)
    first.take(asked())
    await turns()
    assert first.sent[0] == [Failed(0)]
    assert "a defect" in caplog.text


async def test_a_crowded_entrance_answers_for_its_health_only(server: MemoryServer) -> None:
    first = First(server.app)
    for number, (path, is_crowded) in enumerate([("/health", True), ("/v1/models", True), ("/v1/models", False)]):
        first.take(msgspec.structs.replace(asked(number, is_crowded=is_crowded), path=path, headers=HOST))
        await server.until(lambda: not first.tasks)
    assert [one.status for one in first.sent[0] if isinstance(one, Started)] == [200, 503, 200]


class Client:
    """The connection of an entrance: what was written, on the spot or by `send`, which may have to wait."""

    def __init__(self) -> None:
        self.written = b""
        self.is_open = False
        self.may_send = asyncio.Event()
        self.messages: asyncio.Queue[Message] = asyncio.Queue()

    def write(self, data: bytes) -> None:
        assert self.is_open
        self.written += data

    async def send(self, message: Message) -> None:
        await self.may_send.wait()
        self.written += message.get("body", b"")


@pytest.mark.parametrize("seed", range(5))
async def test_pieces_reach_the_client_in_their_order(seed: int) -> None:
    generator = random.Random(seed)
    said: list[FromEntrance] = []
    entrance, client = Entrance(Outbox(said.extend), is_crowded=lambda: False), Client()
    scope = {**SCOPE, "extensions": {BODY_WRITER: client}}
    serving = asyncio.create_task(entrance(scope, client.messages.get, client.send))  # type: ignore[arg-type]
    await turns()
    [asked] = said
    assert isinstance(asked, Asked)
    pieces = [generator.randbytes(generator.randrange(4)) for _ in range(200)]
    entrance.take(Started(asked.number, 200, ((b"content-type", b"text/plain"),)))
    asks = [generator.random() < 0.1 for _ in pieces]
    for number, data in enumerate(pieces):
        client.is_open = generator.random() < 0.7
        if generator.random() < 0.3:
            client.may_send.set()
        else:
            client.may_send.clear()
        more = number < len(pieces) - 1
        for message in read_messages.decode(encode([Piece(asked.number, data, more, more and asks[number])])):
            entrance.take(message)
        await turns(generator.randrange(3))
    client.may_send.set()
    await serving
    assert client.written == b"".join(pieces)
    assert said[1:] == [Written(asked.number)] * sum(asks[:-1])
    entrance.take(Piece(asked.number, b"late", True))  # dropped


async def test_a_client_that_leaves_is_reported() -> None:
    said: list[FromEntrance] = []
    entrance, client = Entrance(Outbox(said.extend), is_crowded=lambda: True), Client()
    serving = asyncio.create_task(entrance(dict(SCOPE), client.messages.get, client.send))  # type: ignore[arg-type]
    await turns()
    assert isinstance(said[0], Asked)
    assert said[0].is_crowded
    number = said[0].number
    entrance.take(Wanted(number))
    client.messages.put_nowait({"type": "http.request", "body": b"all", "more_body": False})
    await turns()
    entrance.take(Wanted(number))
    client.messages.put_nowait({"type": "http.disconnect"})
    await turns()
    assert said[1:] == [Received(number, b"all", False), Received(number, is_gone=True)]
    assert not serving.done()  # until the application has noticed
    entrance.take(Failed(number))
    await serving
    serving = asyncio.create_task(entrance(dict(SCOPE), client.messages.get, client.send))  # type: ignore[arg-type]
    await turns()
    serving.cancel()  # the entrance stops
    await asyncio.gather(serving, return_exceptions=True)
    await turns()
    assert said[-1] == Received(number + 1, is_gone=True)


async def test_an_address_of_another_server_is_not_shared() -> None:
    first = bind_first("127.0.0.1", 0)
    port = first.getsockname()[1]
    second = bind("127.0.0.1", port, is_shared=True)
    for one in (first, second):
        with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use"):
            bind_first("127.0.0.1", port)
        one.close()
    bind_first("127.0.0.1", port).close()
