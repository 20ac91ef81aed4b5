"""Anthropic's protocol: the prompt that the model sees, and what clients get of its answer."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import httpx
import jsonschema
import pytest

from memory_server import MemoryServer
from pagewood.engine.api import FinishReason
from pagewood.server.messages import wire
from pagewood.server.protocols.anthropic import fields
from pagewood.server.protocols.anthropic.format import MessageFormat
from pagewood.server.protocols.common.formats import PromptTokensDetails, Usage
from scripted import Script, interrupted, scripted_server

pytestmark = pytest.mark.anyio

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
WINDOW = 1600
"""The longest text of the model."""
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "schema": SCHEMA}
WEATHER = {"name": "weather", "description": "The weather", "input_schema": SCHEMA}
CLOCK = {"name": "clock", "input_schema": {"type": "object"}}
USER = {"role": "user", "content": "Hi"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
CALLED = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}}
CACHED = {"type": "ephemeral"}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}


@pytest.fixture
async def server(tools_folder: Path, script: Script) -> AsyncGenerator[MemoryServer]:
    async with scripted_server(tools_folder, script) as server:
        yield server


async def post(server: MemoryServer, path: str = MESSAGES, **body: Any) -> httpx.Response:
    body = {"messages": [USER], **({"max_tokens": 300} if path == MESSAGES else {}), **body}
    return await server.client.post(path, json={"model": "echo", **body}, headers={"x-api-key": "any"})


async def answer(server: MemoryServer, **body: Any) -> dict[str, Any]:
    response = await post(server, **body)
    assert response.status_code == 200, response.text
    return response.json()


async def events(server: MemoryServer, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, each with its name, which is also its type."""
    response = await post(server, stream=True, **body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found: list[dict[str, Any]] = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def put_together(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a stream says, by the rules of Anthropic's documentation."""
    assert [one["type"] for one in stream[:2]] == ["message_start", "ping"]
    assert [one["type"] for one in stream[-2:]] == ["message_delta", "message_stop"]
    message: dict[str, Any] = dict(stream[0]["message"])
    blocks: list[dict[str, Any]] = []
    inputs: list[str] = []
    is_open = False
    for one in stream[2:-2]:
        if one["type"] == "content_block_start":
            assert not is_open
            assert one["index"] == len(blocks)
            is_open = True
            blocks.append(dict(one["content_block"]))
            inputs.append("")
            continue
        assert is_open
        assert one["index"] == len(blocks) - 1
        if one["type"] == "content_block_stop":
            is_open = False
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(inputs[-1] or "{}")
            continue
        delta = one["delta"]
        match delta["type"]:
            case "text_delta":
                blocks[-1]["text"] += delta["text"]
            case "thinking_delta":
                blocks[-1]["thinking"] += delta["thinking"]
            case "signature_delta":
                blocks[-1]["signature"] += delta["signature"]
            case kind:
                assert kind == "input_json_delta"
                inputs[-1] += delta["partial_json"]
    assert not is_open
    return {**message, "content": blocks, **stream[-2]["delta"], "usage": stream[-2]["usage"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without what differs between two requests: ids, and what the cache had."""
    assert message["id"].startswith("msg_")
    for block in message["content"]:
        assert block["type"] != "tool_use" or block["id"].startswith("toolu_")
    usage = message["usage"]
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    blocks = [{**block, "id": None} for block in message["content"]]
    return {**message, "id": None, "content": blocks, "usage": (prompt, usage["output_tokens"])}


ANSWERS: list[tuple[str, list[dict[str, Any]], str]] = [
    ("It rains.", [{"type": "text", "text": "It rains."}], "end_turn"),
    ("", [], "end_turn"),
    (CALL, [{"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}}], "tool_use"),
    (
        f"<think>\nLet me look.\n</think>\n\nOne moment.\n{CALL}\n"
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
        [
            {"type": "thinking", "thinking": "Let me look.", "signature": "unsigned"},
            {"type": "text", "text": "One moment."},
            {"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}},
            {"type": "tool_use", "name": "clock", "input": {}},
        ],
        "tool_use",
    ),
]


@pytest.mark.parametrize(("text", "blocks", "reason"), ANSWERS)
async def test_an_answer_is_the_same_whole_and_streamed(
    server: MemoryServer, script: Script, text: str, blocks: list[dict[str, Any]], reason: str
) -> None:
    script.answer = text
    whole = await answer(server, tools=[WEATHER, CLOCK])
    found = [{key: value for key, value in block.items() if key != "id"} for block in whole["content"]]
    assert found == blocks
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "echo")
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, None)
    stream = await events(server, tools=[WEATHER, CLOCK])
    assert stream[0]["message"]["stop_reason"] is None
    assert without_ids(put_together(stream)) == without_ids(whole)


async def test_the_events_of_a_stream(server: MemoryServer, script: Script) -> None:
    script.answer = f"<think>\nA\n</think>\n\n{CALL}"
    stream = await events(server, tools=[WEATHER])
    kinds = [one["delta"]["type"] if one["type"] == "content_block_delta" else one["type"] for one in stream]
    short = [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
    assert short == [
        "message_start",
        "ping",
        "content_block_start",
        "thinking_delta",
        "signature_delta",
        "content_block_stop",
        "content_block_start",
        "input_json_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert kinds.count("input_json_delta") > 1  # arguments are sent as they are written


@pytest.mark.parametrize("stream", [False, True])
async def test_the_stop_sequence_that_ended_the_text_is_named(
    server: MemoryServer, script: Script, stream: bool
) -> None:
    script.answer = "one two three"
    body: dict[str, Any] = {"stop_sequences": ["never", "three", "thr"]}
    found = put_together(await events(server, **body)) if stream else await answer(server, **body)
    assert found["content"] == [{"type": "text", "text": "one two"}]
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "thr")
    body = {"max_tokens": 3, "stop_sequences": ["three"]}
    found = put_together(await events(server, **body)) if stream else await answer(server, **body)
    assert (found["stop_reason"], found["stop_sequence"]) == ("max_tokens", None)
    assert found["usage"]["output_tokens"] == 3


async def test_the_usage_counts_cached_tokens_apart(server: MemoryServer) -> None:
    body = {"messages": [{"role": "user", "content": "word " * 40}]}
    first, second = await answer(server, **body), await answer(server, **body)
    total = first["usage"]["input_tokens"]
    assert first["usage"]["cache_read_input_tokens"] == 0
    usage = second["usage"]
    assert usage["cache_read_input_tokens"] > 150
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == total
    assert usage["cache_creation_input_tokens"] == 0
    assert usage["output_tokens"] == len("Hello there.") + 1
    counted = (await post(server, COUNT, **body)).json()
    assert counted == {"input_tokens": total}


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "user", "content": [{"type": "text", "text": "In Oslo.", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Look.", "signature": "abc"},
            {"type": "redacted_thinking", "data": "xyz"},
            {"type": "text", "text": "One moment.", "citations": None},
            CALLED,
        ],
    },
    {
        "role": "user",
        "content": [
            {**RESULT, "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "city"}], "is_error": True},
            {"type": "text", "text": "And now?"},
            {"type": "text", "text": "Tell me."},
        ],
    },
    {"role": "system", "content": "Be brief."},
]


async def test_the_prompt_that_the_model_sees(server: MemoryServer, script: Script) -> None:
    await answer(server, system=[{"type": "text", "text": "A"}, {"type": "text", "text": "B"}], messages=HISTORY)
    call = json.dumps({"name": "weather", "arguments": {"city": "Oslo"}})
    assert script.prompts == [
        "<|start|>system\nA\nB<|end|>"
        "<|start|>user\nWeather?\nIn Oslo.<|end|>"
        "<|start|>assistant\n<think>\nLook.\n</think>\n\nOne moment.<tool_call>\n" + call + "\n</tool_call><|end|>"
        "<|start|>tool\nError: no\ncity<|end|>"
        "<|start|>user\nAnd now?\nTell me.<|end|>"
        "<|start|>system\nBe brief.<|end|>"
        "<|start|>assistant\n"
    ]


async def test_tools_and_reasoning_in_the_prompt(server: MemoryServer, script: Script) -> None:
    await answer(server, tools=[WEATHER, {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}])
    tools = script.prompts[-1].removeprefix("<|start|>tools\n").partition("<|end|>")[0]
    function = {"name": "weather", "description": "The weather", "parameters": SCHEMA}
    assert json.loads(tools) == [{"type": "function", "function": function}]
    await answer(server, tools=[WEATHER], tool_choice={"type": "none"})
    assert script.prompts[-1] == "<|start|>user\nHi<|end|><|start|>assistant\n"
    script.answer = "Let me see.\n</think>\n\nYes."
    thinking: dict[str, Any] = {"type": "enabled", "budget_tokens": 1024}
    found = await answer(server, thinking=thinking)
    assert script.prompts[-1].endswith("<|start|>assistant\n<think>\n")
    assert [block.get("thinking") or block.get("text") for block in found["content"]] == ["Let me see.", "Yes."]
    omitted = {"type": "adaptive", "display": "omitted"}
    found = await answer(server, thinking=omitted)
    blocks = [{"type": "thinking", "thinking": "", "signature": "unsigned"}, {"type": "text", "text": "Yes."}]
    assert found["content"] == blocks
    assert put_together(await events(server, thinking=omitted))["content"] == blocks
    script.answer = "Yes."
    await answer(server, thinking={"type": "disabled"}, output_config={"effort": "low"})
    assert script.prompts[-1].endswith("<|start|>assistant\n")


async def test_a_last_message_of_the_assistant_is_continued(server: MemoryServer, script: Script) -> None:
    found = await answer(server, messages=[USER, {"role": "assistant", "content": "The answer is ("}])
    assert script.prompts == ["<|start|>user\nHi<|end|><|start|>assistant\nThe answer is ("]
    assert found["content"] == [{"type": "text", "text": "Hello there."}]


@pytest.mark.parametrize(("choice", "names"), [("any", {"weather", "clock"}), ("tool", {"weather"})])
async def test_a_call_that_is_asked_for_is_made(
    server: MemoryServer, script: Script, choice: str, names: set[str]
) -> None:
    script.answer = "I would rather talk."
    said = {"type": choice, "disable_parallel_tool_use": True, **({"name": "weather"} if choice == "tool" else {})}
    found = await answer(server, tools=[WEATHER, CLOCK], tool_choice=said)
    (block,) = found["content"]
    assert (block["type"], found["stop_reason"]) == ("tool_use", "tool_use")
    assert block["name"] in names
    jsonschema.validate(block["input"], SCHEMA if block["name"] == "weather" else {"type": "object"})


@pytest.mark.parametrize("said", [{"output_config": {"format": FORM}}, {"output_format": FORM}])
async def test_an_answer_follows_the_schema(server: MemoryServer, said: dict[str, Any]) -> None:
    found = await answer(server, **said)
    jsonschema.validate(json.loads(found["content"][0]["text"]), SCHEMA)


BLOCK = "messages[0].content"
ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "'max_tokens'"),
    ({"messages": []}, "'messages'"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 3}]}, "a string or an array of blocks"),
    ({"messages": [{"role": "user", "content": [3]}]}, "an object with a type at index 0"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "content[0].image.source"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "blocks of type 'document'"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text.text"),
    ({"messages": [{"role": "user", "content": [CALLED]}]}, "'tool_use' do not belong to the role 'user'"),
    ({"messages": [{"role": "user", "content": [RESULT]}]}, "no 'tool_use' before it has the id 'toolu_1'"),
    (
        {"messages": [USER, {"role": "assistant", "content": [CALLED]}, {"role": "user", "content": [
            {**RESULT, "content": [{"type": "image"}]}]}]},
        "blocks of type 'image'",
    ),
    ({"messages": [USER, {"role": "assistant", "content": [CALLED]}]}, "has no 'tool_result' after it"),
    ({"messages": [USER, {"role": "assistant", "content": ""}]}, "must have a text"),
    ({"system": [{"type": "image"}]}, "blocks of type 'image'"),
    ({"temperature": 3.0}, "'temperature'"),
    ({"top_k": -1}, "'top_k'"),
    ({"stop_sequences": [""]}, "'stop_sequences[0]'"),
    ({"stop_sequences": ["x"] * 17}, "'stop_sequences'"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"type": "strange_1", "name": "f"}]}, "'strange_1'"),
    ({"tools": [WEATHER, WEATHER]}, "'weather' twice"),
    ({"tool_choice": {"type": "any"}}, "'tool_choice'"),
    ({"tools": [CLOCK], "tool_choice": {"type": "tool"}}, "'tool_choice.name'"),
    ({"tools": [CLOCK], "tool_choice": {"type": "auto", "name": "clock"}}, "'tool_choice.name'"),
    ({"tools": [CLOCK], "tool_choice": {"type": "tool", "name": "weather"}}, "'weather' is not among"),
    ({"thinking": {"type": "enabled"}}, "'thinking.budget_tokens'"),
    ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "'thinking.budget_tokens'"),
    ({"output_config": {"effort": "extreme"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}}, "output_config.format"),
    ({"container": "c_1"}, "'container' is not supported"),
    ({"mcp_servers": [{"name": "m"}]}, "'mcp_servers' is not supported"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0].type"),
    ({"unheard_of": 1}, "unheard_of"),
    ({"thinking": {"type": "adaptive", "display": "loud"}}, "thinking.display"),
    ({"thinking": {"type": "adaptive", "block_binding": {"unheard_of": 1}}}, "block_binding.unheard_of"),
    ({"output_config": {"task_budget": {"type": "words", "total": 9}}}, "output_config.task_budget.type"),
    ({"output_format": FORM, "output_config": {"format": FORM}}, "'output_format' parameter is the older name"),
    ({"output_format": {"type": "json_schema", "schema": {"type": "nothing"}}}, "'output_format.schema'"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "text"), ERRORS)
async def test_errors_name_the_field(server: MemoryServer, body: dict[str, Any], text: str) -> None:
    for stream in (False, True):
        response = await post(server, **body, stream=stream)
        found = response.json()
        assert response.status_code == 400, found
        assert found["type"] == "error"
        assert found["error"]["type"] == "invalid_request_error"
        assert text in found["error"]["message"]
        assert found["request_id"] == response.headers["x-request-id"]


async def test_fields_without_effect_are_accepted(server: MemoryServer, script: Script) -> None:
    assert fields.IGNORED & fields.NEUTRAL.keys() == set()
    assert not (fields.IGNORED | fields.NEUTRAL.keys()) & fields.MessagesRequest.model_fields.keys()
    plain = without_ids(await answer(server))
    said = {key: {"any": "value"} for key in fields.IGNORED} | {name: one[0] for name, one in fields.NEUTRAL.items()}
    said["context_management"] = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    said["output_config"] = {"task_budget": {"type": "tokens", "total": 20_000, "remaining": 9_000}}
    assert without_ids(await answer(server, **said)) == plain
    assert len(script.prompts) == 1
    script.answer = "Hm.\n</think>\n\nYes."
    plain = without_ids(await answer(server, thinking={"type": "adaptive"}))
    for binding in ({}, {"prefix_mismatch_behavior": "drop_block"}, None):
        thinking = {"type": "adaptive", "display": "updates", "block_binding": binding}
        assert without_ids(await answer(server, thinking=thinking)) == plain
    assert plain["content"][0]["thinking"] == "Hm."


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
async def test_a_thread_is_refused_so_that_tool_runners_go_on_without_it(
    server: MemoryServer, thread: dict[str, Any]
) -> None:
    for stream in (False, True):
        response = await post(server, thread=thread, stream=stream)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["type"], error["details"]) == (
            "invalid_request_error",
            {"error_code": "thread_unsupported_request"},
        )
        assert "'thread' is not supported" in error["message"]
    other = (await post(server, container="c_1")).json()["error"]
    assert other.keys() == {"type", "message"}


async def until_window(server: MemoryServer, room: int) -> str:
    """Return a text of the user after whose prompt that many tokens fit the window. Here a character is a token."""
    num_tokens = (await post(server, COUNT)).json()["input_tokens"]
    return USER["content"] + "x" * (WINDOW - num_tokens - room)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("excess", [0, 1, 250])
async def test_a_prompt_that_does_not_fit_is_too_long_in_anthropics_words(
    server: MemoryServer, stream: bool, excess: int
) -> None:
    messages = [{"role": "user", "content": await until_window(server, -excess)}]
    counted = (await post(server, COUNT, messages=messages)).json()["input_tokens"]
    assert counted == WINDOW + excess
    response = await post(server, messages=messages, max_tokens=128_000, stream=stream)
    assert response.status_code == 400
    maximum = WINDOW if excess else WINDOW - 1  # an answer needs a token
    assert response.json()["error"] == {
        "type": "invalid_request_error",
        "message": f"prompt is too long: {counted} tokens > {maximum} maximum",
    }


async def test_a_prompt_too_long_by_its_bytes_says_that_it_was_not_counted(server: MemoryServer) -> None:
    messages = [{"role": "user", "content": "x" * 30_000}]
    counted = (await post(server, COUNT, messages=messages)).json()["input_tokens"]
    response = await post(server, messages=messages)
    found = re.fullmatch(
        rf"prompt is too long: (\d+) tokens > {WINDOW} maximum \(it has at least \1 tokens; it was not counted\)",
        response.json()["error"]["message"],
    )
    assert found is not None, response.text
    assert WINDOW < int(found[1]) <= counted


async def test_max_tokens_beyond_the_window_fills_it(server: MemoryServer, script: Script) -> None:
    script.answer = "x" * 2_000
    messages = [{"role": "user", "content": await until_window(server, 40)}]
    for max_tokens, reason in (
        (128_000, "model_context_window_exceeded"),
        (41, "model_context_window_exceeded"),
        (40, "max_tokens"),
        (39, "max_tokens"),
    ):
        said: dict[str, Any] = {"messages": messages, "max_tokens": max_tokens}
        for found in (await answer(server, **said), put_together(await events(server, **said))):
            assert found["stop_reason"] == reason
            assert found["usage"]["output_tokens"] == min(40, max_tokens)
            assert found["content"] == [{"type": "text", "text": "x" * min(40, max_tokens)}]
    script.answer = "Short."
    assert (await answer(server, messages=messages, max_tokens=128_000))["stop_reason"] == "end_turn"


async def test_statuses_are_anthropics(server: MemoryServer) -> None:
    unknown = await post(server, model="claude")
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")
    path = await server.client.post("/v1/messages/batches", json={})
    assert (path.status_code, path.json()["error"]["type"]) == (404, "not_found_error")
    long = await post(server, messages=[{"role": "user", "content": "x" * 100_000}])
    assert (long.status_code, long.json()["error"]["type"]) == (413, "request_too_large")
    status = server.engine_status
    status.is_cut_off = True
    down = await post(server)
    assert (down.status_code, down.json()["error"]["type"]) == (529, "overloaded_error")
    assert down.headers["retry-after"]
    count = await post(server, COUNT)
    assert count.status_code == 529
    status.is_cut_off = False


async def test_too_many_requests_are_a_rate_limit(tools_folder: Path, script: Script) -> None:
    async with scripted_server(tools_folder, script, limit=1) as server:
        server.gate.close()
        waiting = server.service.live.submit([], prompt_param="x", room=1)
        response = await post(server)
        assert (response.status_code, response.json()["error"]["type"]) == (429, "rate_limit_error")
        server.service.live.close(waiting)
        server.gate.open()


async def test_an_error_in_a_stream_is_an_event(server: MemoryServer, script: Script) -> None:
    script.answer = "x" * 200
    lines = await interrupted(server, MESSAGES, {"messages": [USER], "max_tokens": 300, "stream": True})
    assert lines[0] == "event: message_start"
    assert lines[-2] == "event: error"
    error = json.loads(lines[-1].removeprefix("data: "))
    assert error["error"] == {"type": "overloaded_error", "message": "The engine process died."}
    assert error["request_id"]
    assert lines.count("event: error") == 1


async def test_counts_include_tools_system_and_reasoning(server: MemoryServer, script: Script) -> None:
    body: dict[str, Any] = {
        "messages": HISTORY,
        "system": "Be kind.",
        "tools": [WEATHER],
        "thinking": {"type": "adaptive"},
    }
    counted = (await post(server, COUNT, **body)).json()["input_tokens"]
    assert script.prompts == []  # nothing was computed
    usage = (await answer(server, **body))["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
    refused = await post(server, COUNT, messages=[{"role": "user", "content": [{"type": "image"}]}])
    assert refused.status_code == 400
    refused = await post(server, COUNT, max_tokens=5)
    assert "max_tokens" in refused.json()["error"]["message"]


def coding_turn(line: str, turn: int) -> dict[str, Any]:
    """Return what Claude Code sends: a history that grows by a call and its result, and a line that always differs."""
    line = f"{line}: cc_version=2.1.{turn}; cc_entrypoint=cli; cch={turn * 7919 % 65_536:04x};"
    rules = "You are a careful programmer. Read before you write; run the tests after each change. " * 12
    history: list[dict[str, Any]] = [{"role": "user", "content": "Fix the failing test in parser.py."}]
    for i in range(turn):
        called = {**CALLED, "id": f"toolu_{i}", "input": {"city": f"place {i}"}}
        result = {**RESULT, "tool_use_id": f"toolu_{i}", "content": f"Result {i}: " + "line of output " * 8}
        history.append({"role": "assistant", "content": [{"type": "text", "text": "Looking further."}, called]})
        history.append({"role": "user", "content": [result]})
    return {
        "system": [{"type": "text", "text": line}, {"type": "text", "text": rules, "cache_control": CACHED}],
        "messages": history,
        "tools": [WEATHER, CLOCK],
        "max_tokens": 1,
    }


async def hit_rate(server: MemoryServer, line: str, *, num_turns: int) -> float:
    """Return cached tokens per prompt token of the turns after the first."""
    num_cached = num_prompt = 0
    for turn in range(num_turns):
        usage = (await answer(server, **coding_turn(line, turn)))["usage"]
        if turn:
            num_cached += usage["cache_read_input_tokens"]
            num_prompt += usage["cache_read_input_tokens"] + usage["input_tokens"]
    return num_cached / num_prompt


async def test_the_line_that_coding_clients_change_does_not_cost_the_cache(tools_folder: Path) -> None:
    async with scripted_server(tools_folder, None, max_length=16_384, num_pages=4_096) as server:
        assert await hit_rate(server, "x-anthropic-billing-header", num_turns=40) > 0.9
        # With a line that is not stripped, only the tools before it are found again.
        assert await hit_rate(server, "x-other-header", num_turns=40) < 0.2


async def test_the_line_is_stripped_wherever_it_stands_in_the_system_prompt(
    server: MemoryServer, script: Script
) -> None:
    await answer(server, system="One.\nx-anthropic-billing-header: a=b;\nTwo.")
    await answer(server, system="x-anthropic-billing-header: a=c;")
    kept = "x-anthropic-billing-header: what is it?"
    await answer(server, messages=[{"role": "user", "content": kept}])
    assert [prompt.partition("<|end|>")[0] for prompt in script.prompts] == [
        "<|start|>system\nOne.\nTwo.",
        "<|start|>user\nHi",
        f"<|start|>user\n{kept}",
    ]


def test_the_block_of_a_call_that_broke_off_ends_where_other_text_begins() -> None:
    counts = Usage(5, 3, 8, PromptTokensDetails(0))
    stream = MessageFormat(id="msg_1", model="echo", request_id="r").stream(lambda: counts)
    pieces = ["tool_call weather", 'arguments {"city":', "content x", "content y", "tool_call clock", "arguments {}"]
    pieces += ["call_end ", "content late", "reasoning hm"]
    parts = [wire.Part(cast("Any", kind), text) for kind, _, text in (piece.partition(" ") for piece in pieces)]
    sent = b""
    for i, part in enumerate(parts):
        finish = FinishReason.STOP if i == len(parts) - 1 else None
        sent += stream.take(0, wire.Answer("a", "", finish, False, None, 5, 0, 3, parts=(part,)))
    found = [json.loads(block.split(b"data: ")[1]) for block in (sent + stream.end()).split(b"\n\n")[:-1]]
    begun = [one["content_block"]["type"] for one in found if one["type"] == "content_block_start"]
    assert begun == ["tool_use", "text", "tool_use", "text", "thinking"]
    inputs = {one["index"]: one["delta"]["partial_json"] for one in found if "partial_json" in one.get("delta", {})}
    assert inputs == {0: '{"city":', 2: "{}"}
    assert found[-2]["delta"]["stop_reason"] == "end_turn"  # one of the calls is not whole
