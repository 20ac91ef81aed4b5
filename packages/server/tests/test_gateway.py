"""What llm-d's gateway says in headers reaches the engine, in every protocol, and only if the operator wants it."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers

from memory_server import MemoryServer
from pagewood.engine.api import EngineConfig, RequestOptions, SamplingParams
from pagewood.engine.model_folder.folder import model_folder
from pagewood.engine.text import Tokenizer
from pagewood.server.config import ServeConfig
from pagewood.server.http.errors import ApiError
from pagewood.server.keys.gateway import GatewayHeaders, GatewayTerms
from scripted import paced

pytestmark = pytest.mark.anyio

GATEWAY = GatewayHeaders(objectives={"interactive": 5, "batch": -3})
HEADERS = {
    "x-llm-d-slo-ttft-ms": "250",
    "x-llm-d-slo-tpot-ms": "20.5",
    "x-llm-d-inference-fairness-id": "acme",
    "x-llm-d-inference-objective": "interactive",
}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "model": "echo"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**CHAT, "max_tokens": 100},
    "/v1/completions": {"prompt": "hello", "model": "echo", "max_tokens": 100},
    "/v1/responses": {"input": "hello", "model": "echo", "max_output_tokens": 100},
    "/v1/messages": {**CHAT, "max_tokens": 100},
    "/api/generate": {"prompt": "hello", "model": "echo", "options": {"num_predict": 100}},
    "/generate": {"text": "hello", "sampling_params": {"max_new_tokens": 100}},
}


@pytest.fixture
async def server(model_folder: Path, tokenizer: Tokenizer) -> AsyncGenerator[MemoryServer]:
    async with MemoryServer(model_folder, tokenizer, limit=64, gateway=GATEWAY) as server:
        yield server
        await server.until_idle()


async def shown(server: MemoryServer, num: int) -> list[dict[str, Any]]:
    """Return what the engine knows of its requests, when there are so many."""
    service = server.service
    async with aclosing(service.watchers.follow(service.live, service.status, "echo")) as stream:
        async for message in stream:
            engine = json.loads(message)["engine"]
            if engine is not None and len(engine["requests"]) == num:
                return engine["requests"]
    raise AssertionError


async def test_terms_reach_the_engine_in_every_protocol(server: MemoryServer) -> None:
    async with paced(server):
        sending = [
            asyncio.create_task(server.client.post(path, json=body, headers=HEADERS)) for path, body in BODIES.items()
        ]
        requests = await shown(server, len(BODIES))
        assert [(one["tenant"], one["priority"]) for one in requests] == [("acme", 5)] * len(BODIES)
        assert all(0 < one["left_s"] < 0.25 + 100 * 0.0205 for one in requests)
    assert [(await one).status_code for one in sending] == [200] * len(BODIES)


async def test_headers_are_ignored_without_the_option(model_folder: Path, tokenizer: Tokenizer) -> None:
    server = MemoryServer(model_folder, tokenizer, limit=64)
    await server.start()
    async with paced(server):
        path, wrong = "/v1/completions", {**HEADERS, "x-llm-d-slo-ttft-ms": "soon"}
        sending = asyncio.create_task(server.client.post(path, json=BODIES[path], headers=wrong))
        [request] = await shown(server, 1)
        assert (request["tenant"], request["priority"], request["left_s"]) == ("", 0, None)
    assert (await sending).status_code == 200
    await server.until_idle()
    await server.stop()


async def test_a_wrong_time_is_refused_by_name(server: MemoryServer) -> None:
    path = "/v1/completions"
    for value in ("soon", "0", "-5", "nan", "inf", ""):
        response = await server.client.post(path, json=BODIES[path], headers={"x-llm-d-slo-tpot-ms": value})
        assert response.status_code == 400, value
        assert "header 'x-llm-d-slo-tpot-ms'" in response.json()["error"]["message"]
        assert repr(value) in response.json()["error"]["message"]
    with pytest.raises(ApiError, match="at most 256 characters"):
        GATEWAY.read(Headers({"x-llm-d-inference-fairness-id": "x" * 257}), arrived_s=0.0)


def test_what_the_body_says_comes_first() -> None:
    terms = GATEWAY.read(Headers(HEADERS), arrived_s=10.0)
    own = RequestOptions(sampling=SamplingParams(max_tokens=10), deadline_s=12.0, priority=1)
    assert terms.changes(own) == {"tenant": "acme"}
    plain = RequestOptions(sampling=SamplingParams(max_tokens=10))
    changes = terms.changes(plain)
    assert changes.pop("deadline_s") == pytest.approx(10 + 0.25 + 10 * 0.0205)
    assert changes == {"tenant": "acme", "priority": 5}


def test_a_missing_header_changes_nothing() -> None:
    options = RequestOptions(sampling=SamplingParams(max_tokens=10))
    assert GATEWAY.read(Headers({}), arrived_s=10.0) == GatewayTerms(arrived_s=10.0)
    assert GatewayTerms(arrived_s=10.0).changes(options) == {}
    first = GatewayTerms(arrived_s=10.0, first_token_s=0.5)
    assert first.changes(options) == {"deadline_s": 10.5}
    others = replace(first, first_token_s=None, token_s=0.1)
    assert others.changes(options) == {"deadline_s": pytest.approx(11.0)}
    unknown = Headers({"x-llm-d-inference-objective": "unknown", "x-llm-d-inference-fairness-id": ""})
    assert GATEWAY.read(unknown, arrived_s=math.inf) == GatewayTerms(arrived_s=math.inf)


def test_options_that_contradict_are_refused() -> None:
    folder = model_folder(None)
    fields: dict[str, Any] = {"engine": EngineConfig(), "model_folder": folder, "served_model_name": "m"}
    with pytest.raises(ValueError, match="gateway_headers must be true for inference_objectives"):
        ServeConfig(**fields, inference_objectives=(("a", 1),))
    with pytest.raises(ValueError, match="inference_objectives must have different names, none empty, got 'a, a'"):
        ServeConfig(**fields, gateway_headers=True, inference_objectives=(("a", 1), ("a", 2)))
    with pytest.raises(ValueError, match="kv_events must be given with kv_events_topic, got 'kv@a@b' alone"):
        ServeConfig(**fields, kv_events_topic="kv@a@b")
