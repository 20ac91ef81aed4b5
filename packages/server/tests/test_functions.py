"""`functions` and `function_call`, the older form of tools in chat completions, and the tokens of reasoning."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from memory_server import MemoryServer
from scripted import Script, scripted_server

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
WEATHER: dict[str, Any] = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]},
}
CLOCK: dict[str, Any] = {"name": "clock", "parameters": {"type": "object", "properties": {}}}
USER = {"role": "user", "content": "Is it raining in Oslo?"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nHm.\n</think>\n\n"


@pytest.fixture
async def server(tools_folder: Path, script: Script) -> AsyncGenerator[MemoryServer]:
    async with scripted_server(tools_folder, script) as server:
        yield server


async def chat(server: MemoryServer, **fields: Any) -> dict[str, Any]:
    response = await server.post(CHAT, {"messages": [USER], **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(server: MemoryServer, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the message that a stream says, with its `finish_reason`, and the usage."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = await server.post(CHAT, {"messages": [USER], **options, **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = {"content": ""}
    chunks = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n")[:-2]]
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        assert "tool_calls" not in delta
        found["content"] += delta.get("content", "")
        if (call := delta.get("function_call")) is not None:
            if "name" in call:
                assert "function_call" not in found, "there is one call"
                found["function_call"] = {"name": call["name"], "arguments": ""}
            found["function_call"]["arguments"] += call["arguments"]
        found["finish_reason"] = choice["finish_reason"]
    return found, chunks[-1]["usage"]


@pytest.mark.parametrize(
    ("text", "content", "call", "finish"),
    [
        ("It rains.", "It rains.", None, "stop"),
        (CALL, "", {"name": "weather", "arguments": '{"city": "Oslo"}'}, "function_call"),
        (
            f"I look.\n{CALL}\n{SECOND}",
            "I look.",
            {"name": "weather", "arguments": '{"city": "Oslo"}'},
            "function_call",
        ),
    ],
)
async def test_an_answer_has_one_function_call(
    server: MemoryServer, script: Script, text: str, content: str, call: Any, finish: str
) -> None:
    script.answer = text
    (choice,) = (await chat(server, functions=[WEATHER, CLOCK]))["choices"]
    message = choice["message"]
    assert "tool_calls" not in message
    assert (message["content"] or "", message.get("function_call"), choice["finish_reason"]) == (content, call, finish)
    found, _ = await streamed(server, functions=[WEATHER, CLOCK], function_call="auto")
    assert (found["content"], found.get("function_call"), found["finish_reason"]) == (content, call, finish)


async def test_calls_and_results_of_the_older_form_reach_the_template(server: MemoryServer, script: Script) -> None:
    call = {"id": "call_weather", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    old = [
        USER,
        {"role": "assistant", "content": None, "function_call": call["function"]},
        {"role": "function", "name": "weather", "content": "rain"},
    ]
    new = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "name": "weather", "tool_call_id": "call_weather", "content": "rain"},
    ]
    await chat(server, messages=old, functions=[WEATHER])
    await chat(server, messages=new, tools=[{"type": "function", "function": WEATHER}])
    assert len(script.prompts) == 1, "both are the same prompt"
    assert CALL in script.prompts[0]


async def test_function_call_none_and_a_named_function(server: MemoryServer, script: Script) -> None:
    script.answer = CALL
    (choice,) = (await chat(server, functions=[WEATHER], function_call="none"))["choices"]
    assert choice["message"]["content"] == CALL
    assert "weather" not in script.prompts[0]
    script.answer = "No."
    fields = {"functions": [WEATHER, CLOCK], "function_call": {"name": "weather"}, "max_tokens": 900}
    (choice,) = (await chat(server, **fields, temperature=1, seed=1))["choices"]
    if choice["finish_reason"] != "length":  # white space
        assert choice["message"]["function_call"]["name"] == "weather"
        assert json.loads(choice["message"]["function_call"]["arguments"])["city"] in ("Oslo", "Rome")


async def test_tokens_of_reasoning_are_counted(server: MemoryServer, script: Script) -> None:
    """Each token is a byte. Marks count with what comes next, by the rule that Responses have, too."""
    for answer, content in ((f"{THOUGHT}Yes.", "Yes."), ("Yes.", "Yes."), (f"{THOUGHT}{CALL}", "")):
        script.answer = answer
        usage = (await chat(server, functions=[WEATHER]))["usage"]
        found, streamed_usage = await streamed(server, functions=[WEATHER])
        assert found["content"] == content
        num_reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
        assert streamed_usage["completion_tokens_details"] == {"reasoning_tokens": num_reasoning}
        assert num_reasoning == (len("<think>\nHm.") if answer.startswith("<") else 0)
        response = await server.post("/v1/responses", {"input": "Hi", "tools": [{"type": "function", **WEATHER}]})
        assert response.json()["usage"]["output_tokens_details"]["reasoning_tokens"] == num_reasoning


async def test_the_openai_client_reads_the_older_form(server: MemoryServer, script: Script) -> None:
    script.answer = f"{THOUGHT}{CALL}"
    over: Any = httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://memory")
    async with AsyncOpenAI(api_key="x", base_url="http://memory/v1", http_client=over) as client:
        functions: Any = [WEATHER]
        messages: Any = [USER]
        answer = await client.chat.completions.create(model="echo", messages=messages, functions=functions)
    assert answer.choices[0].finish_reason == "function_call"
    assert answer.choices[0].message.function_call is not None
    assert json.loads(answer.choices[0].message.function_call.arguments) == {"city": "Oslo"}
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == len("<think>\nHm.")
