"""Compressed bodies: gzip and zstd in every protocol, within the limits of bodies; others are refused by name."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from backports import zstd
from starlette.datastructures import Headers

from memory_server import MemoryServer
from pagewood.server.http import bodies
from pagewood.server.http.content_coding import MAX_MEMBERS, PIECE_BYTES, Decoder, coding_of, decoded
from pagewood.server.http.errors import ApiError

pytestmark = pytest.mark.anyio

USER: dict[str, Any] = {"model": "echo", "messages": [{"role": "user", "content": "Hi"}]}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**USER, "max_tokens": 2},
    "/v1/completions": {"model": "echo", "prompt": "Hi", "max_tokens": 2},
    "/v1/responses": {"model": "echo", "input": "Hi", "max_output_tokens": 2},
    "/v1/messages": {**USER, "max_tokens": 2},
    "/api/chat": {**USER, "stream": False, "options": {"num_predict": 2}},
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 2}},
    "/v1/embeddings": {"model": "echo", "input": "Hi"},
}
WIDE: dict[int, int] = {zstd.CompressionParameter.window_log: 24}
ENCODE = {"gzip": gzip.compress, "x-gzip": gzip.compress, "GZip": gzip.compress, "zstd": zstd.compress}


def headers(coding: str) -> dict[str, str]:
    return {"content-type": "application/json", "content-encoding": coding}


def content(data: bytes, coding: str) -> bytes:
    make = coding_of(Headers({"content-encoding": coding}))
    assert make is not None
    pieces = list(decoded(data, make))
    assert max(map(len, pieces), default=0) <= PIECE_BYTES
    return b"".join(pieces)


@pytest.mark.parametrize("path", REQUESTS)
async def test_every_protocol_takes_gzip_and_zstd_and_names_what_it_does_not_take(
    server: MemoryServer, path: str
) -> None:
    plain = json.dumps(REQUESTS[path]).encode()
    for coding, encode in ENCODE.items():
        response = await server.client.post(path, content=encode(plain), headers=headers(coding))
        assert response.status_code == 200, (coding, response.text)
    assert (await server.client.post(path, content=plain, headers=headers("identity"))).status_code == 200
    for coding in ("br", "deflate", "compress", "gzip, gzip", "gzip, br", "nonsense"):
        response = await server.client.post(path, content=plain, headers=headers(coding))
        assert (response.status_code, response.headers["accept-encoding"]) == (415, "gzip, zstd")
        assert f"'{coding}'" in response.text
    for coding in ("gzip", "zstd"):
        response = await server.client.post(path, content=plain, headers=headers(coding))
        assert response.status_code == 400
        assert "Content-Encoding" in response.text
    assert server.reader.bodies.num_buffered_bytes == 0


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
async def test_a_bomb_ends_at_the_limit(server: MemoryServer, monkeypatch: pytest.MonkeyPatch, coding: str) -> None:
    limit = 100_000
    body = json.dumps({"model": "echo", "prompt": "x", "max_tokens": 1}).encode()
    fits, exceeds = body.ljust(limit), body.ljust(limit + 1)
    bomb = ENCODE[coding](bytes(50 * limit))
    assert len(bomb) < limit
    for sent, status in ((fits, 200), (exceeds, 413)):
        response = await server.client.post("/v1/completions", content=ENCODE[coding](sent), headers=headers(coding))
        assert response.status_code == status, response.text
    num_pieces = 0

    def counted(body: bytes, make: Callable[[], Decoder]) -> Iterator[bytes]:
        nonlocal num_pieces
        for piece in decoded(body, make):
            num_pieces += 1
            yield piece

    monkeypatch.setattr(bodies, "decoded", counted)
    response = await server.client.post("/v1/completions", content=bomb, headers=headers(coding))
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
    assert num_pieces * PIECE_BYTES < limit + 2 * PIECE_BYTES
    assert server.reader.bodies.num_buffered_bytes == 0


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_members_follow_each_other_and_nothing_else_follows(coding: str) -> None:
    encode = ENCODE[coding]
    long = bytes(range(256)) * 3000
    assert content(encode(long), coding) == long
    assert content(encode(b"a") + encode(b"") + encode(long) + encode(b"b"), coding) == b"a" + long + b"b"
    assert content(b"", coding) == b""
    assert content(encode(b"") * MAX_MEMBERS, coding) == b""
    whole = encode(long)
    damaged = [whole[:end] for end in (1, 5, 20, len(whole) // 2, len(whole) - 1)]
    damaged += [whole + b"x", whole + b"\0" * 20, b"x" + whole, encode(b"") * (MAX_MEMBERS + 1)]
    for data in damaged:
        with pytest.raises(ApiError) as raised:
            content(data, coding)
        assert (raised.value.status, raised.value.code) == (400, "invalid_content_encoding")


def test_checksums_and_windows() -> None:
    broken = bytearray(gzip.compress(b"abc" * 100))
    broken[-6] ^= 1
    wide = zstd.compress(bytes(range(256)) * 100_000, options=WIDE)
    for data, coding in ((bytes(broken), "gzip"), (zlib.compress(b"abc"), "gzip"), (wide, "zstd")):
        with pytest.raises(ApiError, match="could not decode"):
            content(data, coding)
