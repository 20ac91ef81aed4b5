"""Control of what runs and what is kept, over HTTP: pauses of one request or of all, flushes that wait, retention."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine_commands import command_of
from memory_server import MemoryServer
from pagewood.engine.api import (
    Abort,
    Command,
    Flush,
    Pause,
    PauseRequest,
    Refuse,
    ResumeRequest,
    Retain,
    Submit,
)
from pagewood.engine.text import Tokenizer
from pagewood.server.messages import wire
from pagewood.server.protocols.anthropic.fields import parse_messages
from pagewood.server.protocols.anthropic.retention import retain_s
from pagewood.server.stages.tokenizing import TokenizerStage

pytestmark = pytest.mark.anyio

TEXT = "b" * 64
RUNNING = {"text": TEXT, "rid": "mine", "sampling_params": {"max_new_tokens": 20}}


async def post(server: MemoryServer, path: str, body: dict[str, Any]) -> Any:
    response = await server.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def command(server: MemoryServer, path: str, body: dict[str, Any]) -> Any:
    """Send a request to an admin route."""
    response = await server.admin.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def error(server: MemoryServer, path: str, body: dict[str, Any]) -> tuple[int, str]:
    response = await server.admin.post(path, json=body)
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_one_request_is_paused_and_others_go_on(server: MemoryServer, mode: str) -> None:
    server.gate.allow(8)
    running = asyncio.create_task(post(server, "/generate", RUNNING))
    await server.until(lambda: server.gate.is_held)
    assert await command(server, "/pause", {"rid": "mine", "mode": mode}) == {"paused": True, "requests": 1}
    await server.until(lambda: server.has_command_at_gate)
    server.gate.open()
    other = await post(server, "/generate", {**RUNNING, "rid": "other"})
    expected = server.expected_tokens(server.tokenizer.encode(TEXT).tolist(), max_tokens=20)
    assert other["output_ids"] == expected
    await server.until(lambda: server.service.status.counters["num_held"] == 1)
    assert not running.done()
    assert await command(server, "/resume", {"rid": "mine"}) == {"paused": False, "requests": 1}
    assert (await running)["output_ids"] == expected


async def test_a_request_that_does_not_live_cannot_be_paused(server: MemoryServer) -> None:
    assert await error(server, "/pause", {"rid": "none"}) == (404, "request_not_found")
    assert await error(server, "/resume", {"rid": "none"}) == (404, "request_not_found")
    assert await error(server, "/pause", {"rid": "none", "mode": "abort"}) == (400, "invalid_value")


async def test_a_paused_request_whose_client_leaves_is_gone(server: MemoryServer) -> None:
    server.gate.allow(8)
    running = asyncio.create_task(post(server, "/generate", RUNNING))
    await server.until(lambda: server.gate.is_held)
    await command(server, "/pause", {"rid": "mine"})
    await server.until(lambda: server.has_command_at_gate)
    server.gate.open()
    await server.until(lambda: server.service.status.counters["num_held"] == 1)
    assert await post(server, "/abort", {"rid": "mine"}) == {"aborted": 1}
    assert (await running)["meta_info"]["finish_reason"] == {"type": "abort"}
    await server.until(lambda: server.service.status.counters["num_held"] == 0)


async def test_a_pause_can_end_all_requests(server: MemoryServer) -> None:
    server.gate.allow(8)
    running = asyncio.create_task(server.client.post("/generate", json=RUNNING))
    await server.until(lambda: server.gate.is_held)
    pausing = asyncio.create_task(command(server, "/pause", {"mode": "abort"}))
    await server.until(lambda: server.has_command_at_gate)
    server.gate.open()
    assert await pausing == {"paused": True}
    ended: httpx.Response = await running
    assert ended.json()["meta_info"]["finish_reason"] == {"type": "abort"}
    assert await command(server, "/resume", {}) == {"paused": False}
    assert len((await post(server, "/generate", RUNNING))["output_ids"]) == 20


async def test_a_flush_waits_for_an_idle_engine(server: MemoryServer) -> None:
    server.gate.allow(8)
    running = asyncio.create_task(post(server, "/generate", RUNNING))
    await server.until(lambda: server.gate.is_held)
    flushing = asyncio.create_task(command(server, "/flush_cache", {"when": "idle"}))
    await server.until(lambda: server.has_command_at_gate)
    server.gate.open()
    assert len((await running)["output_ids"]) == 20
    assert await flushing == {"flushed_tokens": 80}


@pytest.fixture
async def retaining(model_folder: Path, tokenizer: Tokenizer) -> AsyncGenerator[MemoryServer]:
    """A server that retains up to half of its memory; afterwards it must hold no request."""
    async with MemoryServer(model_folder, tokenizer, limit=64, retained_share=0.5) as server:
        yield server
        await server.until_idle()


async def pressure(server: MemoryServer) -> None:
    """Run requests that together need the memory almost twice."""
    for number in range(8):
        body = {"text": chr(97 + number) + "x" * 350, "sampling_params": {"max_new_tokens": 2}}
        await post(server, "/generate", body)


async def num_cached(server: MemoryServer, text: str) -> int:
    body = {"text": text, "sampling_params": {"max_new_tokens": 1}}
    return (await post(server, "/generate", body))["meta_info"]["cached_tokens"]


async def test_a_text_is_retained_until_it_is_done(retaining: MemoryServer) -> None:
    text = "Keep this. " * 8
    body = {"text": text, "sampling_params": {"max_new_tokens": 8}, "retain": 600}
    await post(retaining, "/generate", body)
    await pressure(retaining)
    assert await num_cached(retaining, text) == 80
    found = await post(retaining, "/retain", {"text": text, "seconds": 60})
    assert found == {"tokens": 80}
    ids = retaining.tokenizer.encode(text).tolist()
    answer = await post(
        retaining, "/generate", {"input_ids": ids, "retain": 0, "sampling_params": {"max_new_tokens": 8}}
    )
    assert answer["meta_info"]["cached_tokens"] == 80
    await retaining.until(lambda: retaining.service.status.counters["num_retained_pages"] == 0)
    assert await num_cached(retaining, text) == 0


async def test_a_conversation_in_messages_is_retained_for_the_time_of_its_cache_control(
    retaining: MemoryServer,
) -> None:
    body = {
        "model": "echo",
        "max_tokens": 4,
        "system": [{"type": "text", "text": "Rules. " * 8, "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        "messages": [{"role": "user", "content": "Hi"}],
    }
    await post(retaining, "/v1/messages", body)
    await pressure(retaining)
    usage = (await post(retaining, "/v1/messages", body))["usage"]
    assert usage["cache_read_input_tokens"] >= 64
    body["system"] = "Other rules. " * 8
    await post(retaining, "/v1/messages", body)
    await pressure(retaining)
    assert (await post(retaining, "/v1/messages", body))["usage"]["cache_read_input_tokens"] < 32


async def test_a_response_is_retained_if_its_client_asks_or_it_continues_another(retaining: MemoryServer) -> None:
    async def cached(**fields: Any) -> int:
        body = {"model": "echo", "max_output_tokens": 4, "input": "Go on. " * 12, **fields}
        first = await post(retaining, "/v1/responses", body)
        await pressure(retaining)
        again = await post(retaining, "/v1/responses", body | {"previous_response_id": first["id"], "input": "More"})
        return again["usage"]["input_tokens_details"]["cached_tokens"]

    assert await cached() < 32
    assert await cached(prompt_cache_retention="24h") >= 80
    first = await post(retaining, "/v1/responses", {"model": "echo", "max_output_tokens": 4, "input": "First. " * 12})
    assert await cached(previous_response_id=first["id"], input="Second. " * 5) >= 80


async def test_wrong_fields_of_retention(server: MemoryServer) -> None:
    assert (await error(server, "/retain", {"text": "a", "seconds": 5}))[1] == "no_retention"
    assert (await error(server, "/retain", {"seconds": 5}))[1] == "missing_required_parameter"
    assert (await error(server, "/retain", {"text": "a", "input_ids": [1], "seconds": 5}))[1] == "invalid_value"
    for seconds in (-1, 1e9, "5", None):
        assert (await error(server, "/retain", {"text": "a", "seconds": seconds}))[0] == 400
        if seconds is not None:
            assert (await error(server, "/generate", {"text": "a", "retain": seconds}))[0] == 400
    assert await post(server, "/retain", {"messages": [{"role": "user", "content": "Hi"}], "seconds": 0}) == {
        "tokens": 0
    }
    assert (await error(server, "/flush_cache", {"when": "later"}))[0] == 400


class Outbox:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.commands: list[object] = []

    def send(self, frame: bytes) -> None:
        self.commands.append(command_of(wire.engine_commands.decode(frame)))


def test_a_pause_does_not_overtake_a_prompt_that_is_not_tokenized_yet(tokenizer: Tokenizer) -> None:
    outbox = Outbox()
    stage = TokenizerStage(tokenizer, outbox)
    for name in ("a", "b", "c"):
        generate = wire.Generate(request_id=name, prompt=wire.TextPrompt(text="Hi"))
        stage.take(generate, num_bytes=9)
    stage.take(PauseRequest(request_id="a"), num_bytes=9)
    stage.take(PauseRequest(request_id="b", retract=True), num_bytes=9)
    stage.take(ResumeRequest(request_id="b"), num_bytes=9)
    stage.take(PauseRequest(request_id="c", retract=True), num_bytes=9)
    stage.take(Abort(request_id="c"), num_bytes=9)
    assert not outbox.commands
    for _ in range(3):
        stage.tokenize_one()
    stage.take(PauseRequest(request_id="a", retract=True), num_bytes=9)
    assert [type(command) for command in outbox.commands] == [
        Submit, PauseRequest, Submit, ResumeRequest, Refuse, PauseRequest, PauseRequest
    ]  # fmt: skip
    assert outbox.commands[-1] == PauseRequest(request_id="a", retract=True)


@pytest.mark.parametrize(
    "command",
    [
        PauseRequest(request_id="a", retract=True),
        ResumeRequest(request_id="a"),
        Retain(request_id="a", tokens=b"\x01\x00\x00\x00", seconds=2.5, namespace="n"),
        Flush(request_id="a", when_idle=True),
        Pause(request_id="a", abort=True),
        Submit(request_id="a", tokens=b"", retain_s=3.0),
    ],
)
def test_commands_travel_as_they_are(command: Command) -> None:
    (found,) = wire.read(wire.engine_commands, [wire.encode(command)])
    assert command_of(found) == command


def test_a_retention_out_of_range_is_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    retain = {"request_id": "a", "tokens": b"", "seconds": -1.0}
    assert list(wire.read(wire.engine_commands, [wire.encode({"type": "retain", **retain})])) == []


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"cache_control": {"type": "ephemeral"}}, 300.0),
        ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, 3600.0),
        ({"cache_control": {"ttl": ["odd"]}}, 300.0),
        ({"cache_control": "odd"}, None),
        ({"tools": [{"name": "f", "input_schema": {}, "cache_control": {"ttl": "5m"}}]}, 300.0),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"ttl": "1h"}}]},
                    {"role": "assistant", "content": [{"type": "thinking", "thinking": "b", "signature": "s"}]},
                    {"role": "user", "content": [{"type": "text", "text": "c", "cache_control": {"ttl": "5m"}}]},
                ]
            },
            3600.0,
        ),
    ],
)
def test_the_longest_time_of_the_marks_counts(fields: dict[str, Any], expected: float | None) -> None:
    body = {"model": "echo", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}], **fields}
    assert retain_s(parse_messages(json.dumps(body).encode())) == expected
