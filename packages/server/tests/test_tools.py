"""Tools and reasoning in chat completions: the prompt that the model sees, and what clients get of its answer."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from openai import AsyncOpenAI

from echo_folder import TOOLS_TEMPLATE, write_echo_folder
from memory_server import MemoryServer
from pagewood.engine.text import Tokenizer
from scripted import Script, scripted_server

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather", "parameters": SCHEMA},
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}},
}
USER = {"role": "user", "content": "Is it raining in Oslo?"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


@pytest.fixture
async def server(tools_folder: Path, script: Script) -> AsyncGenerator[MemoryServer]:
    async with scripted_server(tools_folder, script) as server:
        yield server


async def chat(server: MemoryServer, **fields: Any) -> dict[str, Any]:
    response = await server.post(CHAT, {"messages": [USER], **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def streamed(server: MemoryServer, **fields: Any) -> list[dict[str, Any]]:
    """Return the choices that a stream says, put together as clients do."""
    response = await server.post(CHAT, {"messages": [USER], "stream": True, **fields})
    assert response.status_code == 200, response.text
    choices: dict[int, dict[str, Any]] = {}
    for line in response.text.split("\n\n")[:-2]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            found = choices.setdefault(choice["index"], {"content": "", "reasoning": "", "calls": [], "finish": None})
            delta = choice["delta"]
            assert found["finish"] is None, "nothing comes after the end"
            found["content"] += delta.get("content", "")
            found["reasoning"] += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(found["calls"])
                    assert call["type"] == "function"
                    found["calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
                found["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            found["finish"] = choice["finish_reason"]
    return [choices[i] for i in range(len(choices))]


def whole(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the choices of an answer in the same form."""
    return [
        {
            "content": choice["message"]["content"] or "",
            "reasoning": choice["message"].get("reasoning_content", ""),
            "calls": [{"id": call["id"], **call["function"]} for call in choice["message"].get("tool_calls", [])],
            "finish": choice["finish_reason"],
        }
        for choice in answer["choices"]
    ]


