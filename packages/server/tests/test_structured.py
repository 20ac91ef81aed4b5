"""Every field of OpenAI, vLLM and SGLang that restricts answers means one grammar, and at most one may be sent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from memory_server import MemoryServer
from pagewood.engine.api import FinishReason, Grammar, Refusal, RequestOptions, SamplingParams
from pagewood.engine.ebnf import lark_of_ebnf
from pagewood.server.http.errors import ApiError, failed
from pagewood.server.messages import wire
from pagewood.server.protocols.common.structured import MAX_GRAMMAR_LENGTH, constraint
from pagewood.server.protocols.openai.chat import parse_chat
from pagewood.server.protocols.openai.completions import parse_completion

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"const": "ü"}}}
TEXT = '{"type":"object","properties":{"z":{"type":"integer"},"a":{"const":"ü"}}}'
LARK, EBNF = 'start: "x"+', 'root ::= "x"+'
TAG: dict[str, Any] = {"type": "structural_tag", "format": {"type": "any_text"}}
TAG_TEXT = '{"type":"structural_tag","format":{"type":"any_text"}}'
OLD_TAG: dict[str, Any] = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}
OBJECT = Grammar.json_schema('{"type":"object"}')


def found(fields: dict[str, Any]) -> tuple[Grammar, str] | None:
    """Return the grammar of a chat, and the field that asks for it; a completion must have the same."""
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    one = constraint(parse_chat(json.dumps(chat).encode()))
    assert constraint(parse_completion(json.dumps({"model": "m", "prompt": "x", **fields}).encode())) == one
    return None if one is None else (one.grammar, one.param)


@pytest.mark.parametrize(
    ("fields", "param", "grammar"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format", OBJECT),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            "response_format",
            Grammar.json_schema(TEXT),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": False, "description": "d"},
                }
            },
            "response_format",
            Grammar.json_schema(TEXT),
        ),
        ({"response_format": TAG}, "response_format", Grammar.structural_tag(TAG_TEXT)),
        (
            {"response_format": {"type": "structural_tag", **OLD_TAG}},
            "response_format",
            Grammar.structural_tag({"type": "structural_tag", **OLD_TAG}),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json", Grammar.json_schema(TEXT)),
        ({"structured_outputs": {"json": TEXT}}, "structured_outputs.json", Grammar.json_schema(TEXT)),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex", Grammar.regex("a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "structured_outputs.choice", Grammar.choice(["a", "b"])),
        ({"structured_outputs": {"grammar": LARK}}, "structured_outputs.grammar", Grammar.lark(LARK)),
        ({"structured_outputs": {"grammar": EBNF}}, "structured_outputs.grammar", Grammar.lark(lark_of_ebnf(EBNF))),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object", OBJECT),
        (
            {"structured_outputs": {"structural_tag": TAG_TEXT, "disable_any_whitespace": False}},
            "structured_outputs.structural_tag",
            Grammar.structural_tag(TAG_TEXT),
        ),
        ({"guided_json": SCHEMA}, "guided_json", Grammar.json_schema(TEXT)),
        ({"guided_json": TEXT}, "guided_json", Grammar.json_schema(TEXT)),
        ({"guided_regex": "a+"}, "guided_regex", Grammar.regex("a+")),
        ({"guided_choice": ["a"]}, "guided_choice", Grammar.choice(["a"])),
        ({"guided_grammar": EBNF}, "guided_grammar", Grammar.lark(lark_of_ebnf(EBNF))),
        ({"json_schema": TEXT}, "json_schema", Grammar.json_schema(TEXT)),
        ({"regex": "a+"}, "regex", Grammar.regex("a+")),
        ({"ebnf": EBNF}, "ebnf", Grammar.lark(lark_of_ebnf(EBNF))),
        ({"structural_tag": TAG_TEXT}, "structural_tag", Grammar.structural_tag(TAG_TEXT)),
        ({"regex": "a", "response_format": {"type": "text"}, "guided_choice": []}, "regex", Grammar.regex("a")),
    ],
)
def test_a_field_means_a_grammar(fields: dict[str, Any], param: str, grammar: Grammar) -> None:
    assert found(fields) == (grammar, param)
    sampling = SamplingParams(grammar=grammar)
    message = wire.Generate(request_id="r", prompt=wire.TextPrompt(text="x"), options=RequestOptions(sampling=sampling))
    assert wire.to_tokenizer.decode(wire.encode(message)) == message


@pytest.mark.parametrize(
    "fields",
    [{}, {"response_format": {"type": "text"}}, {"structured_outputs": {}}, {"structured_outputs": {"choice": None}}],
)
def test_no_field_means_no_grammar(fields: dict[str, Any]) -> None:
    assert found(fields) is None


@pytest.mark.parametrize(
    ("fields", "param", "code", "words"),
    [
        ({"response_format": "json"}, "response_format", "invalid_type", "expected an object, but got a string"),
        ({"response_format": {}}, "response_format.type", "missing_required_parameter", "Missing"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value", "'json_object'"),
        ({"response_format": {"type": "text", "x": 1}}, "response_format.x", "unknown_parameter", "Unrecognized"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "missing_required_parameter",
            "Missing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
            "missing_required_parameter",
            "Missing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
            "missing_required_parameter",
            "Missing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": "{}"}}},
            "response_format.json_schema.schema",
            "invalid_type",
            "expected an object, but got a string",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {"name": "n", "schema": {}}}},
            "response_format.json_schema",
            "invalid_value",
            "not allowed with the type 'json_object'",
        ),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs.xml", "unknown_parameter", "Unrecognized"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex", "invalid_value", "got an integer"),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
            "invalid_value",
            "only null and false",
        ),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "invalid_value",
            "only null and false",
        ),
        ({"guided_json": [1]}, "guided_json", "invalid_value", "an object or a string, but got an array"),
        ({"guided_json": ""}, "guided_json", "invalid_value", "not empty"),
        ({"guided_choice": "a"}, "guided_choice", "invalid_value", "an array of strings, but got a string"),
        ({"guided_choice": ["a", 2]}, "guided_choice", "invalid_value", "got an array with an integer"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "invalid_value", "not empty"),
        ({"ebnf": 'root ::= "a'}, "ebnf", "invalid_grammar", "EBNF grammar must have rules of EBNF"),
        ({"guided_json": {"const": 1e308 * 10}}, None, "invalid_json", "JSON"),
        ({"regex": "a" * (MAX_GRAMMAR_LENGTH + 1)}, "regex", "invalid_value", "at most 262144 characters"),
        ({"guided_choice": ["a" * MAX_GRAMMAR_LENGTH]}, "guided_choice", "invalid_value", "at most 262144 characters"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "invalid_value", "'guided_json' and 'guided_regex'"),
        (
            {"response_format": {"type": "json_object"}, "regex": "a"},
            "regex",
            "invalid_value",
            "'response_format' and 'regex'",
        ),
        (
            {"structured_outputs": {"json": {}, "choice": ["a"]}},
            "structured_outputs.choice",
            "invalid_value",
            "'structured_outputs.json' and 'structured_outputs.choice'",
        ),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str | None, code: str, words: str) -> None:
    with pytest.raises(ApiError) as error:
        found(fields)
    answer = json.loads(error.value.body())["error"]
    assert (error.value.status, answer["param"], answer["code"]) == (400, param, code)
    assert words in answer["message"]


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    inner: dict[str, Any] = {}
    for _ in range(800):
        inner = {"items": inner}
    one = found({"guided_json": inner})  # the engine refuses it, in bounded time
    assert one is not None
    body = b'{"model": "m", "prompt": "x", "guided_json": %b}' % (b'{"a":' * 16_000 + b"1" + b"}" * 16_000)
    with pytest.raises(ApiError, match="could not parse"):
        parse_completion(body)


NAMES = {"prompt": "messages", "grammar": "response_format"}


@pytest.mark.parametrize(
    ("finish", "code", "status", "answer_code", "retry"),
    [
        (FinishReason.REFUSED, "invalid_grammar", 400, "invalid_grammar", None),
        (FinishReason.REFUSED, "grammar_timeout", 400, "grammar_timeout", None),
        (FinishReason.REFUSED, "grammar_unavailable", 400, "grammar_unavailable", None),
        (FinishReason.REFUSED, None, 400, "grammar_unavailable", None),
        (FinishReason.REFUSED, "grammar_queue_full", 429, "grammar_queue_full", "1"),
        (FinishReason.ERROR, "grammar_failed", 422, "grammar_failed", None),
    ],
)
def test_a_refusal_of_the_engine_names_the_clients_field(
    finish: FinishReason, code: str | None, status: int, answer_code: str, retry: str | None
) -> None:
    error = failed(finish, Refusal(message="why", param="grammar", code=code), names=NAMES)
    assert error is not None
    answer = json.loads(error.body())["error"]
    assert (error.status, answer["param"], answer["code"]) == (status, "response_format", answer_code)
    assert error.headers.get("Retry-After") == retry
    assert "why" in answer["message"]


def test_a_request_that_excludes_every_token_is_an_error_of_the_client() -> None:
    error = failed(FinishReason.ERROR, Refusal(message="why", code="all_tokens_excluded"), names=NAMES)
    assert error is not None
    answer = json.loads(error.body())["error"]
    assert (error.status, answer["param"], answer["code"]) == (400, None, "all_tokens_excluded")
    assert "why" in answer["message"]


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_without_grammars_says_so(server: MemoryServer, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "guided_regex": "a", "stream": stream, "n": 2}
    response = await server.post("/v1/chat/completions", body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("guided_regex", "grammar_unavailable")
