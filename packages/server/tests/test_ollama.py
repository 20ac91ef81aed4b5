"""Ollama's protocol: the prompt that the model sees, and what clients get of its answer."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from memory_server import MemoryServer
from pagewood.engine.api import SamplingParams
from pagewood.server.protocols.common.formats import Tally, usage
from pagewood.server.protocols.ollama import fields, options
from pagewood.server.protocols.ollama.format import OllamaFormat
from pagewood.server.protocols.ollama.lenient import MAX_LOOKED_AT, log_ignored
from scripted import Script, interrupted, scripted_server

pytestmark = pytest.mark.anyio

CHAT = "/api/chat"
GENERATE = "/api/generate"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather", "parameters": SCHEMA},
}
USER = {"role": "user", "content": "Hi"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
CLOCK_CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture
async def server(tools_folder: Path, script: Script) -> AsyncGenerator[MemoryServer]:
    async with scripted_server(tools_folder, script) as server:
        yield server


async def post(server: MemoryServer, path: str, **body: Any) -> httpx.Response:
    asked: dict[str, Any] = {CHAT: {"messages": [USER]}, GENERATE: {"prompt": "Hi"}}.get(path, {})
    return await server.client.post(path, json={"model": "echo", **asked, **body})


async def whole(server: MemoryServer, path: str, **body: Any) -> dict[str, Any]:
    response = await post(server, path, stream=False, **body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    return response.json()


async def lines(server: MemoryServer, path: str, **body: Any) -> list[dict[str, Any]]:
    response = await post(server, path, **body)  # a stream is the default
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    found = [json.loads(line) for line in response.text.splitlines()]
    assert [one["done"] for one in found] == [False] * (len(found) - 1) + [True]
    return found


def said(answer: dict[str, Any]) -> dict[str, Any]:
    """Return what a line says, in the words of a message."""
    if "message" in answer:
        return answer["message"]
    return {"content": answer["response"], "thinking": answer.get("thinking", "")}


def put_together(found: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "content": "".join(said(one)["content"] for one in found),
        "thinking": "".join(said(one).get("thinking", "") for one in found),
        "calls": [call["function"] for one in found for call in said(one).get("tool_calls", [])],
        "done_reason": found[-1]["done_reason"],
        "counts": (found[-1]["prompt_eval_count"], found[-1]["eval_count"]),
    }


ANSWERS: list[tuple[str, dict[str, Any]]] = [
    ("It rains.", {"content": "It rains."}),
    ("", {}),
    ("<think>\nHm.\n</think>\n\nYes.", {"content": "Yes.", "thinking": "Hm."}),
    (
        f"One moment.\n{CALL}\n{CLOCK_CALL}",
        {
            "content": "One moment.",
            "calls": [
                {"index": 0, "name": "weather", "arguments": {"city": "Oslo"}},
                {"index": 1, "name": "clock", "arguments": {}},
            ],
        },
    ),
]


@pytest.mark.parametrize(("text", "expected"), ANSWERS)
async def test_a_message_is_the_same_whole_and_streamed(
    server: MemoryServer, script: Script, text: str, expected: dict[str, Any]
) -> None:
    script.answer = text
    clock = {"type": "function", "function": {"name": "clock"}}
    found = put_together([await whole(server, CHAT, tools=[WEATHER, clock])])
    assert found == {
        "content": "",
        "thinking": "",
        "calls": [],
        "done_reason": "stop",
        **expected,
        "counts": (found["counts"][0], len(text) + 1),
    }
    stream = await lines(server, CHAT, tools=[WEATHER, clock])
    assert put_together(stream) == found
    assert all(one["model"] == "echo" and one["message"]["role"] == "assistant" for one in stream)
    for one in stream:
        datetime.fromisoformat(one["created_at"])


@pytest.mark.parametrize("text", ["It rains.", "<think>\nHm.\n</think>\n\nYes."])
async def test_a_text_is_the_same_whole_and_streamed(server: MemoryServer, script: Script, text: str) -> None:
    script.answer = text
    found = put_together([await whole(server, GENERATE)])
    assert (found["content"], found["thinking"]) == (("Yes.", "Hm.") if "think" in text else (text, ""))
    assert put_together(await lines(server, GENERATE)) == found


async def test_durations_are_nanoseconds_of_the_request(server: MemoryServer) -> None:
    for last in (await whole(server, GENERATE), (await lines(server, GENERATE))[-1]):
        total, load, prompt, answer = [last[name] for name in DURATIONS]
        assert load == 0
        assert 0 < prompt + answer <= total < 60e9
        assert answer > 0
    assert not any(name in line for line in (await lines(server, GENERATE))[:-1] for name in DURATIONS)


def test_the_wait_for_a_load_is_no_time_of_the_prompt() -> None:
    format = OllamaFormat(model="m", is_chat=False, started_s=10.0, load_s=2.0, clock=lambda: 15.0)
    last = format.last("stop", 13.0, usage([Tally()], is_speculating=False))
    assert [getattr(last, name) for name in DURATIONS] == [5e9, 2e9, 1e9, 2e9]


async def test_the_prompt_that_the_model_sees(server: MemoryServer, script: Script) -> None:
    history: list[dict[str, Any]] = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Weather?", "images": []},
        {
            "role": "assistant",
            "content": "",
            "thinking": "Look.",
            "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Oslo"}, "index": 0}}],
        },
        {"role": "tool", "content": "rain", "tool_name": "weather"},
    ]
    await whole(server, CHAT, messages=history)
    call = json.dumps({"name": "weather", "arguments": {"city": "Oslo"}})
    assert script.prompts[-1] == (
        "<|start|>system\nBe kind.<|end|><|start|>user\nWeather?<|end|>"
        f"<|start|>assistant\n<think>\nLook.\n</think>\n\n<tool_call>\n{call}\n</tool_call><|end|>"
        "<|start|>tool\nrain<|end|><|start|>assistant\n"
    )
    await whole(server, GENERATE, system="Be kind.")
    assert script.prompts[-1] == "<|start|>system\nBe kind.<|end|><|start|>user\nHi<|end|><|start|>assistant\n"
    await whole(server, GENERATE, raw=True)
    assert script.prompts[-1] == "Hi"
    await whole(server, CHAT, tools=[WEATHER])
    tools = script.prompts[-1].removeprefix("<|start|>tools\n").partition("<|end|>")[0]
    assert json.loads(tools) == [WEATHER]
    script.answer = "Hm.\n</think>\n\nYes."
    for think in (True, "low"):
        found = await whole(server, CHAT, think=think)
        assert script.prompts[-1].endswith("<|start|>assistant\n<think>\n")
        assert (found["message"]["thinking"], found["message"]["content"]) == ("Hm.", "Yes.")


async def test_options_say_how_the_answer_ends(server: MemoryServer, script: Script) -> None:
    script.answer = "one two three"
    found = await whole(server, GENERATE, options={"num_predict": 3})
    assert (found["response"], found["done_reason"], found["eval_count"]) == ("one", "length", 3)
    found = await whole(server, GENERATE, options={"num_predict": -1, "stop": ["three"]})
    assert (found["response"], found["done_reason"]) == ("one two", "stop")


def test_options_say_how_tokens_are_chosen() -> None:
    body: dict[str, Any] = {
        "model": "m",
        "prompt": "x",
        "options": {
            "temperature": 0.5,
            "top_k": 7,
            "top_p": 0.9,
            "min_p": 0.1,
            "typical_p": 0.8,
            "seed": 11,
            "num_predict": 9,
            "repeat_penalty": 1.3,
            "presence_penalty": 0.2,
            "frequency_penalty": 0.3,
            "num_ctx": 50,
        },
    }

    def sampling(**said: Any) -> SamplingParams:
        request = fields.parse_generate(json.dumps({**body, "options": {**body["options"], **said}}).encode())
        return fields.sampling(request, SamplingParams(), grammar=None)

    expected = SamplingParams(
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.1,
        typical_p=0.8,
        seed=11,
        max_tokens=9,
        repetition_penalty=1.3,
        presence_penalty=0.2,
        frequency_penalty=0.3,
    )
    assert sampling() == expected
    assert sampling(repeat_last_n=-1) == sampling(repeat_last_n=64) == expected
    off = sampling(repeat_last_n=0, seed=-1, num_predict=-2, top_p=0.0, top_k=-1)
    assert (off.repetition_penalty, off.presence_penalty, off.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (off.seed, off.max_tokens, off.temperature, off.top_k) == (None, None, 0.0, 0)


async def test_formats_are_followed(server: MemoryServer) -> None:
    for path in (CHAT, GENERATE):
        text = said(await whole(server, path, format=SCHEMA))["content"]
        jsonschema.validate(json.loads(text), SCHEMA)
        text = said(await whole(server, path, format="json", options={"num_predict": 100}))["content"]
        assert text.lstrip().startswith("{")
        assert said(await whole(server, path, format=""))["content"] == "Hello there."


async def test_log_probabilities(server: MemoryServer, script: Script) -> None:
    script.answer = "Hé!"
    found = (await whole(server, GENERATE, logprobs=True, top_logprobs=2))["logprobs"]
    assert b"".join(bytes(one["bytes"]) for one in found).decode() == script.answer
    assert all(one["logprob"] <= 0 and len(one["top_logprobs"]) == 2 for one in found)
    stream = await lines(server, GENERATE, logprobs=True, top_logprobs=2)
    assert [one for line in stream for one in line.get("logprobs", [])] == found
    assert "logprobs" not in await whole(server, GENERATE)


@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_a_request_without_a_prompt_has_the_model_loaded(server: MemoryServer, path: str) -> None:
    empty: dict[str, Any] = {"messages": []} if path == CHAT else {"prompt": ""}
    for found in (await whole(server, path, **empty, keep_alive=0), *await lines(server, path, **empty)):
        assert (found["done"], found["done_reason"], said(found)["content"]) == (True, "load", "")


async def test_the_name_may_have_a_tag(server: MemoryServer) -> None:
    assert (await whole(server, CHAT, model="echo:latest"))["model"] == "echo:latest"
    for path in (CHAT, GENERATE, "/api/show"):
        response = await post(server, path, model="echo:7b")
        assert (response.status_code, list(response.json())) == (404, ["error"])
        assert "'echo:7b' does not exist" in response.json()["error"]


async def test_the_model_is_described(server: MemoryServer) -> None:
    (listed,) = (await server.client.get("/api/tags")).json()["models"]
    assert listed["name"] == listed["model"] == "echo:latest"
    (running,) = (await server.client.get("/api/ps")).json()["models"]
    assert {**running, **listed} == running
    assert running["context_length"] == 1600
    for body in ({"model": "echo"}, {"name": "echo:latest", "model": None, "verbose": True}):
        shown = (await server.client.post("/api/show", json=body)).json()
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
        architecture = shown["model_info"]["general.architecture"]
        assert shown["model_info"][f"{architecture}.context_length"] == 1600
    assert (await server.client.get("/api/version")).json()["version"].count(".") == 2
    server.engine_status.is_cut_off = True
    assert (await server.client.get("/api/ps")).json() == {"models": []}
    down = await post(server, CHAT)
    assert (down.status_code, list(down.json())) == (503, ["error"])
    server.engine_status.is_cut_off = False


ERRORS: list[tuple[str, dict[str, Any], str]] = [
    (GENERATE, {"suffix": "x"}, "'suffix' is not supported"),
    (GENERATE, {"template": "x"}, "'template' is not supported"),
    (GENERATE, {"context": [1]}, "'context' is not supported"),
    (GENERATE, {"prompt": "x", "images": ["x"]}, "must be base64"),
    (GENERATE, {"raw": True, "images": ["x"]}, "'images' parameter is not available"),
    (GENERATE, {"raw": True, "system": "x"}, "'system' parameter is not available"),
    (CHAT, {"messages": [{**USER, "images": ["x"]}]}, "must be base64"),
    (CHAT, {"messages": [{"role": "system", "content": "", "images": ["x"]}]}, "messages[0].images"),
    (CHAT, {"messages": [{"role": "nobody", "content": ""}]}, "messages[0].role"),
    (CHAT, {"tools": [WEATHER, WEATHER]}, "'weather' twice"),
    (CHAT, {"tools": [{"type": "strange", "function": {"name": "f"}}]}, "tools[0].type"),
    (CHAT, {"format": "xml"}, "'json' or a JSON schema"),
    (CHAT, {"format": {"type": "nothing"}}, "'format'"),
    (CHAT, {"think": "a lot"}, "'low', 'medium' or 'high'"),
    (CHAT, {"top_logprobs": 2}, "'top_logprobs'"),
    (CHAT, {"options": {"temperature": "hot"}}, "options.temperature"),
    (CHAT, {"options": 3}, "options"),
    (CHAT, {"options": {"num_ctx": "long"}}, "options.num_ctx"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 1600}]}, "maximum context length is 1600 tokens"),
    ("/api/show", {"model": None}, "'model'"),
]


@pytest.mark.parametrize(("path", "body", "text"), ERRORS)
async def test_errors_name_the_field(server: MemoryServer, path: str, body: dict[str, Any], text: str) -> None:
    for streamed in ({}, {"stream": False}) if path != "/api/show" else ({},):
        response = await post(server, path, **streamed, **body)
        assert response.status_code == 400, response.text
        assert list(response.json()) == ["error"]
        assert text in response.json()["error"]


def own_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what this protocol has written to the log, whatever others have."""
    return [
        record.getMessage() for record in caplog.records if record.name.startswith("pagewood.server.protocols.ollama")
    ]


