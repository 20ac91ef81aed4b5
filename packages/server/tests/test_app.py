"""The HTTP API of a whole server in memory; an oracle computes the answers of its echo model."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from memory_server import MAX_LENGTH, MemoryServer

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "Hello 世界"}]
HELLO_PROMPT = "<|start|>user\nHello 世界<|end|><|start|>assistant\n"


def events(text: str) -> Iterator[Any]:
    """Yield the events of a stream, and check that it ends with `[DONE]`."""
    lines = text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    for line in lines[:-2]:
        yield json.loads(line.removeprefix("data: "))


async def test_chat(server: MemoryServer) -> None:
    response = await server.post(CHAT, {"messages": HELLO, "max_tokens": 30})
    assert response.status_code == 200
    answer = response.json()
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": server.expected_text(HELLO_PROMPT, max_tokens=30),
                "refusal": None,
            },
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    num_prompt = len(server.tokenizer.encode(HELLO_PROMPT))
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 30,
        "total_tokens": num_prompt + 30,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "echo"
    assert answer["id"].startswith("chatcmpl-")


async def test_chat_streamed(server: MemoryServer) -> None:
    body = {"messages": HELLO, "max_completion_tokens": 30, "stream": True, "stream_options": {"include_usage": True}}
    response = await server.post(CHAT, body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    first, *chunks, end, usage = events(response.text)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["usage"] is None
    texts = [chunk["choices"][0]["delta"]["content"] for chunk in chunks]
    assert "".join(texts) == server.expected_text(HELLO_PROMPT, max_tokens=30)
    assert len(texts) == 30  # one chunk per token
    assert end["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 30
    assert {chunk["id"] for chunk in (first, *chunks, end, usage)} == {first["id"]}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


async def test_without_a_limit_an_answer_may_fill_the_context(server: MemoryServer) -> None:
    response = await server.post(CHAT, {"messages": HELLO, "ignore_eos": True})
    assert response.json()["usage"]["total_tokens"] == MAX_LENGTH
    response = await server.post(COMPLETIONS, {"prompt": "x", "ignore_eos": True})
    assert response.json()["usage"]["completion_tokens"] == 16


async def test_second_request_finds_its_prompt_cached(server: MemoryServer) -> None:
    body = {"messages": [{"role": "user", "content": "long " * 20}], "max_tokens": 5}
    first, second = [(await server.post(CHAT, body)).json() for _ in range(2)]
    assert first["choices"] == second["choices"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    num_prompt = second["usage"]["prompt_tokens"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == (num_prompt - 1) // 16 * 16


async def test_completions_of_texts_and_ids(server: MemoryServer) -> None:
    text = server.expected_text("one", max_tokens=8)
    other = server.expected_text("zwei ü", max_tokens=8)
    ids = {name: server.tokenizer.encode(name).tolist() for name in ("one", "zwei ü")}
    cases: list[tuple[Any, list[str]]] = [
        ("one", [text]),
        (["one", "zwei ü"], [text, other]),
        (ids["one"], [text]),
        ([ids["zwei ü"], ids["one"]], [other, text]),
    ]
    for prompt, expected in cases:
        response = await server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 8})
        answer = response.json()
        assert [choice["text"] for choice in answer["choices"]] == expected
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
        assert answer["usage"]["completion_tokens"] == 8 * len(expected)
        assert answer["object"] == "text_completion"
        streamed = await server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 8, "stream": True})
        texts = [""] * len(expected)
        for event in events(streamed.text):
            assert "usage" not in event
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == expected


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_expression(server: MemoryServer, stream: bool) -> None:
    whole = server.expected_text(HELLO_PROMPT, max_tokens=100)
    stop = re.compile(rf"{re.escape(whole[20])}(?:.|\n){{3}}")
    found = stop.search(whole)
    assert found is not None
    body = {"messages": HELLO, "max_tokens": 100, "ignore_eos": True, "stop_regex": stop.pattern}
    response = await server.post(CHAT, {**body, "stream": stream})
    if stream:
        choices = [one["choices"][0] for one in events(response.text)]
        text = "".join(choice["delta"].get("content", "") for choice in choices)
    else:
        choices = response.json()["choices"]
        text = choices[0]["message"]["content"]
    assert (text, choices[-1]["finish_reason"]) == (whole[: found.start()], "stop")


@pytest.mark.parametrize("as_ids", [False, True])
async def test_echo_puts_the_prompt_first(server: MemoryServer, as_ids: bool) -> None:
    prompt = server.tokenizer.encode("zwei ü").tolist() if as_ids else "zwei ü"
    response = await server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 8, "echo": True})
    assert response.json()["choices"][0]["text"] == "zwei ü" + server.expected_text("zwei ü", max_tokens=8)


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string(server: MemoryServer, stream: bool) -> None:
    # A string of several tokens from the middle of the answer.
    whole = server.expected_text(HELLO_PROMPT, max_tokens=100)
    stop = whole[20:25]
    body = {"messages": HELLO, "max_tokens": 300, "ignore_eos": True, "stop": ["never said", stop], "stream": stream}
    server.gate.allow(40)  # enough for this answer
    response = await server.post(CHAT, body)
    if stream:
        *chunks, end = events(response.text)
        text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
        reason = end["choices"][0]["finish_reason"]
    else:
        choice = response.json()["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert text == whole[: whole.index(stop)]
    assert reason == "stop"
    await server.until(lambda: server.has_command_at_gate or server.service.live.num_ending == 0)
    server.gate.open()
    await server.until_idle()
    assert server.service.status.counters["num_tokens"] < 100


async def test_tokens_that_end_an_answer(server: MemoryServer) -> None:
    prompt = server.tokenizer.encode("one").tolist()
    tokens = server.expected_tokens(prompt, max_tokens=20)
    stop_token = next(token for token in tokens[5:] if token not in tokens[:5])
    body = {"prompt": prompt, "max_tokens": 20, "stop_token_ids": [stop_token]}
    choice = (await server.post(COMPLETIONS, body)).json()["choices"][0]
    assert choice["text"] == server.tokenizer.decode(tokens[: tokens.index(stop_token)])
    assert choice["finish_reason"] == "stop"


async def test_a_seed_decides_the_tokens(server: MemoryServer) -> None:
    body = {"prompt": "one", "max_tokens": 12, "temperature": 1.0}
    texts = [
        (await server.post(COMPLETIONS, {**body, "seed": seed})).json()["choices"][0]["text"] for seed in (1, 2, 1)
    ]
    assert texts[0] == texts[2] == server.expected_text("one", max_tokens=12, temperature=1.0, seed=1)
    assert texts[0] != texts[1]


async def test_top_p_zero_is_greedy(server: MemoryServer) -> None:
    body = {"prompt": "one", "max_tokens": 12, "temperature": 1.0, "top_p": 0, "seed": 1}
    text = (await server.post(COMPLETIONS, body)).json()["choices"][0]["text"]
    assert text == server.expected_text("one", max_tokens=12)


async def test_many_at_once_do_not_mix(server: MemoryServer) -> None:
    prompts = [f"{'shared ' * (n % 3)}prompt {n}" for n in range(40)]
    responses = await asyncio.gather(
        *[server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 5 + n % 7}) for n, prompt in enumerate(prompts)]
    )
    for n, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        assert response.json()["choices"][0]["text"] == server.expected_text(prompt, max_tokens=5 + n % 7)


async def test_roles_parts_and_answers_sent_back(server: MemoryServer) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
        {
            "role": "assistant",
            "content": "c",
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
            "tool_calls": None,
        },
        {"role": "assistant"},
        {"role": "user", "content": ""},
    ]
    neutral: dict[str, Any] = {
        "n": 1,
        "tools": [],
        "logprobs": False,
        "response_format": {"type": "text"},
        "frequency_penalty": 0.0,
    }
    ignored = {"user": "me", "metadata": {"a": "b"}, "store": True, "parallel_tool_calls": True, "stop": None}
    response = await server.post(CHAT, {"messages": messages, "max_tokens": 9, **neutral, **ignored})
    turns = ["system\nBe brief.", "user\nab", "assistant\nc", "assistant\n", "user\n"]
    prompt = "".join(f"<|start|>{turn}<|end|>" for turn in turns) + "<|start|>assistant\n"
    assert response.json()["choices"][0]["message"]["content"] == server.expected_text(prompt, max_tokens=9)


async def test_models_health_and_ready(server: MemoryServer) -> None:
    model = {
        "id": "echo",
        "object": "model",
        "created": 1,
        "owned_by": "pagewood",
        "root": "echo",
        "parent": None,
        "max_model_len": MAX_LENGTH,
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
    }
    assert (await server.client.get("/v1/models")).json() == {"object": "list", "data": [model]}
    assert (await server.client.get("/v1/models/echo")).json() == model
    assert (await server.client.get("/v1/models/other")).json()["error"]["code"] == "model_not_found"
    assert (await server.client.get("/health")).json() == {"status": "ok"}
    ready = await server.client.get("/ready")
    assert ready.status_code == 200
    assert ready.json()["status"] == "ready"
    assert ready.json()["engine"]["num_free_pages"] == 100
