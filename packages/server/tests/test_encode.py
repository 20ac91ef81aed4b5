"""`Service.encode`: the ids of a prompt come from a tokenizer, and the engine computes nothing for them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from memory_server import MAX_LENGTH, MemoryServer
from pagewood.server.http.errors import ApiError, unavailable
from pagewood.server.messages import wire

pytestmark = pytest.mark.anyio


async def test_ids_are_those_that_the_engine_would_compute(server: MemoryServer) -> None:
    prompt = wire.ChatPrompt(messages=({"role": "user", "content": "Count me"},))
    ids = await server.service.encode(prompt, prompt_param="messages")
    assert server.tokenizer.decode(ids, skip_special_tokens=False) == server.tokenizer.render_chat(prompt.messages)
    body = {"messages": list(prompt.messages), "max_tokens": 1}
    reply = (await server.post("/v1/chat/completions", body)).json()
    assert len(ids) == reply["usage"]["prompt_tokens"]


async def test_long_and_many_prompts_take_the_same_path(server: MemoryServer) -> None:
    texts = ["", "x", "y" * (3 * MAX_LENGTH), "z" * 70_000]  # longer than the model accepts; in another lane
    found = await asyncio.gather(
        *[server.service.encode(wire.TextPrompt(text=text), prompt_param="prompt") for text in texts]
    )
    assert [len(ids) for ids in found] == [len(text) for text in texts]
    assert all(ids.dtype == np.int32 for ids in found)
    await server.until_idle()
    assert server.service.status.counters["num_cached_pages"] == 0  # nothing was computed


async def test_refusals_name_the_clients_field(server: MemoryServer) -> None:
    prompt = wire.ChatPrompt(messages=({"role": "user", "content": "refuse me"},))
    with pytest.raises(ApiError, match="I refuse") as caught:
        await server.service.encode(prompt, prompt_param="messages")
    assert b'"param":"messages"' in caught.value.body()


async def test_a_lost_process_fails_the_request(server: MemoryServer) -> None:
    server.gate.close()
    running = asyncio.create_task(server.post("/v1/completions", {"prompt": "hold the engine", "max_tokens": 1}))
    await server.until(lambda: server.gate.is_held)
    waiting = asyncio.create_task(server.service.encode(wire.TextPrompt(text="x"), prompt_param="prompt"))
    await server.until(lambda: server.has_command_at_gate)
    assert server.service.live.num_live == 2
    server.service.live.fail_all(unavailable("The engine process died.", code="engine_lost"))
    with pytest.raises(ApiError, match="died"):
        await waiting
    server.gate.open()
    assert (await running).status_code == 503


async def test_a_caller_that_leaves_ends_the_request(server: MemoryServer) -> None:
    server.gate.close()
    running = asyncio.create_task(server.post("/v1/completions", {"prompt": "hold the engine", "max_tokens": 1}))
    await server.until(lambda: server.gate.is_held)
    waiting = asyncio.create_task(server.service.encode(wire.TextPrompt(text="x"), prompt_param="prompt"))
    await server.until(lambda: server.has_command_at_gate)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (server.service.live.num_live, server.service.live.num_ending) == (1, 1)
    server.gate.open()
    assert (await running).status_code == 200
    await server.until_idle()
