"""Answers that end early: at a length, within a call, at a stop string, or behind the only call that they may have."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from echo_folder import TOOLS_TEMPLATE, write_echo_folder
from memory_server import MemoryServer
from pagewood.engine.text import Tokenizer
from scripted import Script, scripted_server

pytestmark = pytest.mark.anyio

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
TWO = f"{CALL}\n{SECOND}"
HALF = CALL[: CALL.index("slo")]
ARGUMENTS = {"city": "Oslo", "days": 2}
USER = {"role": "user", "content": "Hi"}
PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "ollama": "/api/chat",
}  # fmt: skip
PROTOCOLS = list(PATHS)
Said = tuple[str, list[tuple[str, Any]], str]
"""Content, complete calls, and why the answer ended, in the words of chat completions."""


@pytest.fixture
async def server(tools_folder: Path, script: Script) -> AsyncGenerator[MemoryServer]:
    async with scripted_server(tools_folder, script) as server:
        yield server


def body(protocol: str, *, max_tokens: int = 300, stop: list[str] | None = None, **extra: Any) -> dict[str, Any]:
    functions = [tool["function"] for tool in TOOLS]
    match protocol:
        case "chat":
            said = {"messages": [USER], "tools": TOOLS, "max_tokens": max_tokens, "stop": stop}
        case "responses":
            tools = [{"type": "function", **function} for function in functions]
            said = {"input": "Hi", "tools": tools, "max_output_tokens": max_tokens, "stop": stop}
        case "messages":
            tools = [{"name": one["name"], "input_schema": one["parameters"]} for one in functions]
            said = {"messages": [USER], "tools": tools, "max_tokens": max_tokens, "stop_sequences": stop}
        case _:
            options = {"num_predict": max_tokens, **({"stop": stop} if stop else {})}
            said = {"messages": [USER], "tools": TOOLS, "options": options, "stream": False}
    return {"model": "echo", **{key: value for key, value in said.items() if value is not None}, **extra}


def read(protocol: str, answer: dict[str, Any]) -> Said:
    match protocol:
        case "chat":
            (choice,) = answer["choices"]
            calls = [call["function"] for call in choice["message"].get("tool_calls", [])]
            found = [(call["name"], json.loads(call["arguments"])) for call in calls]
            return choice["message"]["content"] or "", found, choice["finish_reason"]
        case "responses":
            texts = [item["content"][0]["text"] for item in answer["output"] if item["type"] == "message"]
            items = [item for item in answer["output"] if item["type"] == "function_call"]
            done = [item for item in items if item["status"] == "completed"]
            found = [(item["name"], json.loads(item["arguments"])) for item in done]
            if answer["status"] == "incomplete":
                assert answer["incomplete_details"] in ({"reason": "max_output_tokens"}, {})
                return "".join(texts), found, "length" if answer["incomplete_details"] else "stop"
            return "".join(texts), found, "tool_calls" if items else "stop"
        case "messages":
            texts = [block["text"] for block in answer["content"] if block["type"] == "text"]
            found = [(block["name"], block["input"]) for block in answer["content"] if block["type"] == "tool_use"]
            reasons = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls", "stop_sequence": "stop"}
            return "".join(texts), found, reasons[answer["stop_reason"]]
        case _:
            message = answer["message"]
            calls = [call["function"] for call in message.get("tool_calls", [])]
            found = [(call["name"], call["arguments"]) for call in calls]
            reason = answer["done_reason"]
            return message["content"], found, "tool_calls" if reason == "stop" and found else reason


async def ask(server: MemoryServer, protocol: str, **fields: Any) -> Said:
    response = await server.client.post(PATHS[protocol], json=body(protocol, **fields))
    assert response.status_code == 200, response.text
    return read(protocol, response.json())


async def lines(server: MemoryServer, protocol: str, **fields: Any) -> list[dict[str, Any]]:
    response = await server.client.post(PATHS[protocol], json={**body(protocol, **fields), "stream": True})
    assert response.status_code == 200, response.text
    found = [line.removeprefix("data: ") for line in response.text.splitlines()]
    return [json.loads(line) for line in found if line.startswith("{")]


# A call that is not complete


@pytest.mark.parametrize(
    ("before", "protocol"),
    [
        *(("", protocol) for protocol in PROTOCOLS),
        *(("I look.\n", protocol) for protocol in PROTOCOLS[:2]),
        *((f"{SECOND}\n", protocol) for protocol in PROTOCOLS[1:]),
    ],
)
async def test_half_a_call_is_none(server: MemoryServer, script: Script, protocol: str, before: str) -> None:
    content = before.strip() if before.startswith("I") else ""
    calls: list[tuple[str, Any]] = [("clock", {})] if before.startswith("<") else []
    script.answer = before + HALF  # the model ends it itself
    found = await ask(server, protocol)
    reason = "tool_calls" if protocol == "ollama" and calls else "stop"  # it has no word for calls
    assert found == (content, calls, reason)
    script.answer = before + CALL
    for end in (len(HALF), len(CALL) - len("}\n</tool_call>"), CALL.index(" {") + 2):
        assert await ask(server, protocol, max_tokens=len(before) + end) == (content, calls, "length")
    found = await ask(server, protocol)
    assert found == (content, [*calls, ("weather", ARGUMENTS)], "tool_calls")


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_pieces_of_the_format_are_not_shown_at_a_cut(server: MemoryServer, script: Script, protocol: str) -> None:
    script.answer = f"<think>\nHm.\n</think>\n\nSo.\n{TWO}"
    calls: list[tuple[str, Any]] = [("weather", ARGUMENTS), ("clock", {})]
    start = script.answer.index("So.")
    for end in [*range(1, start, 4), *range(start + 3, len(script.answer), 17)]:
        content, found, reason = await ask(server, protocol, max_tokens=end)
        assert (content, reason) == ("" if end < start else "So.", "length")
        closed = [CALL, TWO]
        assert found == [call for call, text in zip(calls, closed, strict=True) if _closes(script.answer, text, end)]


def _closes(answer: str, text: str, end: int) -> bool:
    """Return whether the object of the last call in `text` is closed before `end`."""
    return answer.index(text) + len(text) - len("\n</tool_call>") <= end


async def test_a_model_may_end_with_what_could_begin_a_mark(server: MemoryServer, script: Script) -> None:
    for text in ("It is a <", "See <tool", "<tool_call>\n{broken"):
        script.answer = text
        assert await ask(server, "chat") == (text, [], "stop")


async def test_a_stream_of_half_a_call_has_what_the_model_wrote(server: MemoryServer, script: Script) -> None:
    script.answer = HALF
    half = '{"city": "O'
    chunks = await lines(server, "chat")
    calls = [call for one in chunks for call in one["choices"][0]["delta"].get("tool_calls", [])]
    assert "".join(call["function"]["arguments"] for call in calls) == half
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    events = await lines(server, "messages")
    assert "".join(one["delta"].get("partial_json", "") for one in events if "delta" in one) == half
    assert [one["type"] for one in events[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[-2]["delta"]["stop_reason"] == "end_turn"
    events = await lines(server, "responses")
    names = [one["type"] for one in events]
    assert "response.function_call_arguments.done" not in names
    assert (events[-2]["item"]["arguments"], events[-2]["item"]["status"]) == (half, "incomplete")
    assert names[-1] == "response.incomplete"
    found = await lines(server, "ollama")
    assert all("tool_calls" not in one["message"] for one in found)
    assert found[-1]["done_reason"] == "stop"


async def test_half_the_text_of_a_custom_tool_is_incomplete(server: MemoryServer, script: Script) -> None:
    script.answer = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin'
    asked = {"model": "echo", "input": "Hi", "tools": [{"type": "custom", "name": "patch"}]}
    answer = (await server.post(PATHS["responses"], asked)).json()
    (item,) = answer["output"]
    assert (answer["status"], item["type"], item["status"]) == ("incomplete", "custom_tool_call", "incomplete")
    assert item["input"] == "*** Begin"
    script.answer = "Once more."
    again = {"model": "echo", "input": "Go on.", "previous_response_id": answer["id"]}
    assert (await server.post(PATHS["responses"], again)).json()["status"] == "completed"
    assert "Begin" not in script.prompts[-1]
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}
    response = await server.post(PATHS["responses"], {"model": "echo", "input": [USER, item, output, USER]})
    assert response.status_code == 200, response.text
    assert "Begin" not in script.prompts[-1]


# Stop strings


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_stop_strings_act_on_content_only(server: MemoryServer, script: Script, protocol: str) -> None:
    script.answer = f"<think>\nHm STOP.\n</think>\n\nYes, STOP it is.\n{CALL}"
    assert await ask(server, protocol, stop=["STOP"]) == ("Yes, ", [], "stop")
    script.answer = f"<think>\nHm.\n\nWell.\n</think>\n\nI look.\n\n{CALL}"
    for stop in ("slo", "Well", "\n\n", "\n", "</", "<tool"):  # in the arguments, in the reasoning, in no content
        assert await ask(server, protocol, stop=[stop]) == ("I look.", [("weather", ARGUMENTS)], "tool_calls")


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_stop_string_does_not_match_across_a_call(server: MemoryServer, script: Script, protocol: str) -> None:
    script.answer = f"a b{CALL}c d"
    expected = [("weather", ARGUMENTS)]
    assert (await ask(server, protocol, stop=["bc", "b\nc"]))[:2] == ("a b\nc d", expected)
    content, calls, _ = await ask(server, protocol, stop=["c"])
    assert (content.strip(), calls) == ("a b", expected)


async def test_a_stop_string_of_white_space_leaves_a_required_call(server: MemoryServer, script: Script) -> None:
    script.answer = CALL
    found = await ask(server, "chat", stop=["\n"], tool_choice="required")
    assert found == ("", [("weather", ARGUMENTS)], "tool_calls")


async def test_streams_hold_back_what_may_become_a_stop_string(server: MemoryServer, script: Script) -> None:
    script.answer = "<think>\nEND\n</think>\n\nIt is the EN of the END, or not."
    for fields in ({"stop": ["END"]}, {"stop_regex": "EN[C-E]"}):
        shown = ""
        for one in await lines(server, "chat", **fields):
            shown += one["choices"][0]["delta"].get("content", "")
            assert "It is the EN of the ".startswith(shown)
        assert shown == "It is the EN of the "


@pytest.mark.parametrize("tools", [True, False])
async def test_tokens_behind_a_stop_string_do_not_count(server: MemoryServer, script: Script, tools: bool) -> None:
    reasoning = "<think>\nHm.\n</think>\n\n"
    script.answer = f"{reasoning}It is\nso."
    said = {"messages": [USER], "stop": ["\n"], "logprobs": True, **({"tools": TOOLS} if tools else {})}
    answer = (await server.post(PATHS["chat"], said)).json()
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("It is", "stop")
    # Where a call may follow, white space is content when more text follows.
    num_tokens = len(f"{reasoning}It is\n") + tools
    assert answer["usage"]["completion_tokens"] == num_tokens
    assert len(choice["logprobs"]["content"]) == num_tokens


async def test_the_name_of_a_stop_sequence(server: MemoryServer, script: Script) -> None:
    script.answer = "<think>\nb\n</think>\n\na b c"
    answer = (await server.client.post(PATHS["messages"], json=body("messages", stop=["c", "b"]))).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "b")


# One call at most


@pytest.mark.parametrize(
    ("protocol", "fields"),
    [
        ("chat", {"parallel_tool_calls": False}),
        ("responses", {"parallel_tool_calls": False}),
        ("messages", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
    ],
)
async def test_without_parallel_calls_an_answer_has_one(
    server: MemoryServer, script: Script, protocol: str, fields: dict[str, Any]
) -> None:
    script.answer = f"I look.\n{TWO} and more"
    assert await ask(server, protocol, **fields) == ("I look.", [("weather", ARGUMENTS)], "tool_calls")
    response = await server.client.post(PATHS[protocol], json=body(protocol, **fields))
    usage = response.json()["usage"]
    num_tokens = usage.get("completion_tokens") or usage["output_tokens"]
    assert num_tokens == len(f"I look.\n{CALL}") - len("\n</tool_call>")


async def test_without_parallel_calls_each_answer_has_one(server: MemoryServer, script: Script) -> None:
    script.answer = TWO
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    both = [{"type": "function", "function": {"name": name}} for name in ("weather", "clock")]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": both}}
    for fields in ({"n": 3}, {"tools": strict}, {"tool_choice": allowed}, {"tool_choice": "required"}):
        said = {"messages": [USER], "tools": TOOLS, "parallel_tool_calls": False, "max_tokens": 300, **fields}
        for choice in (await server.post(PATHS["chat"], said)).json()["choices"]:
            assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]
            assert choice["finish_reason"] == "tool_calls"


# Log probabilities


async def test_hidden_reasoning_has_no_log_probabilities(server: MemoryServer, script: Script) -> None:
    reasoning = "<think>\nHm. Secret.\n</think>"
    script.answer = f"{reasoning}\n\nYes."
    said = {"messages": [USER], "logprobs": True, "include_reasoning": False}
    answer = (await server.post(PATHS["chat"], said)).json()
    (choice,) = answer["choices"]
    assert "".join(one["token"] for one in choice["logprobs"]["content"]).endswith("\n\nYes.")
    assert "Secret" not in json.dumps(answer)
    tokens = [one["token"] for one in choice["logprobs"]["content"]]
    assert not set(tokens) & set("Hm.Secret") - set("<think>Yes.")
    assert answer["usage"]["completion_tokens"] == len(script.answer) + 1
    streamed: list[str] = []
    response = await server.post(PATHS["chat"], {**said, "stream": True})
    for line in response.text.split("\n\n")[:-2]:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        streamed += [one["token"] for one in choice["logprobs"]["content"]] if choice["logprobs"] else []
    assert streamed == tokens


async def test_marks_that_begin_no_section_match_no_stop_string(tmp_path: Path) -> None:
    fields = {"reasoning_content": {"open": "<|start|>thinks\n", "close": "<|start|>says\n"}, "content": {}}
    write_echo_folder(tmp_path, chat_template=TOOLS_TEMPLATE, template={"version": 1, "fields": fields})
    script = Script()
    script.answer = "<|start|>thinks\nHm.<|start|>says\nYes<|start|>ter, or no."
    async with MemoryServer(tmp_path, Tokenizer.from_folder(tmp_path), limit=8, script=script) as server:
        for stop, content in (("start", "Yester, or no."), ("ster", "Ye")):
            answer = (await server.post(PATHS["chat"], {"messages": [USER], "stop": stop})).json()
            assert answer["choices"][0]["message"]["content"] == content
