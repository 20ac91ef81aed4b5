"""The bodies that benchmark clients send, unmodified, and the usage that they read in every chunk."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagewood.server.testing import MemoryServer

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PROMPT = "Benchmark me"
NUM_TOKENS = 12

# Source: guidellm 0.8.1, backends/openai/request_handlers.py
GUIDELLM: list[tuple[str, dict[str, Any]]] = [
    (
        COMPLETIONS,
        {
            "model": "echo",
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_tokens": NUM_TOKENS,
            "stop": None,
            "ignore_eos": True,
            "prompt": PROMPT,
        },
    ),
    (
        CHAT,
        {
            "model": "echo",
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_completion_tokens": NUM_TOKENS,
            "stop": None,
            "ignore_eos": True,
            "messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
        },
    ),
]
# Source: `vllm bench serve`, vllm/benchmarks/lib/endpoint_request_func.py
VLLM: list[tuple[str, dict[str, Any]]] = [
    (
        COMPLETIONS,
        {
            "model": "echo",
            "prompt": PROMPT,
            "repetition_penalty": 1.0,
            "max_tokens": NUM_TOKENS,
            "logprobs": None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "temperature": 0.0,
        },
    ),
    (
        CHAT,
        {
            "model": "echo",
            "messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
            "max_completion_tokens": NUM_TOKENS,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
        },
    ),
]


async def events(server: MemoryServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await server.client.post(path, json=body, headers={"x-request-id": "bench-0"})
    assert response.status_code == 200, response.text
    assert response.headers["x-request-id"] == "bench-0"
    *lines, done, nothing = response.text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize(("path", "body"), GUIDELLM)
async def test_guidellm(server: MemoryServer, path: str, body: dict[str, Any]) -> None:
    *chunks, last = await events(server, path, body)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == NUM_TOKENS
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == NUM_TOKENS
    assert len(set(counts)) == NUM_TOKENS
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}


@pytest.mark.parametrize(("path", "body"), VLLM)
async def test_vllm_bench_serve(server: MemoryServer, path: str, body: dict[str, Any]) -> None:
    *chunks, last = await events(server, path, body)
    assert last["usage"]["completion_tokens"] == NUM_TOKENS
    assert all(chunk["usage"] is None for chunk in chunks)


async def test_usage_of_several_prompts_in_every_chunk(server: MemoryServer) -> None:
    body = {**GUIDELLM[0][1], "prompt": ["a", "bc"], "stream_options": {"continuous_usage_stats": True}}
    chunks = await events(server, COMPLETIONS, body)
    assert all(chunk["choices"] for chunk in chunks)  # no last chunk without choices: include_usage is not set
    assert chunks[-1]["usage"]["completion_tokens"] == 2 * NUM_TOKENS
    assert chunks[-1]["usage"]["prompt_tokens"] == 3
