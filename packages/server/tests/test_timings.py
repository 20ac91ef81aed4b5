"""`return_timings` of OpenAI's endpoints, and `explain` of /generate: when the engine did what."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from memory_server import MemoryServer

pytestmark = pytest.mark.anyio

CHAT = {"model": "echo", "messages": [{"role": "user", "content": "Hi, you there"}], "max_tokens": 3}
COMPLETION = {"model": "echo", "prompt": "Hi, you there", "max_tokens": 3}
BODIES = [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]
TIMES = ("arrived_s", "queued_s", "admitted_s", "first_token_s", "finished_s")


def check(timings: dict[str, Any], usage: dict[str, Any]) -> None:
    times = [time.time() - 60, *(timings[name] for name in TIMES), time.time() + 1]
    assert times == sorted(times)
    assert sum(chunk["tokens"] for chunk in timings["chunks"]) == timings["prompt_n"]
    assert timings["prompt_n"] + timings["cache_n"] == usage["prompt_tokens"]
    assert timings["predicted_n"] == usage["completion_tokens"]
    assert timings["predicted_ms"] == pytest.approx((times[5] - times[4]) * 1e3, abs=1.0)
    assert (timings["preemptions"], timings["preempted_s"]) == (0, [])


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_each_choice_has_its_own(server: MemoryServer, path: str, body: dict[str, Any]) -> None:
    client = server.client
    plain = (await client.post(path, json=body)).json()
    found = (await client.post(path, json={**body, "return_timings": True})).json()
    two = (await client.post(path, json={**body, "n": 2, "return_timings": True})).json()
    assert "timings" not in plain["choices"][0]
    check(found["choices"][0]["timings"], found["usage"])
    assert all(choice["timings"]["finished_s"] > 0 for choice in two["choices"])


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_stream_has_them_in_its_last_chunk(server: MemoryServer, path: str, body: dict[str, Any]) -> None:
    body = {**body, "stream": True, "stream_options": {"include_usage": True}, "return_timings": True}
    text = (await server.client.post(path, json=body)).text
    pieces = [line.removeprefix("data: ") for line in text.split("\n") if line and line != "data: [DONE]"]
    *others, last, usage = map(json.loads, pieces)
    assert all("timings" not in chunk["choices"][0] for chunk in others)
    check(last["choices"][0]["timings"], usage["usage"])


async def test_a_beam_search_has_none(server: MemoryServer) -> None:
    body = {**COMPLETION, "n": 2, "use_beam_search": True, "return_timings": True}
    answer = await server.client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "return_timings"


async def test_explain_of_generate_has_the_chunks(server: MemoryServer) -> None:
    body = {"text": "Hi, you there", "sampling_params": {"max_new_tokens": 3}, "explain": True}
    meta = (await server.client.post("/generate", json=body)).json()["meta_info"]
    (chunk,) = meta["timings"]["chunks"]
    assert chunk["tokens"] == meta["prompt_tokens"]
    assert chunk["planned_s"] == pytest.approx(meta["timings"]["admitted_s"], abs=0.01)
    assert meta["timings"]["preempted_s"] == []