def without_ids(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ids = [call["id"] for choice in choices for call in choice["calls"]]
    assert len(set(ids)) == len(ids)
    return [{**choice, "calls": [{**call, "id": None} for call in choice["calls"]]} for choice in choices]


CASES: list[tuple[str, dict[str, Any]]] = [
    ("It rains.", {"content": "It rains.", "finish": "stop"}),
    (CALL, {"calls": [("weather", {"city": "Oslo", "days": 2})], "finish": "tool_calls"}),
    (
        f"I look.\n{CALL}\n{SECOND}",
        {
            "content": "I look.",
            "calls": [("weather", {"city": "Oslo", "days": 2}), ("clock", {})],
            "finish": "tool_calls",
        },
    ),
    (
        f"<think>\nHm <b>.\n</think>\n\n{CALL}",
        {"reasoning": "Hm <b>.", "calls": [("weather", {"city": "Oslo", "days": 2})], "finish": "tool_calls"},
    ),
    ("<think>\nHm.\n</think>\n\nYes.", {"reasoning": "Hm.", "content": "Yes.", "finish": "stop"}),
    ("<tool_call>\n{broken", {"content": "<tool_call>\n{broken", "finish": "stop"}),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
async def test_an_answer_is_content_reasoning_and_calls(
    server: MemoryServer, script: Script, text: str, expected: dict[str, Any]
) -> None:
    script.answer = text
    for fields in ({}, {"n": 2}, {"logprobs": True, "top_logprobs": 1}):
        answer = await chat(server, tools=[WEATHER, CLOCK], **fields)
        found = whole(answer)
        assert without_ids(await streamed(server, tools=[WEATHER, CLOCK], **fields)) == without_ids(found)
        assert len(found) == fields.get("n", 1)
        for choice in found:
            assert choice["content"] == expected.get("content", "")
            assert choice["reasoning"] == expected.get("reasoning", "")
            calls = [(call["name"], json.loads(call["arguments"])) for call in choice["calls"]]
            assert calls == expected.get("calls", [])
            assert choice["finish"] == expected["finish"]
        num_tokens = answer["usage"]["completion_tokens"]
        assert num_tokens == len(found) * (len(text) + 1)  # of a byte each, and the end
        if "logprobs" in fields:
            assert len(answer["choices"][0]["logprobs"]["content"]) == len(text)


async def test_the_prompt_has_tools_calls_and_results(server: MemoryServer, script: Script) -> None:
    script.answer = "Yes, it rains."
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    history = [
        USER,
        {"role": "assistant", "content": None, "reasoning_content": "Look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
    ]
    assert whole(await chat(server, messages=history, tools=[WEATHER]))[0]["content"] == "Yes, it rains."
    (prompt,) = script.prompts
    assert prompt == (
        f"<|start|>tools\n{json.dumps([WEATHER])}<|end|>"
        "<|start|>user\nIs it raining in Oslo?<|end|>"
        "<|start|>assistant\n<think>\nLook.\n</think>\n\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|end|>'
        "<|start|>tool\nrain<|end|><|start|>assistant\n"
    )


async def test_tools_that_must_not_be_called_are_not_shown(server: MemoryServer, script: Script) -> None:
    script.answer = CALL
    (choice,) = whole(await chat(server, tools=[WEATHER], tool_choice="none"))
    assert "weather" not in script.prompts[0]
    assert choice == {"content": CALL, "reasoning": "", "calls": [], "finish": "stop"}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
        {"type": "function", "function": {"name": "clock"}}]}}  # fmt: skip
    await chat(server, tools=[WEATHER, CLOCK], tool_choice=allowed)
    assert "weather" not in script.prompts[1]
    assert "clock" in script.prompts[1]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"weather", "clock"}),
        ({"type": "function", "function": {"name": "weather"}}, {"weather"}),
        ({"type": "function", "function": {"name": "clock"}}, {"clock"}),
    ],
)
async def test_a_required_call_is_bound_by_grammar(
    server: MemoryServer, script: Script, choice: Any, names: set[str]
) -> None:
    """Whatever the model would write: here it would not call anything, and its further tokens are hashes."""
    script.answer = "No."
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (WEATHER, CLOCK)}
    for seed in range(3):
        fields = {"tool_choice": choice, "parallel_tool_calls": False, "temperature": 1, "seed": seed}
        (found,) = whole(await chat(server, tools=[WEATHER, CLOCK], max_tokens=900, **fields))
        if found["finish"] == "length":
            continue  # white space
        (call,) = found["calls"]
        assert found["finish"] == "tool_calls"
        assert call["name"] in names
        jsonschema.validate(json.loads(call["arguments"]), schemas[call["name"]])


async def test_reasoning_that_the_prompt_begins(server: MemoryServer, script: Script) -> None:
    script.answer = "Hm.\n</think>\n\nYes."
    for fields in ({"chat_template_kwargs": {"enable_thinking": True}}, {"reasoning_effort": "high"}):
        answer = await chat(server, **fields)
        assert script.prompts[-1].endswith("<|start|>assistant\n<think>\n")
        assert whole(answer) == [{"content": "Yes.", "reasoning": "Hm.", "calls": [], "finish": "stop"}]
        assert whole(answer) == await streamed(server, **fields)
        (hidden,) = await streamed(server, include_reasoning=False, **fields)
        assert (hidden["content"], hidden["reasoning"]) == ("Yes.", "")


async def test_a_grammar_begins_behind_reasoning(server: MemoryServer, script: Script) -> None:
    script.answer = "Hm { not JSON.\n</think>no JSON either"
    format = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": "x"}}}
    for effort, reasoning in (("high", "Hm { not JSON."), ("none", "")):
        answer = await chat(server, reasoning_effort=effort, response_format=format, max_tokens=300)
        (choice,) = whole(answer)
        assert choice["reasoning"] == reasoning
        assert json.loads(choice["content"]) == "x"


