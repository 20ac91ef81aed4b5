"""Overload, clients that leave, and an engine that is dead or busy."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from leaving_client import Client
from memory_server import NUM_ROWS, MemoryServer
from pagewood.engine.text import Tokenizer
from pagewood.server.http.errors import unavailable
from pagewood.server.http.field_limits import MAX_ID_LENGTH
from pagewood.server.requests.status import EngineState, EngineStatus

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
LONG = {"model": "echo", "messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request(server: MemoryServer, stream: bool) -> None:
    server.gate.allow(5)  # then the engine waits, so that the request cannot end by itself
    client = Client(server, {**LONG, "stream": stream})
    await server.until(lambda: server.gate.is_held)
    await client.leave()
    assert server.service.live.num_live == 0
    assert server.service.live.num_ending == 1
    await server.until(lambda: server.has_command_at_gate)
    server.gate.open()
    await server.until_idle()
    assert server.engine_status.counters["num_tokens"] < 50


async def test_a_client_that_leaves_before_the_engine_has_begun(server: MemoryServer) -> None:
    server.gate.close()
    client = Client(server, LONG)
    await server.until(lambda: server.service.live.num_live == 1)
    await client.leave()
    server.gate.open()


async def test_text_comes_before_the_end(server: MemoryServer) -> None:
    server.gate.allow(5)
    client = Client(server, {**LONG, "stream": True})
    num_chunks = 0
    async for message in client.messages():
        num_chunks += message["type"] == "http.response.body"
        if num_chunks == 3:
            break
    assert server.service.live.num_live == 1
    server.gate.open()
    async for _ in client.messages():
        pass


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "echo", "prompt": "a"}),
        ("/v1/chat/completions", {"model": "echo", "messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"model": "echo", "input": "a"}),
        ("/v1/messages", {"model": "echo", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}),
        ("/api/generate", {"model": "echo", "prompt": "a"}),
        ("/generate", {"text": "a"}),
    ],
)
async def test_a_name_that_is_too_long_to_be_looked_up_is_refused(
    server: MemoryServer, path: str, body: dict[str, Any]
) -> None:
    response = await server.client.post(path, json=body, headers={"X-Client-Request-Id": "n" * (MAX_ID_LENGTH + 1)})
    assert response.status_code == 400
    assert "'X-Client-Request-Id' must have at most 512 characters, but got 513." in response.text


async def test_a_queued_request_can_be_moved_to_the_front(server: MemoryServer) -> None:
    ended: list[str] = []

    async def complete(name: str, max_tokens: int) -> None:
        body = {"model": "echo", "prompt": name, "max_tokens": max_tokens, "ignore_eos": True}
        response = await server.client.post("/v1/completions", json=body, headers={"X-Client-Request-Id": name})
        assert response.status_code == 200
        ended.append(name)

    server.gate.close()
    running = [asyncio.create_task(complete("running 0", 5))]
    await server.until(lambda: server.gate.is_held)
    running += [asyncio.create_task(complete(f"running {n}", 5 + 10 * n)) for n in range(1, NUM_ROWS)]
    waiting = [asyncio.create_task(complete(name, 1)) for name in ("first", "second", "third/3")]
    await server.until(lambda: server.num_queued_commands == NUM_ROWS - 1 + 3)  # all are tokenized
    response = await server.client.post("/v1/requests/third/3/priority", json={"priority": 5})
    assert (response.status_code, response.json()) == (200, {"id": "third/3", "object": "request", "priority": 5})
    await server.until(lambda: server.num_queued_commands == NUM_ROWS - 1 + 3 + 1)
    server.gate.open()
    await asyncio.gather(*running, *waiting)
    assert [name for name in ended if not name.startswith("running")] == ["third/3", "first", "second"]


async def test_a_streaming_request_is_known_by_the_id_of_its_chunks_until_it_ends(server: MemoryServer) -> None:
    server.gate.allow(3)
    client = Client(server, {**LONG, "stream": True})
    path = ""
    async for message in client.messages():
        if message["type"] == "http.response.body":
            first = message["body"].split(b"\n\n")[0].removeprefix(b"data: ")
            path = f"/v1/requests/{json.loads(first)['id']}/priority"
            break
    assert (await server.client.post(path, json={"priority": -1})).status_code == 200
    server.gate.open()
    async for _ in client.messages():
        pass
    await client.served
    response = await server.client.post(path, json={"priority": -1})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "request_not_found"


async def test_too_many_requests_get_a_429(model_folder: Path, tokenizer: Tokenizer) -> None:
    server = MemoryServer(model_folder, tokenizer, limit=3)
    await server.start()
    server.gate.close()
    clients = [Client(server, LONG) for _ in range(3)]
    await server.until(lambda: server.service.live.num_live == 3)
    response = await server.post(CHAT, LONG)
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["code"] == "overloaded"
    await clients[0].leave()  # it counts until the engine has ended it
    assert (await server.post(CHAT, LONG)).status_code == 429
    server.gate.open()
    await server.until(lambda: server.service.live.num_ending == 0)
    assert (await server.post(CHAT, {**LONG, "max_tokens": 3})).status_code == 200
    for client in clients[1:]:
        await client.leave()
    # Several prompts of one request are accepted together or not at all.
    server.gate.close()
    clients = [Client(server, LONG)]
    await server.until(lambda: server.service.live.num_live == 1)
    assert (await server.post("/v1/completions", {"prompt": ["a", "b", "c"], "max_tokens": 1})).status_code == 429
    server.gate.open()
    await clients[0].leave()
    # A retry would not help: an empty server could not hold this request.
    response = await server.post("/v1/completions", {"prompt": ["a", "b", "c", "d"], "max_tokens": 1})
    assert response.status_code == 400
    assert "retry-after" not in response.headers
    assert response.json()["error"]["param"] == "prompt"
    assert "at most 3 prompts" in response.json()["error"]["message"]
    await server.until_idle()
    await server.stop()


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_fail_with_their_engine(server: MemoryServer, stream: bool) -> None:
    server.gate.allow(5)
    client = Client(server, {**LONG, "stream": stream})
    if stream:
        async for message in client.messages():
            if message["type"] == "http.response.body":
                break
    await server.until(lambda: server.gate.is_held)
    server.engine_status.lost(next_incarnation=1)
    server.service.live.fail_all(unavailable("The engine process died.", code="engine_lost"))
    messages = [message async for message in client.messages()]
    body = b"".join(message.get("body", b"") for message in messages)
    if stream:  # the status is sent already: the error is the last event, and there is no [DONE]
        *_, last, nothing = body.decode().split("\n\n")
        assert nothing == ""
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_lost"
    else:
        assert messages[0]["status"] == 503
        assert json.loads(body)["error"]["code"] == "engine_lost"
    refused = await server.post(CHAT, LONG)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "not_ready"
    assert "retry-after" in refused.headers
    ready = await server.client.get("/ready")
    assert ready.status_code == 503
    assert ready.json()["status"] == "down"
    assert (await server.client.get("/health")).status_code == 200
    server.gate.open()
    server.engine_status.incarnation = (
        0  # the engine of this test never died: accept its messages again, for the clean-up
    )
    await server.until(lambda: bool(server.engine_status.counters))


async def test_a_long_step_closes_the_api_only_beyond_a_generous_limit(
    model_folder: Path, tokenizer: Tokenizer
) -> None:
    status = EngineStatus(silent_limit_s=0.5)
    server = MemoryServer(model_folder, tokenizer, limit=8, status=status, pulse_interval_s=0.02)
    await server.start()
    server.gate.close()
    first = Client(server, {**LONG, "max_tokens": 3})
    await server.until(lambda: server.gate.is_held)  # the engine's thread is in a step
    await server.until(lambda: status.step_s > 2 * status.silent_limit_s)
    await server.until(lambda: status.state is EngineState.READY)  # at once, unless this process stood still
    status.silent_limit_s = 60.0  # not ours
    assert (await server.client.get("/ready")).json()["seconds_in_step"] >= 1  # rounded
    second = Client(server, {**LONG, "max_tokens": 3})
    await server.until(lambda: server.service.live.num_live == 2)
    status.step_limit_s = status.step_s  # not ours
    await server.until(lambda: status.state is EngineState.STALLED)
    assert (await server.post(CHAT, LONG)).status_code == 503
    server.gate.open()
    for client in (first, second):
        messages = [message async for message in client.messages()]
        assert messages[0]["status"] == 200
    await server.until(lambda: status.state is EngineState.READY)
    await server.until_idle()
    await server.stop()
