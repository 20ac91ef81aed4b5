"""Damaged requests and messages: each is answered or refused, none ends a stage, and the server goes on as before.

`PAGEWOOD_FUZZ_SEED` moves the seeds. The slow runs draw many more cases.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from memory_server import MemoryServer
from mutation import damaged_bytes, damaged_json
from pagewood.engine.api import (
    Abort,
    Delta,
    FinishReason,
    Grammar,
    Pause,
    RequestOptions,
    SamplingParams,
    SetPriority,
    Submit,
)
from pagewood.engine.text import Tokenizer
from pagewood.server.http.http_server import http_server
from pagewood.server.http.limits import HttpLimits
from pagewood.server.http.listening import bind
from pagewood.server.keys.gate import KeyGate
from pagewood.server.keys.key import ApiKey, digest_of
from pagewood.server.messages import wire
from pagewood.server.stages.tokenizing import commands

SEED = int(os.environ.get("PAGEWOOD_FUZZ_SEED", "0"))
LONGEST_S = 10.0
"""Of one case, on a busy machine."""
MOST_BYTES = 1 << 29
"""Growth of the process over all cases of a test."""
KEY = "sk-0123456789-fuzz"
QUICK = HttpLimits(max_body_bytes=100_000, head_timeout_s=0.3, body_timeout_s=0.3, keep_alive_s=1, linger_s=0.3)
many = pytest.mark.parametrize("factor", [1, pytest.param(40, marks=pytest.mark.slow)], ids=["few", "many"])

_SAMPLING = SamplingParams(max_tokens=5, temperature=0.5, grammar=Grammar.regex("[a-z]+"), logprobs=3)
_OPTIONS, _READING = RequestOptions(sampling=_SAMPLING), wire.Reading(binds="auto")
_CHAT = wire.ChatPrompt(messages=({"role": "user", "content": "Hi"},), tools=({"type": "function"},))
MESSAGES: list[tuple[msgspec.msgpack.Decoder[Any], list[Any]]] = [
    (
        wire.to_tokenizer,
        [
            wire.Generate(request_id="a", prompt=_CHAT, options=_OPTIONS, text=wire.TextOptions(reading=_READING)),
            wire.Generate(request_id="a", prompt=wire.TextPrompt(text="Hi"), options=_OPTIONS, bad_words=("no",)),
            wire.Encode(request_id="a", prompt=wire.TokenPrompt(tokens=b"\1\0\0\0\2\0\0\0"), shows_text=True),
            Abort(request_id="a"),
            SetPriority(request_id="a", priority=3),
            Pause(request_id="a", retract=True),
        ],
    ),
    (wire.engine_commands, [Submit(request_id="a", tokens=b"\1\0\0\0", sampling=_SAMPLING)]),
    (
        wire.from_engine,
        [
            wire.Step((Delta(request_id="a", tokens=(1, 2), finish=FinishReason.STOP, first=True, carry=b"x"),)),
            wire.Loading(incarnation=1, what="x", done=1, total=2),
        ],
    ),
    (wire.to_http, [wire.Answers((wire.Answer("a", "t", FinishReason.LENGTH, True, None, 1, 0, 1),))]),
    (
        wire.carried,
        [
            wire.TextOptions(stop=("x",), prefix="y", prompt_tokens=b"\1\0\0\0"),
            wire.Encoded(tokens=b"\1\0\0\0", text="y", pieces=(b"y",)),
        ],
    ),
]  # fmt: skip
HUGE = tuple(kind + b"\xff\xff\xff\xff\1" for kind in (b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"))
"""Arrays, maps, bytes, texts and extensions that claim four thousand million members."""


@many
def test_messages_between_processes(tokenizer: Tokenizer, factor: int) -> None:
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    num_read = 0
    for number in range(600 * factor):
        rng = random.Random(SEED * 1_000_003 + number)
        decoder, messages = rng.choice(MESSAGES)
        frame = wire.encode(rng.choice(messages))
        match rng.randrange(3):
            case 0:
                frame = damaged_bytes(rng, frame)
            case 1:
                frame = rng.choice((*HUGE, rng.randbytes(rng.randrange(60)), frame + rng.choice(HUGE)))
            case _:
                with suppress(UnicodeEncodeError, OverflowError):
                    frame = wire.encode(damaged_json(rng, msgspec.msgpack.decode(frame)))
        start_s = time.monotonic()
        if decoder is wire.carried:  # the detokenizer decodes it where one failure is one request's
            with suppress(msgspec.DecodeError, UnicodeDecodeError):
                decoder.decode(frame)
            continue
        for message in wire.read(decoder, [frame]):
            num_read += 1
            if isinstance(message, wire.WithPrompt):
                ids = [message.request_id, *getattr(message, "sibling_ids", ())]
                assert [command.request_id for command in commands(tokenizer, message)] == ids
        assert time.monotonic() - start_s < LONGEST_S
    assert num_read > 10
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) * 1024 < MOST_BYTES


@pytest.fixture
async def server(model_folder: Path, tokenizer: Tokenizer) -> AsyncGenerator[MemoryServer]:
    """A server with a key, which must be idle afterwards."""
    gate = KeyGate([ApiKey(digest=digest_of(KEY), admin=True)])
    server = MemoryServer(model_folder, tokenizer, limit=64, limits=QUICK, grammars=True, gate=gate)
    await server.start()
    yield server
    await server.until_idle()
    await server.stop()


@pytest.mark.anyio
@many
async def test_bodies(server: MemoryServer, factor: int) -> None:
    """Whatever a body holds, the answer is no 5xx, and it comes."""
    examples = [one for one in server.frontend.all_operations() if one.example is not None and one.name != "Pause"]
    for number in range(120 * factor):
        rng = random.Random(SEED * 1_000_003 + number)
        one = rng.choice(examples)
        value = dict(one.example or {})
        body = json.dumps(damaged_json(rng, value)).encode()
        if rng.random() < 0.2:
            body = damaged_bytes(rng, body)
        headers = {"x-api-key": KEY, "content-type": "application/json"}
        request = server.client.post(one.path.replace("{name}", "x"), content=body, headers=headers)
        response = await asyncio.wait_for(request, LONGEST_S)
        assert response.status_code < 500, (number, one.path, body[:500], response.text)


@pytest.mark.anyio
@many
async def test_bytes_of_http(server: MemoryServer, factor: int) -> None:
    """Whatever comes over a connection, it is answered or closed in time, and others are served as before."""
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    body = json.dumps({"model": "echo", "prompt": "Hello", "max_tokens": 3}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: memory\r\nContent-Type: application/json\r\nX-Api-Key: %b\r\n"
    requests = [
        head % KEY.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(body), body),
        head % KEY.encode() + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body),
        b"GET /v1/models HTTP/1.1\r\nHost: memory\r\nAuthorization: Bearer %b\r\n\r\n" % KEY.encode() * 3,
        b"GET /health HTTP/1.0\r\n\r\n",
    ]
    socket = bind("127.0.0.1", 0)
    http = http_server(server.frontend.site(), stop_grace_s=4)
    serving = asyncio.create_task(http.serve(sockets=[socket]))
    await server.until(lambda: http.started)

    async def send(data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(*socket.getsockname())
        try:
            with suppress(ConnectionError):
                writer.write(data)
                writer.write_eof()
                return await asyncio.wait_for(reader.read(), LONGEST_S)
            return b""
        finally:
            writer.close()

    async def case(number: int) -> None:
        rng = random.Random(SEED * 1_000_003 + number)
        sent = damaged_bytes(rng, rng.choice(requests))
        answer = await send(sent)
        assert b"HTTP/1.1 500" not in answer, (number, sent)
        # A damaged request never gets what only a key opens.
        assert KEY.encode() in sent or b"HTTP/1.1 200" not in answer or b"/health" in sent, (number, sent)

    try:
        good = (await send(requests[0])).rpartition(b'"choices"')[2]
        assert good
        for first in range(0, 80 * factor, 20):
            await asyncio.gather(*[case(number) for number in range(first, first + 20)])
        assert (await send(requests[0])).rpartition(b'"choices"')[2] == good
    finally:
        http.should_exit = True  # not ours
        await serving
        socket.close()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) * 1024 < MOST_BYTES