async def test_the_end_of_reasoning_is_found_within_tokens(tmp_path: Path) -> None:
    """Tokens as vocabularies merge them: the end of the mark, and what follows it."""
    write_echo_folder(tmp_path, chat_template=TOOLS_TEMPLATE, template="hermes")
    file = tmp_path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    first = max(token["id"] for token in tokenizer["added_tokens"]) + 1
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    merged = (">\n", '>{"', "k>\n\n", "</thi")
    tokenizer["added_tokens"] += [{"id": first + num, "content": text, **flags} for num, text in enumerate(merged)]
    file.write_text(json.dumps(tokenizer))
    script = Script()
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    formats: tuple[dict[str, Any], ...] = (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}},
        {"tools": [WEATHER], "tool_choice": "required"},
        {
            "tools": [WEATHER],
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        },
    )
    async with scripted_server(tmp_path, script) as server:
        for text in ("Hm.</think>\nFree text.", 'Hm.</think>{"b": 2}', "Hm.</think>\n\nFree text."):
            for fields in formats:
                script.answer = text
                answer = await chat(server, reasoning_effort="high", max_tokens=400, **fields)
                (choice,) = whole(answer)
                assert choice["reasoning"].startswith("Hm.")
                assert "Free" not in choice["content"]
                if choice["finish"] == "tool_calls":
                    jsonschema.validate(json.loads(choice["calls"][0]["arguments"]), SCHEMA)
                elif choice["finish"] == "stop":
                    assert json.loads(choice["content"]) == {"a": 1}
                else:
                    assert choice["finish"] == "length"


async def test_an_answer_does_not_end_before_its_form(server: MemoryServer, script: Script) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": "x"}}}
    script.answer = "Hm."  # and then the end
    for fields in ({"response_format": format}, {"tools": [WEATHER], "tool_choice": "required"}):
        (choice,) = whole(await chat(server, reasoning_effort="high", max_tokens=60, **fields))
        assert choice["finish"] == "length"
        assert choice["reasoning"].startswith("Hm.")
        assert choice["content"] == ""
    (free,) = whole(await chat(server, reasoning_effort="high", max_tokens=60))
    assert (free["reasoning"], free["finish"]) == ("Hm.", "stop")


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("get weather", {}, "tools[0] must have a name that calls of this model can have, got 'get weather'"),
        ("f", {"minProperties": 1}, "tools[0] (f): parameters must have keywords that calls of this model"),
        ("f", {"properties": {"a": {"type": "integer", "not": {}}}}, "tools[0] (f): parameters.properties.a: Unimpl"),
        ("f", {"type": "array"}, "tools[0] (f): parameters must allow an object"),
    ],
)  # fmt: skip
async def test_tools_that_no_call_can_keep_are_refused(
    tmp_path: Path, name: str, parameters: dict[str, Any], message: str
) -> None:
    write_echo_folder(tmp_path, chat_template=TOOLS_TEMPLATE, template="glm_4")
    tool = {"type": "function", "function": {"name": name, "parameters": parameters}}
    async with scripted_server(tmp_path, Script()) as server:
        for stream in (False, True):
            fields = {"messages": [USER], "tools": [tool], "tool_choice": "required", "stream": stream}
            response = await server.post(CHAT, fields)
            assert response.status_code == 400
            assert response.json()["error"]["message"].startswith(f"Invalid value for 'tools': {message}")


async def test_an_answer_continues_the_last_message(server: MemoryServer, script: Script) -> None:
    script.answer = " rains."
    messages = [USER, {"role": "assistant", "content": "Yes, it"}]
    (choice,) = whole(await chat(server, messages=messages, continue_final_message=True))
    assert script.prompts[0].endswith("<|start|>assistant\nYes, it")
    assert choice["content"] == " rains."


