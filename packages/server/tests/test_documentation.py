"""`/openapi.json` is complete and valid, and the pages need nothing from outside."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

import jsonschema
import msgspec
import pytest
from pydantic import BaseModel, Field

from pagewood.server.documentation.openapi import openapi
from pagewood.server.errors import ErrorEnvelope
from pagewood.server.native import fields as native
from pagewood.server.openai import chat, completions, fields
from pagewood.server.operations import Operation
from pagewood.server.testing import MemoryServer

pytestmark = pytest.mark.anyio


@pytest.fixture
async def document(server: MemoryServer) -> dict[str, Any]:
    return (await server.client.get("/openapi.json")).json()


def resolved(document: dict[str, Any], ref: str) -> dict[str, Any]:
    return {"$ref": ref, "components": document["components"]}


async def test_every_route_of_the_application_is_documented(server: MemoryServer, document: dict[str, Any]) -> None:
    routes: Any = server.frontend.app().app.routes  # type: ignore[attr-defined]
    pages = {"/", "/docs", "/openapi.json"}
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
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        response = await server.client.post(path, json=body)
        if body.get("stream"):
            data = content["text/event-stream"]["schema"]["properties"]["data"]["anyOf"]
            schema = data[1]["contentSchema"]["anyOf"][0]
            *lines, done, _ = response.text.split("\n\n")
            assert done == f"data: {data[0]['const']}"
            answers = [json.loads(line.removeprefix("data: ")) for line in lines]
        else:
            schema, answers = content["application/json"]["schema"], [response.json()]
        for answer in answers:
            jsonschema.validate(answer, schema | {"components": document["components"]})


async def test_examples_follow_their_schemas_and_work(server: MemoryServer, document: dict[str, Any]) -> None:
    for path, methods in document["paths"].items():
        if "post" not in methods:
            continue
        content = methods["post"]["requestBody"]["content"]["application/json"]
        jsonschema.validate(content["example"], resolved(document, content["schema"]["$ref"]))
        if path not in ("/abort", "/v1/requests/{name}/priority"):  # they name a request
            response = await server.client.post(path, json=content["example"])
            assert response.status_code == 200, response.text


async def test_fields_and_operations_have_descriptions(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    salt = "Requests share cached prefixes only with requests that have the same one."
    assert schemas["ChatRequest"]["properties"]["cache_salt"]["description"] == salt
    assert schemas["NativeSampling"]["properties"]["max_new_tokens"]["description"] == "128 by default."
    assert schemas["Generate.Answer"]["properties"]["output_ids"]["description"].startswith("Without the token")
    assert document["paths"]["/tokenize"]["post"]["summary"] == "Return the token ids of a text or of a conversation."


async def test_two_types_with_one_name_are_an_error() -> None:
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
    error = msgspec.defstruct("ErrorEnvelope", [("x", Annotated[int, Field()])])
    with pytest.raises(ValueError, match="types of errors"):
        openapi([operation("a", chat.ChatRequest), operation("b", Other, error)])


async def test_pages_load_nothing_from_outside(server: MemoryServer) -> None:
    for path in ("/", "/docs"):
        response = await server.client.get(path, headers={"accept": "text/html,application/xhtml+xml"})
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert not re.findall(r"(?:https?:)?//[a-z]", response.text.replace("// ", ""))
        assert not re.findall(r"<(?:link|img|script|iframe)[^>]+(?:src|href)=", response.text)


async def test_programs_still_get_json_at_the_root(server: MemoryServer) -> None:
    response = await server.client.get("/")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_path")
