"""Raw sockets against a real HTTP server: limits on heads, bodies, idle time and connections; half-closed clients."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from memory_server import MemoryServer
from pagewood.engine.text import Tokenizer
from pagewood.server.http.limits import MOST_CONNECTIONS, HttpLimits, default_max_connections
from raw_http import HEALTH, listening, post

pytestmark = pytest.mark.anyio

QUICK = HttpLimits(
    max_connections=20,
    num_spare_connections=4,
    max_body_bytes=100_000,
    max_buffered_bytes=400_000,
    head_timeout_s=0.3,
    body_timeout_s=0.3,
    keep_alive_s=1,
    linger_s=0.5,
    peer_check_s=0.02,
)
PATIENT = replace(QUICK, head_timeout_s=60.0, body_timeout_s=60.0, keep_alive_s=60)
LONG = {"model": "echo", "prompt": "x", "max_tokens": 300, "ignore_eos": True}


@asynccontextmanager
async def running(model_folder: Path, tokenizer: Tokenizer, limits: HttpLimits) -> AsyncGenerator[MemoryServer]:
    server = MemoryServer(model_folder, tokenizer, limit=64, limits=limits)
    await server.start()
    yield server
    await server.until_idle()
    await server.stop()


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The event loop of the server."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(params=[False, True], ids=["own", "passed"])
def is_passed(request: pytest.FixtureRequest) -> bool:
    """Whether an entrance has the connections."""
    return request.param


@pytest.fixture
async def quick(model_folder: Path, tokenizer: Tokenizer) -> AsyncGenerator[MemoryServer]:
    """A server with short time limits."""
    async with running(model_folder, tokenizer, QUICK) as server:
        yield server


@pytest.fixture
async def patient(model_folder: Path, tokenizer: Tokenizer) -> AsyncGenerator[MemoryServer]:
    """A server with the same limits of sizes, and long time limits."""
    async with running(model_folder, tokenizer, PATIENT) as server:
        yield server


@pytest.mark.parametrize(
    "pieces",
    [
        [b"GET /health HTTP/1.1\r\nX-Long: ", b"x" * 10_000],  # one header that never ends
        [b"GET /health HTTP/1.1\r\n", b"X-Y: z\r\n" * 1000],  # headers that never end
        [b"GET /", b"x" * 10_000],  # a path that never ends
        [b"\r\n" * 5000],  # empty lines
        [post(b"1\r\nx\r\n0\r\n", "Transfer-Encoding: chunked"), b"X-Trailer: ", b"x" * 10_000],
        [post(b"1;", "Transfer-Encoding: chunked"), b"x" * 10_000],
    ],
    ids=["header", "headers", "path", "blank", "trailer", "chunk extension"],
)
async def test_a_head_that_never_ends_is_refused(patient: MemoryServer, pieces: list[bytes]) -> None:
    async with listening(patient) as connect:
        client = await connect()
        *start, endless = pieces
        for piece in start:
            await client.send(piece)
        num_sent = 0
        try:
            while num_sent < 4 * 2**20 and not client.reader._buffer:  # type: ignore[attr-defined]
                await client.send(endless)
                num_sent += len(endless)
                await asyncio.sleep(0)
        except ConnectionError:
            pass
        assert num_sent < 2 * 2**20
        status, code = await client.error()
        assert (status, code) in ((431, "headers_too_large"), (400, "invalid_http"))
        assert await client.is_closed()
        healthy = await connect()
        await healthy.send(HEALTH)
        assert (await healthy.answer())[0] == 200


async def test_a_long_head_in_one_piece_is_refused(patient: MemoryServer) -> None:
    async with listening(patient) as connect:
        client = await connect()
        await client.send(HEALTH[:-2] + b"X-Long: " + b"x" * 70_000 + b"\r\n\r\n")
        assert await client.error() == (431, "headers_too_large")
        client = await connect()
        await client.send(HEALTH[:-2] + b"X-Long: " + b"x" * 60_000 + b"\r\n\r\n")
        assert (await client.answer())[0] == 200


async def test_a_large_body_is_no_long_head(patient: MemoryServer, is_passed: bool) -> None:
    async with listening(patient, is_passed=is_passed) as connect:
        client = await connect()
        body = json.dumps({**LONG, "max_tokens": 1, "user": "x" * 90_000}).encode()
        for start in range(3):  # in one piece, in a few, and in many
            request = post(body)
            size = (len(request), 30_000, 700)[start]
            for i in range(0, len(request), size):
                await client.send(request[i : i + size])
                await asyncio.sleep(0)
            assert (await client.answer())[0] == 200
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body[-60_000:]) + b"0\r\n\r\n"
        await client.send(post(chunks, "Transfer-Encoding: chunked"))
        assert await client.error() == (400, "invalid_json")


async def test_connections_that_send_nothing_are_closed(quick: MemoryServer) -> None:
    async with listening(quick) as connect:
        silent = await connect()
        assert await silent.reader.read() == b""


async def test_idle_connections_are_closed_after_their_last_answer(quick: MemoryServer) -> None:
    async with listening(quick) as connect:
        client = await connect()
        for _ in range(2):
            await client.send(HEALTH)
            assert (await client.answer())[0] == 200
        assert await client.is_closed()
        assert len(quick.frontend.connections) == 0


async def test_a_head_that_comes_byte_by_byte_is_cut_off(quick: MemoryServer) -> None:
    async with listening(quick) as connect:
        for kept_alive in (False, True):
            client = await connect()
            if kept_alive:
                await client.send(HEALTH)
                assert (await client.answer())[0] == 200
            for byte in HEALTH[:-2] * 100:
                try:
                    await client.send(bytes([byte]))
                except ConnectionError:
                    break
                if client.reader._buffer:  # type: ignore[attr-defined]
                    break
                await asyncio.sleep(0.02)
            assert await client.error() == (408, "request_timeout")
            assert await client.is_closed()


async def test_a_body_that_comes_too_slowly_is_cut_off(quick: MemoryServer, is_passed: bool) -> None:
    async with listening(quick, is_passed=is_passed) as connect:
        client = await connect()
        await client.send(post(b"{", "Content-Length: 1000"))
        assert await client.error() == (408, "request_timeout")
        assert await client.is_closed()
        assert quick.reader.bodies.num_buffered_bytes == 0


async def test_a_body_is_refused_by_its_declared_length_before_it_is_read(
    patient: MemoryServer, is_passed: bool
) -> None:
    async with listening(patient, is_passed=is_passed) as connect:
        client = await connect()
        await client.send(post(b"", "Content-Length: 100001", "Expect: 100-continue"))
        assert await client.error() == (413, "request_too_large")
        assert await client.is_closed()  # after a while in which nothing more came


async def test_bodies_of_all_requests_have_a_common_limit(patient: MemoryServer, is_passed: bool) -> None:
    async with listening(patient, is_passed=is_passed) as connect:
        clients = [await connect() for _ in range(5)]
        for client in clients[:4]:
            await client.send(post(b" " * 99_000, "Content-Length: 99999"))
        await patient.until(lambda: patient.reader.bodies.num_buffered_bytes == 4 * 99_000)
        await clients[4].send(post(b" " * 50_000))
        assert await clients[4].error() == (503, "overloaded")
        for client in clients[:4]:
            client.close()
        await patient.until(lambda: patient.reader.bodies.num_buffered_bytes == 0)


async def test_idle_connections_make_room_for_new_ones(patient: MemoryServer) -> None:
    async with listening(patient) as connect:
        used = await connect()
        await used.send(HEALTH)
        await used.answer()
        idle = [await connect() for _ in range(PATIENT.max_connections - 1)]
        await patient.until(lambda: len(patient.frontend.connections) == PATIENT.max_connections)
        client = await connect()
        await client.send(HEALTH)
        assert (await client.answer())[0] == 200
        assert await used.is_closed()  # idle for the longest time
        for one in idle[1:]:
            await one.send(HEALTH)
            assert (await one.answer())[0] == 200


async def test_health_answers_when_all_connections_are_busy(patient: MemoryServer, is_passed: bool) -> None:
    patient.gate.close()
    async with listening(patient, is_passed=is_passed) as connect:
        busy = [await connect() for _ in range(PATIENT.max_connections)]
        for client in busy:
            await client.send(post(LONG))
        await patient.until(lambda: patient.service.live.num_live == PATIENT.max_connections)
        client = await connect()
        await client.send(HEALTH)
        assert (await client.answer())[0] == 200
        await client.send(post(LONG))
        assert await client.error() == (503, "too_many_connections")
        assert await client.is_closed()
        for client in busy:
            client.close()
        patient.gate.open()
        await patient.until(lambda: patient.service.live.num_live == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_half_closed_client_gets_its_answer(patient: MemoryServer, is_passed: bool, stream: bool) -> None:
    patient.gate.close()
    async with listening(patient, is_passed=is_passed) as connect:
        client = await connect()
        await client.send(post({**LONG, "stream": stream}))
        client.writer.write_eof()
        await patient.until(lambda: patient.gate.is_held)
        await asyncio.sleep(5 * PATIENT.peer_check_s)
        assert patient.service.live.num_live == 1
        patient.gate.open()
        status, headers, body = await client.answer()
        assert status == 200
        assert body.endswith(b"data: [DONE]\n\n\r\n") if stream else json.loads(body)["choices"]
        assert headers["connection"] == "close"
        assert await client.is_closed()


@pytest.mark.parametrize(("path", "beginning"), [("/v1/completions", b"data: "), ("/api/generate", b"{")])
async def test_a_client_that_is_half_closed_within_a_stream_gets_what_it_can_read(
    patient: MemoryServer, is_passed: bool, path: str, beginning: bytes
) -> None:
    patient.gate.allow(3)
    async with listening(patient, is_passed=is_passed) as connect:
        client = await connect()
        said = {**LONG, "max_tokens": 9} if path.startswith("/v1") else {"options": {"num_predict": 9}, "raw": True}
        await client.send(post({"model": "echo", "prompt": "x", **said, "stream": True}, path=path))
        head = await client.reader.readuntil(beginning)
        await patient.until(lambda: patient.gate.is_held)
        await asyncio.sleep(0.1)  # everything has arrived
        client.writer.write_eof()
        await asyncio.sleep(5 * PATIENT.peer_check_s)
        patient.gate.open()
        chunks = (head.partition(b"\r\n\r\n")[2] + await client.reader.read()).split(b"\r\n")[1::2]
        body = b"".join(chunks)
        if path.startswith("/v1"):
            assert b"\n\n:\n\n" in body  # the comment
            assert body.endswith(b"data: [DONE]\n\n")
        else:
            assert b"\n {" in body  # the space
            assert json.loads(body.splitlines()[-1])["done"]
            assert all(json.loads(line)["model"] == "echo" for line in body.splitlines())


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_closes_its_connection_ends_its_request(
    patient: MemoryServer, is_passed: bool, stream: bool
) -> None:
    patient.gate.close()
    async with listening(patient, is_passed=is_passed) as connect:
        client = await connect()
        await client.send(post({**LONG, "stream": stream}))
        await patient.until(lambda: patient.gate.is_held)
        client.close()
        await patient.until(lambda: patient.service.live.num_live == 0)
        patient.gate.open()
        await patient.until_idle()
        assert patient.service.status.counters["num_tokens"] < 50


async def test_a_client_that_closes_while_its_stream_pauses(patient: MemoryServer, is_passed: bool) -> None:
    patient.gate.allow(3)
    async with listening(patient, is_passed=is_passed) as connect:
        client = await connect()
        await client.send(post({**LONG, "stream": True}))
        await client.reader.readuntil(b"data: ")
        await patient.until(lambda: patient.gate.is_held)
        await asyncio.sleep(0.1)  # everything has arrived: the client's end is no reset
        client.close()
        await patient.until(lambda: patient.service.live.num_live == 0)
        patient.gate.open()


async def test_a_client_that_closes_in_the_middle_of_its_request(patient: MemoryServer, is_passed: bool) -> None:
    async with listening(patient, is_passed=is_passed) as connect:
        for part in (b"", HEALTH[:9], post(LONG)[:-5]):
            client = await connect()
            await client.send(part)
            client.writer.write_eof()
            assert await client.is_closed()


@pytest.mark.parametrize(
    "wrong",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"nonsense\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nno colon\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"CONNECT example.com:443 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        post(b"zz\r\n", "Transfer-Encoding: chunked"),
        post(b"{}", "Content-Length: 2", "Content-Length: 3"),
    ],
)
async def test_what_is_not_http_gets_an_error_in_json(patient: MemoryServer, wrong: bytes) -> None:
    async with listening(patient) as connect:
        client = await connect()
        await client.send(wrong)
        assert await client.error() == (400, "invalid_http")
        assert await client.is_closed()


async def test_a_stream_waits_for_a_client_that_reads_slowly(patient: MemoryServer, is_passed: bool) -> None:
    body = {**LONG, "stream": True, "n": 3, "logprobs": 5}
    async with listening(patient, is_passed=is_passed, buffer_bytes=4096) as connect:
        slow, quick = await connect(), await connect()
        slow.writer.transport.pause_reading()
        await slow.send(post(body))
        await patient.until(lambda: patient.service.status.counters["num_tokens"] >= 3 * 300)
        transports = patient.frontend.connections._open  # pyright: ignore[reportPrivateUsage]
        await patient.until(lambda: any(one.get_write_buffer_size() for one in transports))
        assert sum(one.get_write_buffer_size() for one in transports) < 100_000  # uvloop's limit is 64 KiB
        slow.writer.transport.resume_reading()
        texts: list[str] = []
        for client in (slow, quick):
            if client is quick:
                await client.send(post(body))
            events = (await client.answer())[2].decode().split("\n\n")
            assert events[-2].endswith("data: [DONE]")
            chunks = [json.loads(event.rpartition("data: ")[2]) for event in events[:-2]]
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            texts.append("".join(choice["text"] for choice in choices if choice["index"] == 2))
            assert len(choices) >= 3 * 300
    assert texts[0] == texts[1]


async def test_pipelined_requests_are_answered_in_order(patient: MemoryServer, is_passed: bool) -> None:
    async with listening(patient, is_passed=is_passed) as connect:
        client = await connect()
        await client.send(HEALTH + post({**LONG, "max_tokens": 3}) + b"GET /v1/models HTTP/1.1\r\nHost: [::1]\r\n\r\n")
        client.writer.write_eof()
        bodies = [json.loads((await client.answer())[2]) for _ in range(3)]
        assert [next(iter(body)) for body in bodies] == ["status", "id", "object"]


async def test_every_request_has_an_id_and_a_line_in_the_log(
    patient: MemoryServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "pagewood.server.requests")

    def lines() -> list[tuple[str, str]]:
        found = [(record.levelname, record.getMessage()) for record in caplog.records]
        caplog.clear()
        return found

    async with listening(patient) as connect:
        client = await connect()
        await client.send(post({**LONG, "prompt": "secret words", "max_tokens": 3}, "X-Request-Id: trace-1"))
        assert (await client.answer())[1]["x-request-id"] == "trace-1"
        await client.send(
            post({**LONG, "prompt": ["secret"], "stream": True, "suffix": "x"}, "X-Request-Id: not plain")
        )
        status, headers, _ = await client.answer()
        generated = headers["x-request-id"]
        assert status == 400
        assert len(generated) == 32
        await client.send(b"GET /v1/models/x%0Ay?secret=1 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await client.answer())[0] == 404
        await client.send(HEALTH)
        await client.answer()
        await client.send(b"rubbish\r\n\r\n")
        status, headers, _ = await client.answer()
        unparsed = headers["x-request-id"]
        first, second, third, health, last = lines()
        assert first[0] == "INFO"
        assert first[1].startswith("POST /v1/completions 200 id=trace-1 client=127.0.0.1:")
        assert first[1].endswith(f"tokens_in={len('secret words')} cached=0 tokens_out=3")
        assert f"POST /v1/completions 400 id={generated} " in second[1]
        assert second[1].endswith("error=unsupported_parameter")
        assert third[1].startswith("GET /v1/models/x%0Ay 404 ")
        assert health[0] == "DEBUG"
        assert last[1].startswith(f"- - 400 id={unparsed} ")
        assert last[1].endswith("error=invalid_http")
        assert "secret=" not in third[1]

        patient.gate.allow(3)
        client = await connect()
        await client.send(post({**LONG, "stream": True}, "X-Request-Id: left-early"))
        await client.reader.readuntil(b"\r\n\r\n")
        client.close()
        await patient.until(lambda: patient.service.live.num_live == 0)
        await patient.until(lambda: bool(caplog.records))
        ((level, line),) = lines()
        assert level == "INFO"
        assert line.startswith("POST /v1/completions 200 id=left-early")
        assert line.endswith(" incomplete")
        patient.gate.open()


def test_the_default_number_of_connections_follows_the_limit_of_open_files() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for soft, expected in ((128, 48), (1024, 944), (40, 1)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
            assert default_max_connections() == expected
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[1], 20_000), before[1]))
        assert default_max_connections() == min(before[1] - 80, MOST_CONNECTIONS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
