"""Requests with `Upgrade` are ordinary requests: one request gets one answer, whatever its body holds."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from memory_server import MemoryServer
from raw_http import HEALTH, Socket, listening, post
from scripted import listening as listening_url

pytestmark = pytest.mark.anyio

INNER = b'{"model": "echo", "prompt": "x", "max_tokens": 1}'
HIDDEN = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b"
) % (len(INNER), INNER)
"""A whole request, which the tests send as the body of another one."""
MARK = b"GET /the-end HTTP/1.1\r\nHost: localhost\r\n\r\n"
TOKENS = ["foo", "websocket", "h2c", "TLS/1.0, HTTP/2.0", "h2c\r\nUpgrade: websocket", ""]


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The event loop of the server."""
    return "asyncio", {"use_uvloop": True}


def upgrade(token: str, *, connection: str = "Upgrade") -> list[str]:
    return [f"Connection: {connection}", f"Upgrade: {token}"]


def head(method: str, path: str, *headers: str, version: str = "1.1") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/{version}", "Host: localhost", *headers, "", ""]).encode()


async def until_the_end(client: Socket) -> list[tuple[int, str]]:
    """Return status and code of each answer before that to `MARK`."""
    found: list[tuple[int, str]] = []
    while not found or found[-1] != (404, "unknown_path"):
        status, _, body = await client.answer()
        error = json.loads(body).get("error")
        found.append((status, error["code"] if error else ""))
    return found[:-1]


@pytest.mark.parametrize("pieces", ["one", "head and body", "bytes"])
@pytest.mark.parametrize("token", TOKENS)
async def test_the_body_is_read_and_never_a_request_of_its_own(server: MemoryServer, token: str, pieces: str) -> None:
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(INNER), INNER)
    sent = [
        post(HIDDEN, *upgrade(token)),
        post(INNER, *upgrade(token, connection="keep-alive, Upgrade, HTTP2-Settings"), "HTTP2-Settings: AAMAAABk"),
        post(chunked, *upgrade(token), "Transfer-Encoding: chunked"),
        head("GET", "/health", *upgrade(token)),
        head("GET", "/health", *upgrade(token), f"Content-Length: {len(HIDDEN)}") + HIDDEN,
        head("PUT", "/health", *upgrade(token), f"Content-Length: {len(HIDDEN)}") + HIDDEN,
        head("OPTIONS", "/health", *upgrade(token), f"Content-Length: {len(HIDDEN)}") + HIDDEN,
        head("DELETE", "/health", *upgrade(token), "Transfer-Encoding: chunked") + b"%x\r\n%b\r\n0\r\n\r\n"
        % (len(HIDDEN), HIDDEN),
    ]  # fmt: skip
    async with listening(server) as connect:
        client = await connect()
        for request in sent:
            match pieces:
                case "one":
                    await client.send(request)
                case "head and body":
                    before, _, body = request.partition(b"\r\n\r\n")
                    await client.send(before + b"\r\n\r\n")
                    await asyncio.sleep(0.02)  # so that the head comes in a segment of its own
                    await client.send(body)
                case _:
                    for at in range(len(request)):
                        await client.send(request[at : at + 1])
        await client.send(MARK)
        found = await until_the_end(client)
        refused = (405, "method_not_allowed")
        assert found == [(400, "invalid_json"), *[(200, "")] * 4, *[refused] * 3]


async def test_pipelined_requests_are_answered_after_one_with_upgrade(server: MemoryServer) -> None:
    async with listening(server) as connect:
        client = await connect()
        many = [post(INNER, *upgrade("h2c")), head("GET", "/health", *upgrade("foo")), HEALTH, post(HIDDEN)] * 20
        await client.send(b"".join(many) + MARK)
        assert await until_the_end(client) == [(200, ""), (200, ""), (200, ""), (400, "invalid_json")] * 20


async def test_http_1_0_and_requests_that_close(server: MemoryServer) -> None:
    async with listening(server) as connect:
        for request in (
            head("GET", "/health", *upgrade("foo"), version="1.0") + MARK,
            head("GET", "/health", *upgrade("foo", connection="close, Upgrade")) + MARK,
        ):
            client = await connect()
            await client.send(request)
            assert (await client.answer())[0] == 200
            assert await client.reader.read() == b""


async def test_a_head_with_upgrade_has_the_same_limits_and_headers(server: MemoryServer) -> None:
    async with listening(server) as connect:
        client = await connect()
        await client.send(head("GET", "/health?a=%20b", *upgrade("foo"), "X-Request-Id: mine"))
        status, headers, _ = await client.answer()
        assert (status, headers["x-request-id"]) == (200, "mine")
        await client.send(head("GET", "/health", *upgrade("foo"), "X-Long: " + "x" * 70_000))
        assert await client.error() == (431, "headers_too_large")
        client = await connect()
        await client.send(head("GET", "/health", *upgrade("foo"), "X-Folded: a\r\n  b"))
        assert await client.error() == (400, "invalid_http")


async def test_connect_is_refused_and_what_follows_is_dropped(server: MemoryServer) -> None:
    async with listening(server) as connect:
        for target in ("localhost:80", "/", "localhost"):
            client = await connect()
            await client.send(
                f"CONNECT {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\n".encode() + HEALTH
            )
            assert await client.error() == (400, "invalid_http")
            assert await client.reader.read() == b""


async def test_fields_of_a_trailer_are_no_headers(server: MemoryServer) -> None:
    chunked = b"%x\r\n%b\r\n0\r\nHost: evil.example\r\nConnection: Upgrade\r\nUpgrade: foo\r\n\r\n" % (
        len(INNER),
        INNER,
    )
    async with listening(server) as connect:
        client = await connect()
        request = post(chunked, "Transfer-Encoding: chunked")
        await client.send(request * 3 + MARK)  # the second waits for the first, and its trailer is there already
        assert await until_the_end(client) == [(200, "")] * 3


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
async def test_curl_that_offers_http_2(server: MemoryServer, tmp_path: Path) -> None:
    (tmp_path / "body").write_bytes(INNER)
    post_options = ["-H", "Content-Type: application/json", "-d", f"@{tmp_path / 'body'}"]
    async with listening_url(server) as url:
        for path, options in (("/health", []), ("/v1/completions", post_options)):
            command = ["curl", "--http2", "-sS", "--max-time", "30", "-w", " %{http_code}", *options, url + path]
            found = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
            assert found.stdout.endswith(" 200"), found
