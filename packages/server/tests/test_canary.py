"""A request of one token that passes all processes: shared, with a deadline, beyond the limit of requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from leaving_client import Client
from memory_server import MemoryServer
from pagewood.engine.text import Tokenizer
from pagewood.server.processes import canary as canary_module

pytestmark = pytest.mark.anyio


async def test_it_answers_and_is_shared_and_kept_for_a_moment(
    server: MemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = ["/health/generate", "/health_generate"] * 4
    answers = await asyncio.gather(*[server.client.get(path) for path in paths])
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.text for answer in answers}) == 1
    assert answers[0].json()["status"] == "ok"
    monkeypatch.setattr(canary_module, "KEPT_S", 0.0)
    assert (await server.client.get("/health/generate")).status_code == 200
    await server.until(lambda: server.engine_status.counters["num_tokens"] >= 2)
    await server.until_idle()
    assert server.engine_status.counters["num_tokens"] == 2  # one for each canary: an answer for eight, and one more
    for path in ("/live", "/ping"):
        assert (await server.client.get(path)).json() == {"status": "ok"}


async def test_a_full_server_is_not_a_broken_one(model_folder: Path, tokenizer: Tokenizer) -> None:
    server = MemoryServer(model_folder, tokenizer, limit=2)
    await server.start()
    server.gate.close()
    body = {"model": "echo", "prompt": "Hi", "max_tokens": 100, "ignore_eos": True}
    clients = [Client(server, body, path="/v1/completions") for _ in range(2)]
    await server.until(lambda: server.service.live.num_live == 2)
    assert (await server.post("/v1/completions", body)).status_code == 429
    probe = asyncio.create_task(server.client.get("/health/generate"))
    await server.until(lambda: server.service.live.num_live == 3)
    server.gate.open()
    assert (await probe).status_code == 200
    await asyncio.gather(*[client.served for client in clients])
    await server.until_idle()
    await server.stop()


async def test_it_fails_in_time_when_the_device_is_stuck_and_when_the_engine_is_gone(
    server: MemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canary_module, "LIMIT_S", 0.2)
    monkeypatch.setattr(canary_module, "KEPT_S", 0.0)
    server.gate.close()
    answer = await server.client.get("/health/generate")
    assert answer.status_code == 503
    assert answer.json()["detail"] == "no token came within 0.2 s"
    assert (await server.client.get("/health")).status_code == 200
    server.gate.open()
    await server.until_idle()
    server.engine_status.lost(next_incarnation=1)
    answer = await server.client.get("/health/generate")
    assert answer.status_code == 503
    assert "not ready" in answer.json()["detail"]
    server.engine_status.incarnation = 0  # not ours; the engine of this test did not die
    await server.until(lambda: bool(server.engine_status.counters))


async def test_an_encoder_makes_a_vector_for_it(model_folder: Path, tokenizer: Tokenizer) -> None:
    server = MemoryServer(model_folder, tokenizer, limit=2, generates=False)
    await server.start()
    assert (await server.client.get("/health/generate")).json()["status"] == "ok"
    refused = await server.post("/v1/completions", {"model": "echo", "prompt": "Hi"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "not_generative")
    vectors = await server.post("/v1/embeddings", {"model": "echo", "input": "Hi"})
    assert vectors.status_code == 200
    await server.until_idle()
    await server.stop()
