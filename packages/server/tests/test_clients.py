"""The bodies that benchmark clients send, unmodified, the usage that they read, and what OpenAI's client reads."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from memory_server import MemoryServer
from pagewood.engine.seeds import answer_seed
from pagewood.engine.testing.echo import echo_logprob

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


@pytest.fixture
async def openai(server: MemoryServer) -> AsyncGenerator[AsyncOpenAI]:
    """OpenAI's client, connected to the server in memory."""
    # Any: some versions of the client declare the types of a fork of httpx, and all accept both.
    http: Any = httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://memory")
    async with AsyncOpenAI(base_url="http://memory/v1", api_key="none", max_retries=0, http_client=http) as client:
        yield client


async def test_openai_streams_three_answers(server: MemoryServer, openai: AsyncOpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": PROMPT}]
    texts, reasons = [""] * 3, [""] * 3
    async for chunk in await openai.chat.completions.create(
        model="echo", messages=messages, n=3, seed=4, temperature=1, max_tokens=NUM_TOKENS, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] += choice.finish_reason or ""
    prompt = server.tokenizer.render_chat(messages)
    seeds = [answer_seed(4, i) for i in range(3)]
    assert texts == [server.expected_text(prompt, max_tokens=NUM_TOKENS, temperature=1.0, seed=seed) for seed in seeds]
    assert set(reasons) <= {"length", "stop"}


async def test_openai_reads_logprobs(server: MemoryServer, openai: AsyncOpenAI) -> None:
    chat = await openai.chat.completions.create(
        model="echo", messages=[{"role": "user", "content": PROMPT}], logprobs=True, top_logprobs=2, max_tokens=8, n=2
    )
    for choice in chat.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        data = b"".join([bytes(token.bytes or ()) for token in choice.logprobs.content])
        assert data.decode(errors="replace") == choice.message.content
        assert {len(token.top_logprobs) for token in choice.logprobs.content} == {2}
    tokens = server.expected_tokens(server.tokenizer.encode(PROMPT).tolist(), max_tokens=8)
    text = await openai.completions.create(model="echo", prompt=PROMPT, logprobs=5, max_tokens=8)
    logprobs = text.choices[0].logprobs
    assert logprobs is not None
    expected = [echo_logprob(token, len(PROMPT) + i, 0).logprob for i, token in enumerate(tokens)]
    assert logprobs.token_logprobs == expected


async def test_openai_scores_a_text(server: MemoryServer, openai: AsyncOpenAI) -> None:
    """As evaluation harnesses do: no answer, and the log probabilities of the tokens of the prompt."""
    scored = await openai.completions.create(model="echo", prompt=[PROMPT, "x"], echo=True, max_tokens=0, logprobs=1)
    assert [choice.text for choice in scored.choices] == [PROMPT, "x"]
    logprobs = scored.choices[0].logprobs
    assert logprobs is not None
    tokens = server.tokenizer.encode(PROMPT).tolist()
    # The client's type leaves no room for the null, which its server sends.
    found: list[Any] = list(logprobs.token_logprobs or ())
    assert found == [None, *[echo_logprob(token, i, 0).logprob for i, token in enumerate(tokens) if i]]
    assert logprobs.text_offset == list(range(len(PROMPT)))
    assert "".join(logprobs.tokens or ()) == PROMPT


async def test_openai_best_of(openai: AsyncOpenAI) -> None:
    create = openai.completions.create
    best = await create(model="echo", prompt=PROMPT, best_of=4, n=1, seed=3, temperature=1, max_tokens=6, logprobs=0)
    all_ = await create(model="echo", prompt=PROMPT, n=4, seed=3, temperature=1, max_tokens=6, logprobs=0)
    means: list[float] = []
    for choice in all_.choices:
        assert choice.logprobs is not None
        values = choice.logprobs.token_logprobs or []
        means.append(sum(values) / len(values))
    assert best.choices[0].text == all_.choices[means.index(max(means))].text
    assert best.choices[0].index == 0
