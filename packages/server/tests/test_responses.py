"""Conformance of `/v1/responses`: every response and event passes OpenAI's types, and streams equal their responses."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from openai.types.responses import ResponseItemList

from leaving_client import Client
from memory_server import MemoryServer
from pagewood.server.http.errors import unavailable
from response_events import assembled, checked, events_of, without_ids
from scripted import scripted_server

pytestmark = pytest.mark.anyio

PATH = "/v1/responses"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {"type": "function", "name": "weather", "description": "The weather", "parameters": SCHEMA}
CLOCK: dict[str, Any] = {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}}
TOOLS: list[dict[str, Any]] = [WEATHER, CLOCK]
ARGUMENTS = '{"city": "Oslo", "days": 2}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
LOGPROBS = ["message.output_text.logprobs"]


class Script:
    """The answers of the model, one after the other, and the prompts that it saw. The last answer is repeated."""

    def __init__(self) -> None:
        self.answers = ["Hello there."]
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str:
        if prompt not in self.prompts:
            self.prompts.append(prompt)
        return self.answers[min(self.prompts.index(prompt), len(self.answers) - 1)]


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
async def server(tools_folder: Path, script: Script) -> AsyncGenerator[MemoryServer]:
    async with scripted_server(tools_folder, script) as server:
        yield server


async def respond(server: MemoryServer, given: Any = "Hi", **fields: Any) -> dict[str, Any]:
    """Return the response to a request, asked for whole; it is compared with the stream."""
    response = await server.post(PATH, {"input": given, **fields})
    assert response.status_code == 200, response.text
    body = checked(response.json())
    last = (await stream(server, given, **fields))[-1]["response"]
    usage = last["usage"]
    if usage is not None and body["usage"] is not None:  # the second request finds the prefix of the first
        usage["input_tokens_details"] = body["usage"]["input_tokens_details"]
    assert without_ids(last) == without_ids(body)
    return body


async def stream(server: MemoryServer, given: Any = "Hi", **fields: Any) -> list[dict[str, Any]]:
    response = await server.post(PATH, {"input": given, "stream": True, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.text)
    assembled(events_of(response.text))
    return events


async def refused(server: MemoryServer, body: dict[str, Any], *, status: int = 400) -> dict[str, Any]:
    """Return the error of a request, which must be the same whether it asks for a stream or not."""
    found: list[dict[str, Any]] = []
    for is_stream in (False, True):
        response = await server.post(PATH, {"input": "Hi", "stream": is_stream, **body})
        assert response.status_code == status, response.text
        found.append(response.json()["error"])
    assert found[0] == found[1]
    return found[0]


def types(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


def calls_of(response: dict[str, Any]) -> list[tuple[str, str]]:
    return [(item["name"], item["arguments"]) for item in response["output"] if item["type"] == "function_call"]


# Text


async def test_text(server: MemoryServer) -> None:
    response = await respond(server, metadata={"trace": "7"}, user="u", prompt_cache_key="k", safety_identifier="s")
    assert text_of(response) == "Hello there."
    (message,) = response["output"]
    assert message["id"].startswith("msg_")
    assert (message["status"], message["role"]) == ("completed", "assistant")
    assert message["content"] == [{"type": "output_text", "text": "Hello there.", "annotations": [], "logprobs": []}]
    assert response["status"] == "completed"
    assert response["completed_at"] >= response["created_at"]
    repeated: dict[str, Any] = {
        "metadata": {"trace": "7"},
        "user": "u",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
    }
    defaults: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "truncation": "disabled",
    }
    for name, value in (repeated | defaults).items():
        assert response[name] == value
    assert (response["store"], response["parallel_tool_calls"], response["background"]) == (True, True, False)


async def test_settings_are_repeated(server: MemoryServer) -> None:
    response = await respond(
        server, temperature=0.5, top_p=0.9, max_output_tokens=50, max_tool_calls=3, instructions="Be brief.",
        reasoning={"effort": "low", "summary": "auto"}, tools=TOOLS, tool_choice="none", parallel_tool_calls=False,
        store=False,
    )  # fmt: skip
    expected = {
        "temperature": 0.5, "top_p": 0.9, "max_output_tokens": 50, "max_tool_calls": 3, "instructions": "Be brief.",
        "tool_choice": "none", "parallel_tool_calls": False, "store": False,
        "reasoning": {"effort": "low", "summary": "auto"}, "text": {"format": {"type": "text"}, "verbosity": "medium"},
    }  # fmt: skip
    assert {name: response[name] for name in expected} == expected
    assert [tool["name"] for tool in response["tools"]] == ["weather", "clock"]
    assert response["tools"][0] == {**WEATHER, "strict": False}


async def test_events_of_a_text(server: MemoryServer, script: Script) -> None:
    script.answers = ["Hé"]
    assert types(await stream(server)) == [
        "created", "in_progress",
        "output_item.added", "content_part.added",
        "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip


async def test_an_empty_answer_is_an_empty_message(server: MemoryServer, script: Script) -> None:
    script.answers = [""]
    response = await respond(server)
    assert [item["type"] for item in response["output"]] == ["message"]
    assert text_of(response) == ""


async def test_forms_of_input(server: MemoryServer, script: Script) -> None:
    """A string, a plain message and parts are the same prompt."""
    part = {"type": "input_text", "text": "Hi"}
    for given in (
        "Hi",
        [{"role": "user", "content": "Hi"}],
        [{"type": "message", "role": "user", "content": [part]}],
        [{"type": "message", "id": "msg_1", "status": "completed", "role": "user", "content": [part]}],
    ):
        await respond(server, given)
    assert script.prompts == ["<|start|>user\nHi<|end|><|start|>assistant\n"]


async def test_instructions_and_developer_messages_are_one_system_message(server: MemoryServer, script: Script) -> None:
    given = [
        {"role": "developer", "content": "Two."},
        {"role": "system", "content": [{"type": "input_text", "text": "Three."}]},
        {"role": "user", "content": "Hi"},
        {"role": "developer", "content": "Later."},
    ]
    await respond(server, given, instructions="One.")
    assert script.prompts == [
        "<|start|>system\nOne.\n\nTwo.\n\nThree.<|end|><|start|>user\nHi<|end|><|start|>system\nLater.<|end|>"
        "<|start|>assistant\n"
    ]


async def test_usage(server: MemoryServer, script: Script) -> None:
    script.answers = ["<think>\nabc</think>\n\nHello"]
    prompt = "<|start|>user\nHi<|end|><|start|>assistant\n"
    num_prompt = len(server.tokenizer.encode(prompt, add_special_tokens=False))
    usage = (await respond(server))["usage"]
    num_output = len(script.answers[0]) + 1  # a token for each byte, and the end
    assert usage["input_tokens"] == num_prompt
    assert usage["output_tokens"] == num_output
    assert usage["total_tokens"] == num_prompt + num_output
    assert usage["output_tokens_details"]["reasoning_tokens"] == len("<think>\nabc")
    again = await server.post(PATH, {"input": "Hi"})
    assert again.json()["usage"]["input_tokens_details"]["cached_tokens"] > 0


# The end


async def test_incomplete_text(server: MemoryServer) -> None:
    response = await respond(server, max_output_tokens=5)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["completed_at"] is None
    assert (text_of(response), response["output"][0]["status"]) == ("Hello", "incomplete")
    assert response["usage"]["output_tokens"] == 5


async def test_incomplete_call(server: MemoryServer, script: Script) -> None:
    script.answers = ["Wait." + CALL]
    response = await respond(server, tools=TOOLS, max_output_tokens=len("Wait." + CALL) - 20)
    message, call = response["output"]
    assert (response["status"], message["status"], call["status"]) == ("incomplete", "completed", "incomplete")
    assert call["name"] == "weather"


async def test_stop_string(server: MemoryServer) -> None:
    response = await respond(server, stop=[" the"])
    assert (response["status"], text_of(response)) == ("completed", "Hello")


# Reasoning


async def test_reasoning(server: MemoryServer, script: Script) -> None:
    script.answers = ["<think>\nLet me see.\n</think>\n\nIt is 4."]
    response = await respond(server)
    reasoning, message = response["output"]
    assert reasoning == {
        "type": "reasoning", "id": reasoning["id"], "status": "completed", "summary": [], "encrypted_content": None,
        "content": [{"type": "reasoning_text", "text": "Let me see."}],
    }  # fmt: skip
    assert reasoning["id"].startswith("rs_")
    assert message["content"][0]["text"] == "It is 4."
    kinds = types(await stream(server))
    expected = [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [kind for i, kind in enumerate(kinds) if kinds[i - 1] != kind] == expected


async def test_effort_reaches_the_template(server: MemoryServer, script: Script) -> None:
    """The template opens the reasoning itself if the effort is not "none"."""
    script.answers = ["Deep.</think>Done."]
    response = await respond(server, reasoning={"effort": "high"})
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    script.answers = ["", "Done."]
    response = await respond(server, reasoning={"effort": "none"})
    assert [item["type"] for item in response["output"]] == ["message"]
    assert [prompt.endswith("<think>\n") for prompt in script.prompts] == [True, False]


@pytest.mark.parametrize("form", ["content", "encrypted", "summary"])
async def test_reasoning_is_sent_back(server: MemoryServer, script: Script, form: str) -> None:
    script.answers = ["<think>\nHm.\n</think>\n\n" + CALL, "Rain."]
    tools: dict[str, Any] = {"tools": TOOLS, "include": ["reasoning.encrypted_content"]}
    first = (await server.post(PATH, {"input": "Hi", **tools})).json()
    reasoning, call = first["output"]
    assert reasoning["encrypted_content"]
    if form == "encrypted":
        del reasoning["content"]
    elif form == "summary":
        reasoning = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]}
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "wet"}
    response = await respond(server, [{"role": "user", "content": "Hi"}, reasoning, call, output], **tools)
    assert text_of(response) == "Rain."
    assert script.prompts[1].count("<|start|>assistant\n") == 2  # reasoning and call are one turn
    assert "<think>\nHm.\n</think>\n\n<tool_call>" in script.prompts[1]


async def test_foreign_encrypted_reasoning(server: MemoryServer) -> None:
    item: dict[str, Any] = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"}
    error = await refused(server, {"input": [item, {"role": "user", "content": "Hi"}]})
    assert (error["param"], error["code"]) == ("input[0].encrypted_content", "invalid_encrypted_content")


# Tools


async def test_call(server: MemoryServer, script: Script) -> None:
    script.answers = [CALL]
    response = await respond(server, tools=TOOLS)
    (call,) = response["output"]
    assert calls_of(response) == [("weather", ARGUMENTS)]
    assert call["id"].startswith("fc_")
    assert call["call_id"].startswith("call_")
    assert (call["status"], response["status"]) == ("completed", "completed")
    assert '"name": "weather"' in script.prompts[0]
    events = await stream(server, tools=TOOLS)
    kinds = types(events)
    assert [kind for i, kind in enumerate(kinds) if kinds[i - 1] != kind] == [
        "created", "in_progress",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert kinds.count("function_call_arguments.delta") > 3
    added, done = events[2]["item"], events[-2]["item"]
    assert (added["id"], added["call_id"], added["name"]) == (done["id"], done["call_id"], done["name"])


async def test_text_and_parallel_calls(server: MemoryServer, script: Script) -> None:
    script.answers = [f"Let me look.\n{CALL}\n{SECOND}"]
    response = await respond(server, tools=TOOLS)
    assert [item["type"] for item in response["output"]] == ["message", "function_call", "function_call"]
    assert calls_of(response) == [("weather", ARGUMENTS), ("clock", "{}")]
    ids = [item[name] for item in response["output"] for name in ("id", "call_id") if name in item]
    assert len(set(ids)) == 5


async def test_one_call_at_a_time(server: MemoryServer, script: Script) -> None:
    script.answers = [f"{CALL}\n{SECOND}"]
    response = await respond(server, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert calls_of(response) == [("weather", ARGUMENTS)]


async def test_tool_round_trip(server: MemoryServer, script: Script) -> None:
    """Parallel calls, both results, and the answer."""
    script.answers = [f"{CALL}\n{SECOND}", "Rain at noon."]
    first = (await server.post(PATH, {"input": "Hi", "tools": TOOLS})).json()
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": output}
        for item, output in zip(first["output"], ["wet", [{"type": "input_text", "text": "12:00"}]], strict=True)
    ]
    second = await respond(server, [{"role": "user", "content": "Hi"}, *first["output"], *outputs], tools=TOOLS)
    assert text_of(second) == "Rain at noon."
    assert script.prompts[1].count("<|start|>assistant\n") == 2
    assert script.prompts[1].endswith("<|start|>tool\nwet<|end|><|start|>tool\n12:00<|end|><|start|>assistant\n")


async def test_required(server: MemoryServer, script: Script) -> None:
    script.answers = ["I would rather talk."]  # the grammar does not let it
    response = await respond(server, tools=TOOLS, tool_choice="required", max_output_tokens=400)
    assert response["output"][0]["type"] == "function_call"
    assert "message" not in {item["type"] for item in response["output"]}


async def test_named(server: MemoryServer, script: Script) -> None:
    script.answers = [SECOND]
    choice = {"type": "function", "name": "weather"}
    response = await respond(server, tools=TOOLS, tool_choice=choice, max_output_tokens=400)
    assert response["tool_choice"] == choice
    (name, arguments), *_ = calls_of(response)
    assert name == "weather"
    if response["status"] == "completed":
        jsonschema.validate(json.loads(arguments), SCHEMA)


async def test_allowed(server: MemoryServer, script: Script) -> None:
    script.answers = [SECOND]
    allowed = [{"type": "function", "name": "clock"}, {"type": "mcp", "server_label": "x"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": allowed}
    response = await respond(server, tools=TOOLS, tool_choice=choice)
    assert calls_of(response) == [("clock", "{}")]
    assert "weather" not in script.prompts[0]


async def test_no_tools(server: MemoryServer, script: Script) -> None:
    await respond(server, tools=TOOLS, tool_choice="none")
    assert "weather" not in script.prompts[0]


async def test_tools_of_other_types_are_skipped(server: MemoryServer, script: Script) -> None:
    others: list[dict[str, Any]] = [
        {"type": "web_search", "external_web_access": True},
        {"type": "file_search", "vector_store_ids": []},
        {"type": "mcp", "server_label": "x"},
        {"type": "local_shell"},
        {"type": "tool_of_next_year"},
    ]
    response = await respond(server, tools=[*others, WEATHER])
    assert [tool["name"] for tool in response["tools"]] == ["weather"]
    assert "web_search" not in script.prompts[0]
    assert (await respond(server, "Ho", tools=others))["tools"] == []


# Custom tools, namespaces and agents


def called(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def test_custom_tool_round_trip(server: MemoryServer, script: Script) -> None:
    patch = '*** Begin Patch\n+say("\u00e9\\n")\n*** End Patch'
    script.answers = [called("apply_patch", {"input": patch}), "Done."]
    format = {"type": "grammar", "syntax": "lark", "definition": "start: begin hunk+ end"}
    tools = [{"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": format}]
    response = await respond(server, "Edit", tools=tools)
    assert response["tools"] == tools
    (call,) = response["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "apply_patch", patch)
    assert call["id"].startswith("ctc_")
    assert "start: begin hunk+ end" in script.prompts[0]
    output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "patched"}
    user = {"role": "user", "content": "Edit"}
    assert text_of(await respond(server, [user, call, output], tools=tools)) == "Done."
    assert "patched" in script.prompts[-1]
    assert "Begin Patch" in script.prompts[-1]


async def test_text_of_a_custom_tool_comes_in_pieces(server: MemoryServer, script: Script) -> None:
    script.answers = [called("shell", {"input": "echo one two three"})]
    events = await stream(server, tools=[{"type": "custom", "name": "shell"}])
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == "echo one two three"
    assert len(deltas) > 3


async def test_other_arguments_of_a_custom_tool_are_its_text(server: MemoryServer, script: Script) -> None:
    script.answers = [called("shell", {"command": "ls"})]
    (call,) = (await respond(server, tools=[{"type": "custom", "name": "shell"}]))["output"]
    assert json.loads(call["input"]) == {"command": "ls"}


@pytest.mark.parametrize("is_allowed", [False, True])
async def test_custom_tool_that_must_be_called(server: MemoryServer, script: Script, is_allowed: bool) -> None:
    script.answers = [called("shell", {"input": "ls"})]
    choice: dict[str, Any] = {"type": "custom", "name": "shell"}
    if is_allowed:
        choice = {"type": "allowed_tools", "mode": "required", "tools": [choice]}
    response = await respond(server, tools=[{"type": "custom", "name": "shell"}, CLOCK], tool_choice=choice)
    assert [(item["type"], item.get("input")) for item in response["output"]] == [("custom_tool_call", "ls")]


async def test_namespace(server: MemoryServer, script: Script) -> None:
    """Functions of two namespaces may have one name; calls say which is meant, and come back so."""
    script.answers = [called("crew__clock", {}) + "\n" + called("crew__write", {"input": "x"}), "Noon."]
    inner = [CLOCK, {"type": "custom", "name": "write"}, {"type": "web_search"}]
    tools = [CLOCK, {"type": "namespace", "name": "crew", "description": "Agents", "tools": inner}]
    response = await respond(server, tools=tools)
    assert [tool["type"] for tool in response["tools"][1]["tools"]] == ["function", "custom"]
    calls = response["output"]
    assert [(call["type"], call["namespace"], call["name"]) for call in calls] == [
        ("function_call", "crew", "clock"),
        ("custom_tool_call", "crew", "write"),
    ]
    given: list[Any] = [{"role": "user", "content": "Hi"}, *calls]
    for call in calls:
        kind = call["type"] + "_output"
        output = [{"type": "input_text", "text": "no"}, {"type": "input_text", "text": "on"}]
        given.append({"type": kind, "call_id": call["call_id"], "output": output})
    assert text_of(await respond(server, given, tools=tools)) == "Noon."
    assert "crew__clock" in script.prompts[-1]
    assert "<|start|>tool\nnoon<|end|>" in script.prompts[-1]


async def test_tools_in_the_conversation(server: MemoryServer, script: Script) -> None:
    script.answers = [SECOND]
    given = [{"type": "additional_tools", "role": "developer", "tools": [CLOCK]}, {"role": "user", "content": "Hi"}]
    response = await respond(server, given)
    assert calls_of(response) == [("clock", "{}")]
    assert "clock" in script.prompts[0]
    listed = await server.client.get(f"{PATH}/{response['id']}/input_items")
    ResponseItemList.model_validate(listed.json())
    assert {item["type"] for item in listed.json()["data"]} == {"additional_tools", "message"}


async def test_search_for_tools(server: MemoryServer, script: Script) -> None:
    """The client searches; what it finds can be called from then on, and is not offered twice."""
    script.answers = [called("tool_search", {"query": "time"}), called("crew__clock", {}), "Noon."]
    search: dict[str, Any] = {
        "type": "tool_search", "execution": "client", "description": "Searches.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    }  # fmt: skip
    response = await respond(server, tools=[search, {"type": "tool_search"}])
    assert response["tools"] == [search]
    (call,) = response["output"]
    assert (call["type"], call["arguments"], call["execution"]) == ("tool_search_call", {"query": "time"}, "client")
    inner = [{**CLOCK, "defer_loading": True}]
    tools = [{"type": "namespace", "name": "crew", "description": "Agents", "tools": inner}]
    output = {"type": "tool_search_output", "call_id": call["call_id"], "status": "completed", "tools": tools}
    given: list[Any] = [{"role": "user", "content": "Hi"}, call, output, {**call, "call_id": "b"}]
    given.append({**output, "call_id": "b", "execution": "client"})
    (second,) = (await respond(server, given, tools=[search]))["output"]
    assert (second["type"], second["namespace"], second["name"]) == ("function_call", "crew", "clock")
    assert '{"tools": ["crew__clock"]}' in script.prompts[-1]
    done = {"type": "function_call_output", "call_id": second["call_id"], "output": "12"}
    response = await respond(server, [*given, second, done], tools=[search])
    assert text_of(response) == "Noon."
    listed = (await server.client.get(f"{PATH}/{response['id']}/input_items")).json()
    ResponseItemList.model_validate(listed)


async def test_message_of_an_agent(server: MemoryServer, script: Script) -> None:
    content = [
        {"type": "input_text", "text": "Task:\n"},
        {"type": "encrypted_content", "encrypted_content": "List the files."},
    ]
    given = [{"type": "agent_message", "id": "amsg_1", "author": "/root", "recipient": "/root/a", "content": content}]
    response = await respond(server, given)
    assert "<|start|>user\nTask:\nList the files.<|end|>" in script.prompts[0]
    await respond(server, "Go on", previous_response_id=response["id"])


async def test_custom_calls_of_other_servers(server: MemoryServer, script: Script) -> None:
    call = {"type": "custom_tool_call", "id": "ctc_1", "call_id": "call_1", "name": "apply_patch", "input": "*** x"}
    output = {"type": "custom_tool_call_output", "call_id": "call_1", "output": "done"}
    await respond(server, [{"role": "user", "content": "Hi"}, call, output])
    assert "apply_patch" in script.prompts[0]
    assert "*** x" in script.prompts[0]
    assert "<|start|>tool\ndone<|end|>" in script.prompts[0]


# Structured output


async def test_schema(server: MemoryServer, script: Script) -> None:
    script.answers = [ARGUMENTS]
    format = {"type": "json_schema", "name": "trip", "schema": SCHEMA, "strict": True}
    response = await respond(server, text={"format": format})
    assert json.loads(text_of(response)) == {"city": "Oslo", "days": 2}
    assert response["text"]["format"] == format
    script.answers = ["", "No JSON"]
    forced = await respond(server, "Ho", text={"format": format}, max_output_tokens=400)
    if forced["status"] == "completed":
        jsonschema.validate(json.loads(text_of(forced)), SCHEMA)
    assert text_of(forced).startswith("{")


async def test_json_object(server: MemoryServer, script: Script) -> None:
    script.answers = ['{"a": 1}']
    response = await respond(server, text={"format": {"type": "json_object"}})
    assert json.loads(text_of(response)) == {"a": 1}


# Log probabilities


async def test_logprobs(server: MemoryServer, script: Script) -> None:
    script.answers = ["<think>\nHm\n</think>\n\nHé!"]
    response = await respond(server, include=LOGPROBS, top_logprobs=2)
    logprobs = response["output"][1]["content"][0]["logprobs"]
    data = b"".join(bytes(entry["bytes"]) for entry in logprobs)
    assert data.decode().endswith("Hé!")
    assert "Hm" not in data.decode()
    assert {len(entry["top_logprobs"]) for entry in logprobs} == {2}
    assert response["top_logprobs"] == 2
    plain = await respond(server, "Ho", include=LOGPROBS)
    assert {len(entry["top_logprobs"]) for entry in plain["output"][1]["content"][0]["logprobs"]} == {0}


# Kept responses


async def test_previous_response(server: MemoryServer, script: Script) -> None:
    script.answers = ["One.", "Two.", "Three."]
    first = (await server.post(PATH, {"input": "a", "instructions": "Count."})).json()
    second = (await server.post(PATH, {"input": "b", "previous_response_id": first["id"]})).json()
    third = await respond(server, "c", previous_response_id=second["id"])
    assert third["previous_response_id"] == second["id"]
    assert text_of(third) == "Three."
    turns = [("user", "a"), ("assistant", "One."), ("user", "b"), ("assistant", "Two."), ("user", "c")]
    expected = "".join(f"<|start|>{role}\n{text}<|end|>" for role, text in turns)
    assert script.prompts[2] == expected + "<|start|>assistant\n"  # without the instructions of the first
    await server.client.delete(f"{PATH}/{first['id']}")  # each response has its whole conversation
    assert text_of(await respond(server, "c", previous_response_id=second["id"])) == "Three."


async def test_previous_response_with_a_call(server: MemoryServer, script: Script) -> None:
    script.answers = ["<think>\nHm.\n</think>\n\n" + CALL, "Rain."]
    events = await stream(server, tools=TOOLS)
    first = events[-1]["response"]
    output = {"type": "function_call_output", "call_id": first["output"][1]["call_id"], "output": "wet"}
    second = await respond(server, [output], previous_response_id=first["id"], tools=TOOLS)
    assert text_of(second) == "Rain."
    assert "<think>\nHm.\n</think>\n\n<tool_call>" in script.prompts[1]


async def test_kept_response(server: MemoryServer) -> None:
    response = (await server.post(PATH, {"input": "a"})).json()
    path = f"{PATH}/{response['id']}"
    assert (await server.client.get(path)).json() == response
    assert (await server.client.get(path, params={"stream": "true"})).status_code == 400
    cancelled = await server.client.post(f"{path}/cancel")
    assert (cancelled.status_code, cancelled.json()["error"]["code"]) == (400, "not_cancellable")
    deleted = await server.client.delete(path)
    assert deleted.json() == {"id": response["id"], "object": "response", "deleted": True}
    for method, end in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        missing = await server.client.request(method, path + end)
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "response_not_found")
    error = await refused(server, {"previous_response_id": response["id"]})
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")


async def test_a_server_that_keeps_none_says_so(server: MemoryServer) -> None:
    app = dataclasses.replace(server.frontend, keeps_responses=False).app()
    body = {"model": server.service.model_name, "input": "Hi"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=server.client.base_url) as client:
        response = (await client.post(PATH, json=body)).json()
        assert (response["status"], response["store"]) == ("completed", False)
        found = [
            await client.post(PATH, json=body | {"store": True}),
            await client.post(PATH, json=body | {"previous_response_id": response["id"]}),
            await client.get(f"{PATH}/{response['id']}"),
            await client.delete(f"{PATH}/{response['id']}"),
        ]
    errors = [one.json()["error"] for one in found]
    assert [one.status_code for one in found] == [400] * 4
    assert [error["param"] for error in errors] == ["store", "previous_response_id", "id", "id"]
    assert {error["code"] for error in errors} == {"responses_not_kept"}


async def test_input_items(server: MemoryServer, script: Script) -> None:
    script.answers = [CALL, "Rain."]
    first = (await server.post(PATH, {"input": "a", "tools": TOOLS})).json()
    output = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "wet"}
    second = (await server.post(PATH, {"input": [output], "previous_response_id": first["id"]})).json()
    path = f"{PATH}/{second['id']}/input_items"
    page = (await server.client.get(path, params={"order": "asc"})).json()
    ResponseItemList.model_validate(page)
    assert [item["type"] for item in page["data"]] == ["message", "function_call", "function_call_output"]
    assert page["data"][1]["id"] == first["output"][0]["id"]
    assert not page["has_more"]
    assert page["data"][0]["content"] == [{"type": "input_text", "text": "a"}]
    newest = (await server.client.get(path, params={"limit": "2"})).json()
    assert ([item["type"] for item in newest["data"]], newest["has_more"]) == (
        ["function_call_output", "function_call"],
        True,
    )
    rest = (await server.client.get(path, params={"after": newest["last_id"]})).json()
    assert [item["type"] for item in rest["data"]] == ["message"]
    for params in ({"limit": "0"}, {"limit": "101"}, {"order": "up"}, {"after": "msg_none"}):
        assert (await server.client.get(path, params=params)).json()["error"]["param"] in params


async def test_responses_that_are_not_stored(server: MemoryServer) -> None:
    response = await respond(server, store=False)
    assert (await server.client.get(f"{PATH}/{response['id']}")).status_code == 404


# Errors


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "image_url"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]}, "input[0].content"),
        ({"input": [{"role": "system", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "sometimes"}, "truncation"),
        ({"include": ["everything"]}, "include"),
        ({"include": 5}, "include"),
        ({"include": [["everything"]]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"temperature": 3}, "temperature"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"text": {"verbosity": "huge"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 5}}}}, "text.format"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"colour": "red"}, "colour"),
    ],
)
async def test_refused(server: MemoryServer, fields: dict[str, Any], param: str) -> None:
    error = await refused(server, fields)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"]


async def test_unknown_model(server: MemoryServer) -> None:
    assert (await refused(server, {"model": "other"}, status=404))["code"] == "model_not_found"


@pytest.mark.parametrize("truncation", ["auto", "disabled"])
async def test_too_long(server: MemoryServer, truncation: str) -> None:
    fitting = await respond(server, truncation=truncation)
    assert (fitting["status"], fitting["truncation"]) == ("completed", truncation)
    for said in ({"input": "x" * 2000}, {"input": "x", "max_output_tokens": 5000}):
        error = await refused(server, {**said, "truncation": truncation})
        assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("name", ["input_tokens", "compact"])
async def test_what_is_not_there_is_not_taken_for_a_kept_response(server: MemoryServer, name: str) -> None:
    for method in ("POST", "GET"):
        missing = await server.client.request(method, f"{PATH}/{name}", json={"model": "echo", "input": "Hi"})
        assert missing.status_code == 404
    assert (await server.client.post(f"{PATH}/{name}", json={})).json()["error"]["code"] == "unknown_path"
    assert (await server.client.post(f"{PATH}/resp_1", json={})).status_code == 405


async def test_failure_in_a_stream(server: MemoryServer) -> None:
    """What was sent stays, then come the error and the response that failed."""
    server.gate.allow(6)
    client = Client(server, {"model": "echo", "input": "Hi", "stream": True}, path=PATH)
    text = ""
    async for message in client.messages():
        text += message.get("body", b"").decode()
        if "output_text.delta" in text and server.service.live.num_live:
            server.service.live.fail_all(unavailable("The engine process died.", code="engine_lost"))
    server.gate.open()
    events = events_of(text)
    items = assembled(events_of(text))
    assert types(events)[-2:] == ["error", "failed"]
    assert (events[-2]["code"], events[-2]["message"]) == ("engine_lost", "The engine process died.")
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert text_of(failed) == items[0]["content"][0]["text"] != ""
    assert failed["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_disconnect_aborts(server: MemoryServer, script: Script, is_stream: bool) -> None:
    """A client that leaves ends its request in the engine."""
    script.answers = ["x" * 200]
    server.gate.allow(2)
    client = Client(server, {"model": "echo", "input": "Hi", "stream": is_stream}, path=PATH)
    await server.until(lambda: server.gate.is_held)
    await client.leave()
    assert (server.service.live.num_live, server.service.live.num_ending) == (0, 1)
    await server.until(lambda: server.has_command_at_gate)
    server.gate.open()
    await server.until_idle()
    assert server.service.status.counters["num_tokens"] < 50


# Clients


async def test_what_codex_sends(server: MemoryServer, script: Script) -> None:
    """The fields of its version 0.169, and its second turn."""
    script.answers = [CALL, "Rain."]
    fields: dict[str, Any] = {
        "tools": [
            {**WEATHER, "strict": False},
            {"type": "namespace", "name": "agents", "tools": []},
            {"type": "web_search", "external_web_access": True},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a20334",
        "client_metadata": {"session_id": "01a20334"},
    }
    given: list[Any] = [
        {"type": "message", "id": "msg_1", "role": "developer", "content": [{"type": "input_text", "text": "A"}]},
        {"type": "message", "id": "msg_2", "role": "developer", "content": [{"type": "input_text", "text": "B"}]},
        {"type": "message", "id": "msg_3", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    ]
    (call,) = (await stream(server, given, **fields))[-1]["response"]["output"]
    sent = {name: call[name] for name in ("type", "id", "name", "arguments", "call_id")}
    output = {"type": "function_call_output", "id": "fco_1", "call_id": call["call_id"], "output": "wet"}
    assert text_of(await respond(server, [*given, sent, output], **fields)) == "Rain."