async def test_salts_keep_prefixes_apart(server: MemoryServer, script: Script) -> None:
    script.answer = "Yes."
    cached: list[int] = []
    for salt in (None, None, "a", "a", "b"):
        fields = {} if salt is None else {"cache_salt": salt}
        cached.append((await chat(server, **fields))["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert [count > 0 for count in cached] == [False, True, False, True, False]


async def test_marks_that_are_special_tokens(tmp_path: Path) -> None:
    """They are no text of an answer, unless its parser needs them."""
    fields = {"reasoning_content": {"open": "<|start|>thinks\n", "close": "<|start|>says\n"}, "content": {}}
    write_echo_folder(tmp_path, chat_template=TOOLS_TEMPLATE, template={"version": 1, "fields": fields})
    script = Script()
    script.answer = "<|start|>thinks\nHm.<|start|>says\nYes."
    async with MemoryServer(tmp_path, Tokenizer.from_folder(tmp_path), limit=8, script=script) as server:
        found = whole(await chat(server))
        assert found == [{"content": "Yes.", "reasoning": "Hm.", "calls": [], "finish": "stop"}]
        assert await streamed(server) == found
        completion = await server.post("/v1/completions", {"prompt": "x", "max_tokens": 99})
        assert completion.json()["choices"][0]["text"] == "thinks\nHm.says\nYes."
        script.answer = "Yes<|start|> or no<|start|>."
        found = whole(await chat(server))
        assert found == [{"content": "Yes or no.", "reasoning": "", "calls": [], "finish": "stop"}]
        assert await streamed(server) == found


async def test_strict_functions_are_bound_where_marks_are_special_tokens(tmp_path: Path) -> None:
    mark = {"open": "<|start|>call\n", "close": "<|start|>done\n", "repeats": True, "content": "json"}
    fields = {
        "reasoning_content": {"open": "<|start|>thinks\n", "close": "<|start|>says\n"},
        "tool_calls": {**mark, "transform": {"type": "function", "function": "{content}"}},
        "content": {},
    }
    write_echo_folder(tmp_path, chat_template=TOOLS_TEMPLATE, template={"version": 1, "fields": fields})
    script = Script()
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    async with scripted_server(tmp_path, script) as server:
        for arguments, says in (('{"city": "Oslo", "days": 2}', "I look."), ('{"city": 5, "mood": "good"}', "")):
            call = f'<|start|>call\n{{"name": "weather", "arguments": {arguments}}}<|start|>done\n'
            script.answer = f"<|start|>thinks\nHm.<|start|>says\n{says}{call}"
            (bound,) = whole(await chat(server, tools=[strict], max_tokens=400))
            assert bound["reasoning"].startswith("Hm.")  # where it may not write the call, it goes on as it likes
            assert bound["content"].startswith(says)
            found = bound["calls"][0]
            assert found["name"] == "weather"
            if says:
                assert found["arguments"] == arguments
            elif bound["finish"] == "tool_calls":
                jsonschema.validate(json.loads(found["arguments"]), SCHEMA)
            assert '"city": 5' not in found["arguments"]


async def test_calls_are_an_alternative_to_a_grammar(server: MemoryServer, script: Script) -> None:
    """Agents offer tools and ask for a form of the final answer in one request."""
    format = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": "x"}}}
    for answer, calls in ((CALL, ["weather"]), ('"x"', []), ("neither", [])):
        script.answer = answer
        (choice,) = whole(await chat(server, tools=[WEATHER], response_format=format, max_tokens=300))
        if answer == "neither":  # the model draws one or the other
            assert choice["content"] == '"x"' or choice["calls"] or choice["finish"] == "length"
            continue
        assert [call["name"] for call in choice["calls"]] == calls
        assert choice["content"] == ("" if calls else '"x"')


async def test_strict_functions_are_bound_where_they_may_be_called(server: MemoryServer, script: Script) -> None:
    script.answer = (
        'Let me see. <tool_call>\n{"name": "weather", "arguments": {"city": 5, "mood": "good"}}\n</tool_call>'
    )
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    (free,) = whole(await chat(server, tools=[WEATHER]))
    assert json.loads(free["calls"][0]["arguments"]) == {"city": 5, "mood": "good"}
    (bound,) = whole(await chat(server, tools=[strict], max_tokens=400))
    assert bound["content"].startswith("Let me see.")
    if bound["finish"] == "tool_calls":
        jsonschema.validate(json.loads(bound["calls"][0]["arguments"]), SCHEMA)


async def test_the_openai_client_reads_calls(server: MemoryServer, script: Script) -> None:
    script.answer = f"I look.\n{CALL}"
    over: Any = httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://memory")
    async with AsyncOpenAI(api_key="x", base_url="http://memory/v1", http_client=over) as client:
        tools: Any = [WEATHER]
        messages: Any = [USER]
        async with client.chat.completions.stream(model="echo", messages=messages, tools=tools) as stream:
            events = [event async for event in stream]
        names = [event.type for event in events]
        assert "tool_calls.function.arguments.delta" in names
        assert "tool_calls.function.arguments.done" in names
        final = (await stream.get_final_completion()).choices[0]
        assert final.finish_reason == "tool_calls"
        assert final.message.content == "I look."
        assert final.message.tool_calls is not None
        assert json.loads(final.message.tool_calls[0].function.arguments) == {"city": "Oslo", "days": 2}
