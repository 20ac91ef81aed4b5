"""`/openapi.json` is complete and valid, and the pages need nothing from outside."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Annotated, Any

import jsonschema
import msgspec
import pytest
from pydantic import BaseModel, Field

from echo_folder import TOOLS_TEMPLATE, write_echo_folder
from memory_server import MemoryServer
from pagewood.server.documentation import pages
from pagewood.server.documentation.openapi import openapi
from pagewood.server.http.errors import ErrorEnvelope
from pagewood.server.http.operations import Operation
from pagewood.server.protocols.anthropic import fields as anthropic
from pagewood.server.protocols.common import fields
from pagewood.server.protocols.native import fields as native
from pagewood.server.protocols.ollama import embeddings as embeddings_of_ollama
from pagewood.server.protocols.ollama import fields as ollama
from pagewood.server.protocols.ollama import options
from pagewood.server.protocols.openai import chat, completions
from pagewood.server.protocols.responses import request as responses
from pagewood.server.protocols.responses.endpoints import absent_routes
from pagewood.server.protocols.vectors import embeddings, rerank
from scripted import Script, scripted_server
from streams import check_stream

OF_STORE = ("/v1/files", "/v1/batches")
"""Paths that answer 404 to every body, because this server has no store of batches."""
pytestmark = pytest.mark.anyio


@pytest.fixture
async def document(server: MemoryServer) -> dict[str, Any]:
    return (await server.client.get("/openapi.json")).json()


def resolved(document: dict[str, Any], ref: str) -> dict[str, Any]:
    return {"$ref": ref, "components": document["components"]}


async def test_every_route_of_the_application_is_documented(server: MemoryServer, document: dict[str, Any]) -> None:
    routes: Any = server.frontend.app().app.app.routes  # type: ignore[attr-defined]
    pages = {"/", "/docs", "/openapi.json", "/dashboard"} | {route.path for route in absent_routes()}
    found = {(re.sub(r":\w+}", "}", one.path), method.lower()) for one in routes for method in one.methods - {"HEAD"}}
    documented = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert {(path, method) for path, method in found if path not in pages} == documented


async def test_every_reference_leads_to_a_schema(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    refs = set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(document)))
    assert len(refs) > 40
    for ref in refs:
        assert ref.removeprefix("#/components/schemas/") in schemas
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
    ("name", "model", "neutral", "ignored"),
    [
        ("ChatRequest", chat.ChatRequest, chat.NEUTRAL, chat.IGNORED),
        ("CompletionRequest", completions.CompletionRequest, completions.NEUTRAL, fields.IGNORED),
        ("GenerateRequest", native.GenerateRequest, native.NEUTRAL, native.IGNORED),
        ("ResponsesRequest", responses.ResponsesRequest, responses.NEUTRAL, responses.IGNORED),
        ("MessagesRequest", anthropic.MessagesRequest, anthropic.NEUTRAL, anthropic.IGNORED),
        ("CountTokensRequest", anthropic.CountTokensRequest, anthropic.NEUTRAL, anthropic.IGNORED),
        ("OllamaChatRequest", ollama.OllamaChatRequest, {}, ollama.IGNORED),
        ("OllamaGenerateRequest", ollama.OllamaGenerateRequest, ollama.GENERATE_NEUTRAL, ollama.IGNORED),
        ("OllamaEmbedRequest", embeddings_of_ollama.OllamaEmbedRequest, {}, frozenset[str]()),
        ("OllamaEmbeddingsRequest", embeddings_of_ollama.OllamaEmbeddingsRequest, {}, frozenset[str]()),
        ("OllamaOptions", options.OllamaOptions, {}, options.IGNORED),
        ("EmbeddingRequest", embeddings.EmbeddingRequest, embeddings.NEUTRAL, fields.IGNORED),
        ("RerankRequest", rerank.RerankRequest, rerank.NEUTRAL, fields.IGNORED),
        ("ScoreRequest", rerank.ScoreRequest, rerank.NEUTRAL, fields.IGNORED),
    ],
)
async def test_every_field_of_a_body_is_described(
    document: dict[str, Any],
    name: str,
    model: type[BaseModel],
    neutral: dict[str, tuple[Any, ...]],
    ignored: frozenset[str],
) -> None:
    properties = document["components"]["schemas"][name]["properties"]
    assert properties.keys() == model.model_fields.keys() | neutral.keys() | ignored
    for field, values in neutral.items():
        assert properties[field]["enum"] == list(values)


async def test_schemas_of_bodies_accept_what_the_endpoints_accept(document: dict[str, Any]) -> None:
    validator: Any = jsonschema.Draft202012Validator(resolved(document, "#/components/schemas/ChatRequest"))
    base = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    accepted: list[dict[str, Any]] = [
        {}, {"stop": "x"}, {"stop": ["x", "y"]}, {"logit_bias": {"5": 1}}, {"prompt_logprobs": False},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}, {"guided_json": {"a": 1}},
        {"logits_processors": ["a", {"name": "b", "arguments": {}}]}, {"tool_choice": "none"}, {"best_of": 1},
        {"user": {"any": "thing"}}, {"early_stopping": "never"},
    ]  # fmt: skip
    for more in accepted:
        validator.validate(base | more)
        chat.parse_chat(msgspec.json.encode(base | more | {"use_beam_search": "early_stopping" in more}))
    refused: list[dict[str, Any]] = [
        {"stop": ""}, {"stop": ["x"] * 17}, {"logit_bias": {"x": 1}}, {"logit_bias": [[5, 1]]}, {"best_of": 2},
        {"mood": 1}, {"temperature": 3}, {"messages": []}, {"logits_processors": [{"name": "a", "x": 1}]},
    ]  # fmt: skip
    for more in refused:
        assert not validator.is_valid(base | more), more


async def test_answers_and_events_follow_their_schemas(server: MemoryServer, document: dict[str, Any]) -> None:
    prompt = {"model": "echo", "prompt": "Hi", "max_tokens": 3, "logprobs": 1}
    message = {"model": "echo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", prompt),
        ("/v1/completions", prompt | {"stream": True, "stream_options": {"include_usage": True}}),
        ("/v1/chat/completions", message | {"logprobs": True, "prompt_logprobs": 1}),
        ("/v1/chat/completions", message | {"stream": True}),
        ("/generate", {"text": "Hi", "return_logprob": True, "logprob_start_len": 0, "return_timings": True}),
        ("/generate", {"text": ["Hi", "Ho"], "stream": True}),
    ]
    for path, body in cases:
        await check_answer(server, document, "POST", path, body)


async def check_answer(
    server: MemoryServer,
    document: dict[str, Any],
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    **names: str,
) -> Any:
    """Send a request and compare its answer with the document; return the answer, of a stream the number of pieces."""
    response = await server.client.request(method, path.format(**names), json=body)
    assert response.status_code == 200, response.text
    if num_pieces := check_stream(document, path, method.lower(), response):
        return num_pieces
    schema = document["paths"][path][method.lower()]["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.validate(response.json(), schema | {"components": document["components"]})
    return response.json()


RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "wet"}
ITEMS: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
    {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{}"},
    RESULT,
    {"type": "custom_tool_call", "call_id": "call_2", "name": "shell", "input": "ls"},
    {"type": "custom_tool_call_output", "call_id": "call_2", "output": "a.txt"},
]
"""Items of all types."""


async def test_reasoning_text_and_calls_follow_their_schemas_in_every_protocol(tmp_path: Path) -> None:
    write_echo_folder(tmp_path, chat_template=TOOLS_TEMPLATE, template="hermes")
    script = Script()
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    script.answer = f"<think>\nHm.\n</think>\n\nLet me see.{call}"
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {"name": "weather", "parameters": schema}
    message = {"role": "user", "content": "Hi"}
    base = {"model": "echo", "messages": [message]}
    tools = {"tools": [{"type": "function", "function": function}]}
    cases: dict[str, dict[str, Any]] = {
        "/v1/messages": {**base, "max_tokens": 500, "tools": [{"name": "weather", "input_schema": schema}]},
        "/api/chat": {**base, **tools, "logprobs": True, "top_logprobs": 1},
        "/v1/responses": {
            "model": "echo",
            "input": ITEMS,
            "tools": [{"type": "function", **function}],
            "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
            "top_logprobs": 1,
        },
        "/v1/chat/completions": {**base, **tools, "logprobs": True, "top_logprobs": 1},
    }
    async with scripted_server(tmp_path, script) as server:
        document = (await server.client.get("/openapi.json")).json()
        answers: dict[str, Any] = {}
        for path, body in cases.items():
            answers[path] = await check_answer(server, document, "POST", path, {**body, "stream": False})
            assert await check_answer(server, document, "POST", path, {**body, "stream": True}) > 5
        blocks = [block["type"] for block in answers["/v1/messages"]["content"]]
        assert blocks == ["thinking", "text", "tool_use"]
        assert answers["/api/chat"]["message"].keys() == {"role", "content", "thinking", "tool_calls"}
        assert [item["type"] for item in answers["/v1/responses"]["output"]] == [
            "reasoning",
            "message",
            "function_call",
        ]
        kept = {"id": answers["/v1/responses"]["id"]}
        path = "/v1/responses/{id}"
        assert await check_answer(server, document, "GET", path, **kept) == answers["/v1/responses"]
        page = await check_answer(server, document, "GET", f"{path}/input_items", **kept)
        items = page["data"][::-1]
        for item, sent in zip(items, ITEMS, strict=True):
            given = {"type": "message", **sent, "content": item["content"]} if "content" in sent else sent
            assert item.items() >= given.items()
        assert items[2]["summary"] == ITEMS[2]["summary"]
        assert [item["content"][0]["text"] for item in items if "role" in item] == ["Be brief.", "Hi", "Let me see."]
        assert (await check_answer(server, document, "DELETE", path, **kept))["deleted"]


async def test_answers_about_the_model_and_vectors_follow_their_schemas(
    server: MemoryServer, document: dict[str, Any]
) -> None:
    for path in ("/api/tags", "/api/ps", "/api/version"):
        await check_answer(server, document, "GET", path)
    ranking = {"model": "echo", "query": "a", "documents": ["b", {"text": "c"}], "return_documents": True}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("/api/show", {"model": "echo"}),
        ("/api/chat", {"model": "echo"}),
        ("/api/generate", {"model": "echo", "prompt": "Hi", "options": {"num_predict": 4}}),
        ("/v1/messages/count_tokens", {"model": "echo", "messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/embeddings", {"model": "echo", "input": [[1, 2], [3]], "encoding_format": "base64"}),
        *((path, ranking) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
        *((path, {"model": "echo", "text_1": "a", "text_2": ["b", "c"]}) for path in ("/v1/score", "/score")),
    ]
    for path, body in cases:
        await check_answer(server, document, "POST", path, body)


async def test_operations_say_whether_they_need_a_key(document: dict[str, Any]) -> None:
    keys: list[dict[str, list[str]]] = [{"bearer": []}, {"key": []}]
    assert document["security"] == [{}, *keys]
    assert document["paths"]["/pause"]["post"]["security"] == keys
    assert document["paths"]["/health"]["get"]["security"] == []
    assert "security" not in document["paths"]["/generate"]["post"]


async def test_errors_follow_the_schemas_of_their_protocols(server: MemoryServer, document: dict[str, Any]) -> None:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if "requestBody" not in operation or path in OF_STORE:
                continue
            response = await server.admin.request(method, path, json={"no such field": 1})
            assert response.status_code == 400
            schema = operation["responses"]["400"]["content"]["application/json"]["schema"]
            jsonschema.validate(response.json(), schema | {"components": document["components"]})
    statuses = {path: document["paths"][path]["post"]["responses"].keys() for path in ("/v1/messages", "/api/chat")}
    assert statuses["/api/chat"] - statuses["/v1/messages"] == {"503"}
    assert statuses["/v1/messages"] - statuses["/api/chat"] == {"529"}


async def test_examples_follow_their_schemas_and_work(server: MemoryServer, document: dict[str, Any]) -> None:
    for path, methods in document["paths"].items():
        if "requestBody" not in methods.get("post", ()) or path in OF_STORE:
            continue
        content = methods["post"]["requestBody"]["content"]["application/json"]
        jsonschema.validate(content["example"], resolved(document, content["schema"]["$ref"]))
        if (
            path not in ("/abort", "/v1/requests/{name}/priority")
            and "lora" not in path
            and not path.startswith("/update_weights_from_")
        ):  # these name what is not there
            response = await server.admin.post(path, json=content["example"])
            assert response.status_code == 200, response.text


async def test_fields_and_operations_have_descriptions(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    salt = "Requests share cached prefixes only with requests that have the same one."
    assert schemas["ChatRequest"]["properties"]["cache_salt"]["description"] == salt
    assert schemas["NativeSampling"]["properties"]["max_new_tokens"]["description"] == "128 by default."
    assert schemas["Generate.Answer"]["properties"]["output_ids"]["description"].startswith("Without the token")
    assert schemas["ReasoningItem"]["properties"].keys() >= {"summary", "content", "encrypted_content"}
    assert schemas["OllamaOptions"]["properties"]["num_predict"]["description"] == "At most 0: as many tokens as fit."
    assert schemas["OllamaGenerate.TextLine"]["properties"]["total_duration"]["description"].endswith("nanoseconds.")
    assert document["paths"]["/tokenize"]["post"]["summary"] == "Return the token ids of a text or of a conversation."


async def test_two_operations_or_types_with_one_name_are_an_error() -> None:
    class Other(BaseModel):
        x: int

    first = type("ChatRequest", (Other,), {})

    async def endpoint(_: Any) -> Any:
        """Do nothing."""

    def operation(name: str, body: type[BaseModel], error: Any = ErrorEnvelope) -> Operation:
        return Operation(
            name=name, tag="t", method="POST", path=f"/{name}", endpoint=endpoint, body=body, answer=int, error=error
        )

    with pytest.raises(ValueError, match="names of their own"):
        openapi([operation("a", chat.ChatRequest), operation("b", first)])
    with pytest.raises(ValueError, match=r"operations .*\['a'\]"):
        openapi([operation("a", chat.ChatRequest), operation("a", Other)])
    error = msgspec.defstruct("ErrorEnvelope", [("x", Annotated[int, Field()])])
    with pytest.raises(ValueError, match="types of errors"):
        openapi([operation("a", chat.ChatRequest), operation("b", Other, error)])


async def test_pages_load_nothing_from_outside(server: MemoryServer) -> None:
    for path in ("/", "/docs", "/dashboard"):
        response = await server.client.get(path, headers={"accept": "text/html,application/xhtml+xml"})
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert not re.findall(r"(?:https?:)?//[a-z]", response.text.replace("// ", ""))
        assert not re.findall(r"<(?:link|img|script|iframe)[^>]+(?:src|href)=", response.text)


async def test_programs_get_no_page_at_the_root(server: MemoryServer) -> None:
    response = await server.client.get("/")
    assert (response.status_code, response.text) == (200, "Ollama is running")


async def test_many_who_ask_at_once_wait_for_one_document(
    server: MemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def counted(operations: Any) -> dict[str, Any]:
        made.append(1)
        return openapi(operations)

    monkeypatch.setattr(pages, "openapi", counted)
    answers = await asyncio.gather(*[server.client.get("/openapi.json") for _ in range(8)])
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == len(made) == 1
