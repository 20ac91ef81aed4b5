"""A body with more values than can be read in a fraction of a second is refused before any of them is read."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from memory_server import MemoryServer
from pagewood.server.http import validation
from pagewood.server.http.bodies import Bodies
from pagewood.server.http.errors import ApiError
from pagewood.server.http.json_shape import MAX_CONTAINERS, MAX_IDS, MAX_STRINGS, MAX_VALUES, Shape, shape_of
from pagewood.server.http.limits import HttpLimits
from pagewood.server.protocols.anthropic import fields as anthropic
from pagewood.server.protocols.common.reader import MAX_PARSED_AT_ONCE_BYTES
from pagewood.server.protocols.native import fields as native
from pagewood.server.protocols.ollama import fields as ollama
from pagewood.server.protocols.openai import chat, completions
from pagewood.server.protocols.responses import request as responses
from pagewood.server.protocols.vectors import embeddings, rerank
from pagewood.server.stages import text_limit

PARSERS: dict[str, Callable[[bytes], Any]] = {
    "chat": chat.parse_chat,
    "completions": completions.parse_completion,
    "responses": responses.parse_request,
    "messages": anthropic.parse_messages,
    "count_tokens": anthropic.parse_count,
    "ollama chat": ollama.parse_chat,
    "ollama generate": ollama.parse_generate,
    "generate": native.parse_generate,
    "tokenize": validation.parser(native.TokenizeRequest),
    "embeddings": embeddings.parse_embeddings,
    "rerank": rerank.parse_rerank,
}


def repeated(item: str, number: int, *, field: str = "messages") -> bytes:
    return f'{{"model":"m","{field}":[{",".join([item] * number)}]}}'.encode()


def names(number: int, start: str, end: str) -> bytes:
    return (start + ",".join([f'"a{i}":0' for i in range(number)]) + end).encode()


ATTACKS: dict[str, bytes] = {
    "messages": repeated('{"role":"user","content":"a"}', MAX_CONTAINERS),
    "empty messages": repeated("{}", MAX_CONTAINERS),
    "arrays": repeated("[]", MAX_CONTAINERS),
    "strings": repeated('"a"', MAX_STRINGS),
    "numbers": repeated("1", MAX_VALUES + 2),
    "numbers beside ids": b'{"prompt":[' + b"1," * 500 + b'1],"messages":[' + b"1," * (MAX_VALUES + 2) + b"1]}",
    "ids": repeated("1", MAX_IDS + 2, field="prompt"),
    "lists of ids": repeated("[1,1]", MAX_CONTAINERS, field="prompt"),
    "unknown names": names(MAX_STRINGS + 1, "{", "}"),
    "unknown names in a message": names(MAX_STRINGS, '{"messages":[{', "}]}"),
    "variables of the template": names(MAX_STRINGS, '{"chat_template_kwargs":{', "}}"),
    "properties of a schema": names(MAX_STRINGS, '{"guided_json":{"properties":{', "}}}"),
    "items behind quotes and backslashes": b'{"a":"\\\\","b":"\\"","c":[' + b"{}," * MAX_CONTAINERS + b"{}]}",
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("protocol", PARSERS)
def test_a_body_of_small_items_is_refused_before_it_is_read(
    protocol: str, attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "validated", pytest.fail)
    with pytest.raises(ApiError, match="must hold at most") as caught:
        PARSERS[protocol](ATTACKS[attack])
    assert (caught.value.status, caught.value.code) == (400, "too_many_values")


def test_what_a_window_can_hold_is_read() -> None:
    ids = completions.parse_completion(repeated("12345", 1_048_576, field="prompt"))
    assert len(ids.prompt[0]) == 1_048_576
    text = 'a,b,{c},[d],"e",\\' * 400_000  # in a string, these are text
    assert native.parse_generate(json.dumps({"text": text}).encode()).text == text
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}] * 10_000}
    assert len(chat.parse_chat(json.dumps(body).encode()).messages) == 10_000


def test_many_errors_are_counted_and_not_listed() -> None:
    with pytest.raises(ApiError, match="The request has 2000 fields that are wrong or unknown") as caught:
        chat.parse_chat(repeated("1", 2_000))
    assert caught.value.code == "invalid_value"
    with pytest.raises(ApiError, match=r"messages\[0\]"):
        chat.parse_chat(repeated("1", 1_000))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(alphabet='a\\"{[,:]}é\n', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='a\\"{[,', max_size=4), inner, max_size=4)
    ),
    max_leaves=20,
)


def counted(value: Any) -> Shape:
    """Return the counts of a value, found by walking through it."""
    if isinstance(value, str):
        return Shape(0, 1, 0)
    if not isinstance(value, list | dict):
        return Shape(0, 0, 0)
    inner = list(cast("dict[str, Any]", value).values()) if isinstance(value, dict) else cast("list[Any]", value)
    parts = [counted(one) for one in inner]
    num_names = len(inner) if isinstance(value, dict) else 0
    return Shape(
        1 + sum(part.num_containers for part in parts),
        num_names + sum(part.num_strings for part in parts),
        max(0, len(inner) - 1) + sum(part.num_commas for part in parts),
    )


@given(JSON)
@settings(deadline=None)
def test_the_counts_are_those_of_the_value(value: Any) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
        assert shape_of(text.encode()) == counted(value)


def request_of(body: bytes) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-type", b"application/json")]}
    return Request(scope, receive)


@pytest.mark.anyio
async def test_only_long_bodies_leave_the_event_loop(server: MemoryServer) -> None:
    def thread_of(body: bytes) -> str:
        return threading.current_thread().name

    here = threading.current_thread().name
    read = replace(server.reader, bodies=Bodies(HttpLimits())).read
    assert await read(request_of(b" " * MAX_PARSED_AT_ONCE_BYTES), thread_of) == here
    assert await read(request_of(b" " * (MAX_PARSED_AT_ONCE_BYTES + 1)), thread_of) != here
    with pytest.raises(ApiError, match="must hold at most"):
        await read(request_of(ATTACKS["numbers"]), chat.parse_chat)


@pytest.mark.anyio
@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens", "/retain", "/api/embed"])
async def test_a_text_that_no_model_can_read_is_not_encoded(
    server: MemoryServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_limit, "MAX_TEXT", 50_000)
    text = "a " * 25_001
    bodies: dict[str, dict[str, Any]] = {
        "/tokenize": {"text": text},
        "/v1/messages/count_tokens": {
            "model": server.service.model_name,
            "messages": [{"role": "user", "content": text}],
        },
        "/retain": {"text": text, "seconds": 1},
        "/api/embed": {"model": server.service.model_name, "input": text},
    }
    monkeypatch.setattr(type(server.tokenizer), "encode", pytest.fail)
    response = await server.admin.post(path, json=bodies[path])
    assert response.status_code == 400, response.text
    assert "at most 50000 characters" in response.text