async def test_fields_without_effect_are_accepted(
    server: MemoryServer, script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    assert not options.IGNORED & options.OllamaOptions.model_fields.keys()
    known = fields.IGNORED | fields.GENERATE_NEUTRAL.keys()
    assert not known & (fields.OllamaGenerateRequest.model_fields.keys() | fields.OllamaChatRequest.model_fields.keys())
    plain = put_together([await whole(server, GENERATE)])
    body: dict[str, Any] = {
        **dict.fromkeys(fields.IGNORED, "5m"),
        **{name: allowed[-1] for name, allowed in fields.GENERATE_NEUTRAL.items()},
        "options": dict.fromkeys(options.IGNORED, 1) | {"repeat_last_n": -1, "num_ctx": 1600},
    }
    with caplog.at_level("INFO", "pagewood.server.protocols.ollama"):
        assert put_together([await whole(server, GENERATE, **body)]) == plain
    assert own_lines(caplog) == []
    assert len(script.prompts) == 1


def test_long_lists_are_not_searched_whole_for_what_is_not_known(caplog: pytest.LogCaptureFixture) -> None:
    known: list[dict[str, Any]] = [USER] * (MAX_LOOKED_AT - 1)
    body = {"model": "echo", "messages": [*known, {**USER, "early": 1}, {**USER, "late": 1}]}
    request = fields.parse_chat(json.dumps(body).encode())
    with caplog.at_level("INFO", "pagewood.server.protocols.ollama"):
        log_ignored(request)
    assert own_lines(caplog) == ["without effect: messages[].early"]


async def test_what_is_not_known_is_ignored_with_a_line_in_the_log(
    server: MemoryServer, script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    plain = put_together([await whole(server, CHAT, tools=[WEATHER])])
    body: dict[str, Any] = {
        "messages": [{**USER, "name": "x"}],
        "tools": [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}],
        "tool_choice": "auto",
        "max_output_tokens": 4,
        "options": {"num_ctx": 8200, "repeat_last_n": 64, "mirostat": 2, "unheard_of": [1]},
    }
    with caplog.at_level("INFO", "pagewood.server.protocols.ollama"):
        assert put_together([await whole(server, CHAT, **body)]) == plain
        assert own_lines(caplog) == [
            "without effect: tool_choice, max_output_tokens, options.mirostat, options.unheard_of, messages[].name, "
            "tools[].function.strict, options.num_ctx above 1600, options.repeat_last_n above 0"
        ]
        assert len(script.prompts) == 1
        caplog.clear()
        many = {f"field-{i}\n": i for i in range(12)} | {"x" * 10_000: 1}
        assert (await post(server, "/api/show", **many)).status_code == 200
        (line,) = own_lines(caplog)
        assert line.startswith("without effect: 'field-0\\n', ")
        assert line.endswith("'field-9\\n' and 3 more")


async def test_a_heartbeat_finds_the_server(server: MemoryServer) -> None:
    for headers in ({"accept": "application/json"}, {"accept": "*/*"}, {"accept": ""}):  # Go's client, curl, neither
        for method in ("GET", "HEAD"):
            response = await server.client.request(method, "/", headers=headers)
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/plain")
            assert method == "HEAD" or response.text == "Ollama is running"
    assert (await server.client.post("/", json={})).status_code == 404


async def test_num_predict_beyond_the_window_fills_it(server: MemoryServer, script: Script) -> None:
    script.answer = "y" * 2_000
    num_prompt = (await whole(server, CHAT, options={"num_predict": 1}))["prompt_eval_count"]
    for path in (CHAT, GENERATE):
        said: dict[str, Any] = {"options": {"num_predict": 128_000}}
        found = await whole(server, path, **said) if path == CHAT else (await lines(server, path, **said))[-1]
        assert (found["done_reason"], found["eval_count"]) == ("length", 1600 - num_prompt)


async def test_a_last_message_of_the_assistant_is_continued(server: MemoryServer, script: Script) -> None:
    beginning = {"role": "assistant", "content": "The answer is ("}
    found = await whole(server, CHAT, messages=[USER, beginning])
    assert script.prompts[-1] == "<|start|>user\nHi<|end|><|start|>assistant\nThe answer is ("
    assert found["message"]["content"] == "Hello there."
    await whole(server, CHAT, messages=[USER, {**beginning, "thinking": "Hm."}])
    assert script.prompts[-1].endswith("<|start|>assistant\n<think>\nHm.\n</think>\n\nThe answer is (")
    called: dict[str, Any] = {
        "role": "assistant",
        "content": "x",
        "tool_calls": [{"function": {"name": "clock", "arguments": {}}}],
    }
    for complete in ({**beginning, "content": ""}, called):
        await whole(server, CHAT, messages=[USER, complete])
        assert script.prompts[-1].endswith("<|end|><|start|>assistant\n")


async def test_parallel_calls_have_their_number_in_both_places(server: MemoryServer, script: Script) -> None:
    script.answer = f"{CALL}\n{CALL}\n{CLOCK_CALL}"
    clock = {"type": "function", "function": {"name": "clock"}}
    for found in (
        [await whole(server, CHAT, tools=[WEATHER, clock])],
        await lines(server, CHAT, tools=[WEATHER, clock]),
    ):
        calls = [call for one in found for call in one["message"].get("tool_calls", [])]
        assert [call["index"] for call in calls] == [call["function"]["index"] for call in calls] == [0, 1, 2]
    # A client that sends them back as they are is understood, and the log says nothing.
    history = [USER, {"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "rain"}]
    await whole(server, CHAT, messages=history, tools=[WEATHER, clock])
    assert script.prompts[-1].count("<tool_call>") == 3


async def test_an_error_in_a_stream_is_a_line(server: MemoryServer, script: Script) -> None:
    script.answer = "x" * 200
    found = [json.loads(line) for line in await interrupted(server, CHAT, {"messages": [USER]})]
    assert found[0]["message"]["content"]
    assert found[-1] == {"error": "The engine process died."}
    assert not any(one["done"] for one in found[:-1])


async def test_a_body_needs_no_type_unless_a_web_page_may_have_sent_it(server: MemoryServer) -> None:
    body = json.dumps({"model": "echo", "prompt": "Hi", "stream": False}).encode()
    form = {"content-type": "application/x-www-form-urlencoded"}  # as curl sends it
    for headers in ({}, form):
        response = await server.client.post(GENERATE, content=body, headers=headers)
        assert response.json()["response"] == "Hello there."
        own = {**headers, "origin": "http://memory"}
        response = await server.client.post(GENERATE, content=body, headers=own)
        assert (response.status_code, list(response.json())) == (415, ["error"])
        response = await server.client.post("/v1/messages", content=body, headers=headers)
        assert response.status_code == 415
