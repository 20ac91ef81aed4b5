"""The texts in the fields of all protocols are limited in their length, and so is what an error repeats of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from pagewood.server.http import field_limits
from pagewood.server.http.errors import MAX_MESSAGE, MAX_PARAM, ApiError
from pagewood.server.protocols.anthropic import fields as anthropic
from pagewood.server.protocols.native import fields as native
from pagewood.server.protocols.ollama import fields as ollama
from pagewood.server.protocols.openai import chat, completions
from pagewood.server.protocols.responses import request as responses

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": "m", "messages": MESSAGES}
LONG_STOP = "x" * (field_limits.MAX_STOP_LENGTH + 1)
LONG_NAME = "x" * (field_limits.MAX_NAME_LENGTH + 1)

Parse = Callable[[bytes], Any]
PROTOCOLS: dict[str, tuple[Parse, dict[str, Any]]] = {
    "chat": (chat.parse_chat, CHAT),
    "completions": (completions.parse_completion, {"model": "m", "prompt": "hi"}),
    "responses": (responses.parse_request, {"model": "m", "input": "hi"}),
    "messages": (anthropic.parse_messages, CHAT | {"max_tokens": 1}),
    "ollama chat": (ollama.parse_chat, CHAT),
    "ollama generate": (ollama.parse_generate, {"model": "m", "prompt": "hi"}),
    "generate": (native.parse_generate, {"text": "hi"}),
}


def put(protocol: str, name: str, value: Any) -> dict[str, Any]:
    """Return a body with a field where the protocol has it."""
    body = PROTOCOLS[protocol][1]
    if protocol.startswith("ollama"):
        return body | {"options": {name: value}}
    if protocol == "generate":
        return body | {"sampling_params": {name: value}}
    return body | {name: value}


def error_of(protocol: str, body: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        PROTOCOLS[protocol][0](json.dumps(body).encode())
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_stop_strings_are_limited_in_length(protocol: str) -> None:
    name = "stop_sequences" if protocol == "messages" else "stop"
    error = error_of(protocol, put(protocol, name, ["a", LONG_STOP]))
    assert name in (error.param or "")
    assert str(field_limits.MAX_STOP_LENGTH) in str(error)
    PROTOCOLS[protocol][0](json.dumps(put(protocol, name, [LONG_STOP[1:]])).encode())


@pytest.mark.parametrize("protocol", ["chat", "completions", "responses", "generate"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", LONG_STOP),
        ("stop_regex", "x" * (field_limits.MAX_STOP_EXPRESSION_LENGTH + 1)),
        ("bad_words", ["x" * (field_limits.MAX_WORD_LENGTH + 1)]),
        ("stop_token_ids", [1] * (field_limits.MAX_STOP_TOKENS + 1)),
        ("logits_processors", [{"name": "ban", "arguments": {"x": LONG_STOP * 5}}]),
    ],
)
def test_other_fields_of_sampling_are_limited(protocol: str, name: str, value: Any) -> None:
    error = error_of(protocol, put(protocol, name, value))
    assert (error.param or "").endswith(name)
    assert error.code == "invalid_value"


@pytest.mark.parametrize("name", ["rid", "tag", "service_class"])
def test_names_of_native_requests_are_limited(name: str) -> None:
    assert error_of("generate", PROTOCOLS["generate"][1] | {name: LONG_NAME}).param == name


@pytest.mark.parametrize("name", ["user", "safety_identifier", "prompt_cache_key", "metadata"])
def test_labels_that_a_response_repeats_are_limited(name: str) -> None:
    value = "x" * 513
    error = error_of("responses", PROTOCOLS["responses"][1] | {name: {"k": value} if name == "metadata" else value})
    assert (error.param or "").startswith(name)


LIMITED = frozenset(
    {"stop", "stop_sequences", "stop_regex", "bad_words", "rid", "tag", "service_class", "cache_salt", "user"}
)


def strings(schema: Any, name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schemas of all strings below the properties in `LIMITED`."""
    if isinstance(schema, list):
        for one in cast("list[Any]", schema):
            yield from strings(one, name)
    elif isinstance(schema, dict):
        fields = cast("dict[str, Any]", schema)
        if fields.get("type") == "string" and name:
            yield name, fields
        for field, one in fields.get("properties", {}).items():
            yield from strings(one, field if field in LIMITED else "")
        for key in ("anyOf", "oneOf", "allOf", "items"):
            yield from strings(fields.get(key), name)


@pytest.mark.parametrize(
    "model",
    [
        chat.ChatRequest, completions.CompletionRequest, responses.ResponsesRequest, anthropic.MessagesRequest,
        ollama.OllamaChatRequest, ollama.OllamaGenerateRequest, native.GenerateRequest, native.RetainRequest,
        native.AbortRequest, native.PauseRequest, native.ResumeRequest,
    ],
)  # fmt: skip
def test_the_schemas_say_the_limits(model: Any) -> None:
    schema = model.model_json_schema(by_alias=True)
    found = [one for part in (schema, *schema.get("$defs", {}).values()) for one in strings(part)]
    assert found
    assert [name for name, one in found if "maxLength" not in one] == []


@pytest.mark.parametrize(
    ("protocol", "body"),
    [
        ("chat", CHAT | {"x" * 100_000: 1}),
        ("messages", CHAT | {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "x" * 100_000}]}]}),
        ("responses", {"model": "m", "input": "hi", "include": ["x" * 100_000]}),
    ],
)
def test_an_error_repeats_little_of_what_was_sent(protocol: str, body: dict[str, Any]) -> None:
    error = error_of(protocol, body)
    assert len(str(error)) <= MAX_MESSAGE
    assert len(error.param or "") <= MAX_PARAM
    assert len(error.body()) < 2 * MAX_MESSAGE
