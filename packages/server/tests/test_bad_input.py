"""Wrong requests get OpenAI's error object with the reason, never a 500 and never no answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memory_server import MAX_LENGTH, MemoryServer
from pagewood.server.http.errors import ApiError
from pagewood.server.protocols.openai.chat import parse_chat
from pagewood.server.protocols.openai.completions import parse_completion, prompts

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
JSON_TYPE = {"Content-Type": "application/json"}
USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f"}}


def check_envelope(answer: Any) -> dict[str, Any]:
    assert set(answer) == {"error"}
    assert list(answer["error"]) == ["message", "type", "param", "code"]
    return answer["error"]


WRONG_CHATS: list[tuple[dict[str, Any], str | None, str | None, str]] = [
    ({"messages": None}, "messages", "invalid_type", "expected an array, but got null"),
    ({"messages": []}, "messages", "invalid_value", "at least 1 item"),
    ({"messages": "Hi"}, "messages", "invalid_type", "expected an array, but got a string"),
    ({"messages": ["Hi"]}, "messages[0]", "invalid_type", "expected an object, but got a string"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role", "missing_required_parameter", "Missing required"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter", "Missing required"),
    ({"messages": [{"role": "king", "content": ""}]}, "messages[0].role", "invalid_value", "'system'"),
    ({"messages": [{"role": "critic", "content": ""}]}, "messages[0].role", "invalid_value", "'system'"),
    ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].tool_call_id", "missing_required_parameter", "Miss"),
    ({"messages": [USER | {"tool_call_id": "c"}]}, "messages[0].tool_call_id", "invalid_value", "the role 'tool'"),
    (
        {"messages": [USER | {"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}]},
        "messages[0].tool_calls",
        "invalid_value",
        "the role 'assistant'",
    ),
    (
        {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "invalid_value",
        "cannot both be true",
    ),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_value", "got an integer"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content",
        "invalid_value",
        "'image_url'",
    ),
    ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content", "invalid_value", "every part"),
    ({"messages": [{**USER, "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id", "missing_required_parameter", "Mis"),
    ({"messages": [{**USER, "mood": 1}]}, "messages[0].mood", "unknown_parameter", "Unrecognized request argument"),
    ({"messages": [{"role": "user", "content": "refuse me"}]}, "messages", "invalid_messages", "I refuse"),
    ({"messages": [{"role": "user", "content": "x" * 999}]}, "messages", "context_length_exceeded", str(MAX_LENGTH)),
    ({"max_tokens": 0}, "max_tokens", "invalid_value", ">= 1"),
    ({"max_tokens": -5}, "max_tokens", "invalid_value", ">= 1"),
    ({"max_tokens": 1.5}, "max_tokens", "invalid_type", "expected an integer, but got a decimal"),
    ({"max_tokens": "5"}, "max_tokens", "invalid_type", "expected an integer, but got a string"),
    ({"max_tokens": True}, "max_tokens", "invalid_type", "expected an integer, but got a boolean"),
    ({"max_tokens": 10**30}, "max_tokens", None, "max_tokens"),
    ({"max_tokens": MAX_LENGTH}, "max_tokens", "context_length_exceeded", str(MAX_LENGTH)),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "invalid_value", "must be equal"),
    ({"temperature": -0.1}, "temperature", "invalid_value", ">= 0"),
    ({"temperature": 2.1}, "temperature", "invalid_value", "<= 2"),
    ({"temperature": "hot"}, "temperature", "invalid_type", "expected a decimal"),
    ({"top_p": 1.1}, "top_p", "invalid_value", "<= 1"),
    ({"top_k": -2}, "top_k", "invalid_value", ">= -1"),
    ({"min_p": 2}, "min_p", "invalid_value", "<= 1"),
    ({"seed": 2**63}, "seed", "invalid_value", "seed"),
    ({"seed": "1"}, "seed", "invalid_type", "expected an integer"),
    ({"priority": 1.5}, "priority", "invalid_type", "expected an integer"),
    ({"stream": "yes"}, "stream", "invalid_type", "expected a boolean"),
    ({"stream": 1}, "stream", "invalid_type", "expected a boolean, but got an integer"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value", "only allowed"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter", "Unrecognized"),
    ({"stop": 5}, "stop", "invalid_value", "a string or an array of strings, but got an integer"),
    ({"stop": ["a", 5]}, "stop", "invalid_value", "a string or an array of strings"),
    ({"stop": ""}, "stop", "invalid_value", "must not be empty"),
    ({"stop": ["x"] * 17}, "stop", "invalid_value", "at most 16"),
    ({"stop_regex": 5}, "stop_regex", "invalid_value", "a string or an array of strings, but got an integer"),
    ({"stop_regex": ["x"] * 5}, "stop_regex", "invalid_value", "at most 4 stop expressions, but got 5"),
    ({"stop_regex": ""}, "stop_regex", "invalid_value", "a stop expression must not be empty"),
    ({"stop_regex": "(a"}, "stop_regex", "invalid_value", "'stop_regex': must hold expressions of RE2"),
    ({"stop_regex": ["a", "b*"]}, "stop_regex", "invalid_value", "must not match the empty text, got 'b*'"),
    ({"stop_regex": "ab*"}, "stop_regex", "invalid_value", "must match at most 256 characters"),
    (
        {"stop_regex": "a" * 513},
        "stop_regex",
        "invalid_value",
        "expected at most 512 characters in a stop expression, but got 513",
    ),
    (
        {"stop_regex": [r"a\pL{4}", r"b\pL{4}", r"c\pL{4}", r"d\pL{4}"]},
        "stop_regex",
        "invalid_value",
        "all together must be small enough",
    ),
    ({"bad_words": "x"}, "bad_words", "invalid_value", "an array of strings, but got a string"),
    ({"bad_words": [5]}, "bad_words", "invalid_value", "array of strings"),
    ({"bad_words": [""]}, "bad_words", "invalid_value", "a bad word must not be empty"),
    ({"bad_words": ["x"] * 129}, "bad_words", "invalid_value", "at most 128 bad words, but got 129"),
    ({"bad_words": ["x" * 257]}, "bad_words", "invalid_value", "at most 256 characters in a bad word, but got 257"),
    ({"bad_words": ["x" * 99]}, "bad_words", "invalid_value", "texts of at most 32 tokens, got 99"),
    ({"typical_p": 0}, "typical_p", "invalid_value", "> 0"),
    ({"top_n_sigma": -1.5}, "top_n_sigma", "invalid_value", ">= -1"),
    ({"top_n_sigma": 1001}, "top_n_sigma", "invalid_value", "<= 1000"),
    ({"stop_token_ids": [300]}, "stop_token_ids", "invalid_value", "[0, 258), but got 300"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "invalid_value", ">= 0"),
    ({"n": 0}, "n", "invalid_value", ">= 1"),
    ({"n": 129}, "n", "invalid_value", "<= 128"),
    ({"n": 65}, "n", "invalid_value", "at most 64 answers, which is the number of requests that this server holds"),
    ({"n": True}, "n", "invalid_type", "expected an integer, but got a boolean"),
    ({"best_of": 2}, "best_of", "unsupported_parameter", "'best_of' is not supported"),
    ({"logprobs": 1}, "logprobs", "invalid_type", "expected a boolean, but got an integer"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value", "<= 20"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "invalid_value", ">= 0"),
    ({"top_logprobs": 1}, "top_logprobs", "invalid_value", "only allowed when 'logprobs' is enabled"),
    ({"logprobs": False, "top_logprobs": 1}, "top_logprobs", "invalid_value", "only allowed when 'logprobs'"),
    ({"logprobs_kind": "cooked"}, "logprobs_kind", "invalid_value", "'raw' or 'processed'"),
    ({"prompt_logprobs": 65}, "prompt_logprobs", "invalid_value", "<= 64"),
    ({"prompt_logprobs": True}, "prompt_logprobs", "invalid_type", "expected an integer, but got a boolean"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter", "Missing required"),
    ({"tools": [{"type": "custom"}]}, "tools[0].type", "invalid_value", "'function'"),
    ({"tools": [TOOL]}, "tools", "tools_not_supported", "has no template by which calls of functions could be read"),
    ({"tools": [TOOL, TOOL]}, "tools", "invalid_value", "expected different names, but got 'f' twice"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value", "only allowed when 'tools' are specified"),
    ({"tool_choice": "must"}, "tool_choice", "invalid_value", "expected 'none', 'auto', 'required', or an object"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        "invalid_value",
        "the function 'g' is not among 'tools'",
    ),
    ({"functions": [{"name": "f"}]}, "functions", "tools_not_supported", "leave 'functions' out"),
    ({"functions": [{"name": "f"}], "tools": [TOOL]}, "functions", "invalid_value", "'tools' and 'functions' cannot"),
    ({"functions": [{"name": "f"}], "tool_choice": "auto"}, "functions", "invalid_value", "'tool_choice' and 'func"),
    ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call", "invalid_value", "'functions'"),
    ({"function_call": {"name": "g"}}, "function_call", "invalid_value", "only allowed when 'functions'"),
    ({"function_call": "required"}, "function_call", "invalid_value", "expected 'none', 'auto', or an object"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].name", "missing_required_parameter", "Miss"),
    (
        {"messages": [{**USER, "function_call": {"name": "f", "arguments": "{}"}}]},
        "messages[0].function_call",
        "invalid_value",
        "role 'assistant'",
    ),
    (
        {"max_completion_tokens": MAX_LENGTH},
        "max_completion_tokens",
        "context_length_exceeded",
        f"and max_completion_tokens asks for {MAX_LENGTH} more",
    ),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "invalid_value", "'high'"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "invalid_type", "expected an object, but got an array"),
    ({"cache_salt": "x" * 513}, "cache_salt", "invalid_value", "512"),
    ({"response_format": {"type": "json_object"}}, "response_format", "grammar_unavailable", "no grammars"),
    ({"guided_decoding_backend": "x"}, "guided_decoding_backend", "unsupported_parameter", "not supported"),
    ({"logit_bias": {"300": 1}}, "logit_bias", "invalid_value", "[0, 258), but got 300"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_value", "expected token ids as keys, but got 'a'"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_value", "in [-100, 100] for token 5, but got 101"),
    ({"logit_bias": [5]}, "logit_bias", "invalid_value", "expected an object of token ids and numbers"),
    ({"presence_penalty": 2.5}, "presence_penalty", "invalid_value", "<= 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value", "> 0"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "invalid_value", "expected at most the longest answer, 4"),
    ({"mood": "good"}, "mood", "unknown_parameter", "Unrecognized request argument supplied: mood"),
    ({"model": 5}, "model", "invalid_type", "expected a string"),
    ({"model": None}, "model", "invalid_type", "expected a string, but got null"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_wrong_chats(server: MemoryServer, stream: bool) -> None:
    for fields, param, code, words in WRONG_CHATS:
        response = await server.post(CHAT, {"messages": [USER], **({"stream": True} if stream else {}), **fields})
        if stream and "only allowed" in words:
            continue  # allowed in a stream
        error = check_envelope(response.json())
        assert response.status_code == 400, fields
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param
        assert words in error["message"], error
        if code is not None:
            assert error["code"] == code


async def test_wrong_completions(server: MemoryServer) -> None:
    cases: list[tuple[Any, str]] = [
        (None, "a string, or a non-empty array"),
        ([], "non-empty"),
        ({}, "got an object"),
        ([1.5], "an array of strings"),
        ([True], "an array of strings"),
        (["a", 1], "an array of strings"),
        ([[1], "a"], "an array of strings"),
        ([-1], "[0, 258), but got -1"),
        ([5, 258], "[0, 258), but got 258"),
        ([10**30], "but got 1"),
        ([[]], "at least one token"),
        ("", "at least one token"),
        (["ok", ""], "at least one token"),
        (["x"] * 129, "at most 128"),
        ("x" * (MAX_LENGTH - 15), str(MAX_LENGTH - 15)),
    ]
    for prompt, words in cases:
        response = await server.post(COMPLETIONS, {"prompt": prompt})
        error = check_envelope(response.json())
        assert response.status_code == 400, prompt
        assert error["param"] == ("max_tokens" if words.isdigit() else "prompt"), error
        assert words in error["message"], error
    response = await server.post(COMPLETIONS, {})
    assert check_envelope(response.json())["message"] == "Missing required parameter: 'prompt'."
    for name, value in {"suffix": "x", "add_special_tokens": False}.items():
        response = await server.post(COMPLETIONS, {"prompt": "x", name: value})
        assert check_envelope(response.json())["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"logprobs": 65}, "logprobs", "<= 64"),
        ({"logprobs": True}, "logprobs", "expected an integer, but got a boolean"),
        ({"max_tokens": 0}, "max_tokens", "expected a value >= 1, or 0 together with 'echo', but got 0"),
        ({"max_tokens": -1, "echo": True}, "max_tokens", ">= 0"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not available when 'stream' is enabled"),
        ({"best_of": 0}, "best_of", ">= 1"),
        ({"best_of": 2, "n": 3}, "best_of", "expected at least 'n' (3), but got 2"),
        ({"best_of": 2, "stream": True}, "best_of", "expected 'n' (1) when 'stream' is enabled, but got 2"),
        ({"prompt": ["a", "b", "c"], "n": 43}, "n", "at most 128 answers to all prompts together, but got 3 x 43"),
        ({"prompt": ["a", "b"], "best_of": 65}, "best_of", "at most 128 answers to all prompts together"),
        ({"prompt": ["a", "b"], "n": 33}, "n", "at most 64 answers, which is the number of requests"),
    ],
)  # fmt: skip
async def test_wrong_numbers_of_answers_and_logprobs(
    server: MemoryServer, fields: dict[str, Any], param: str, words: str
) -> None:
    response = await server.post(COMPLETIONS, {"prompt": "x", **fields})
    error = check_envelope(response.json())
    assert (response.status_code, error["param"]) == (400, param)
    assert words in error["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"5", b"\xff", b'{"a": NaN}', b'"\\ud800"', b"[" * 50_000, b'{"model": 1e999}']
)
async def test_bodies_that_are_no_object(server: MemoryServer, body: bytes) -> None:
    response = await server.client.post(CHAT, content=body, headers=JSON_TYPE)
    assert response.status_code == 400
    check_envelope(response.json())


async def test_other_refusals(server: MemoryServer) -> None:
    for path, method, status, code in (
        ("/v1/chat/completions", "GET", 405, "method_not_allowed"),
        ("/ready", "POST", 405, "method_not_allowed"),
        ("/v2/nothing", "GET", 404, "unknown_path"),
        ("/", "POST", 404, "unknown_path"),
        ("/v1/chat/completions/", "POST", 404, "unknown_path"),
        ("/health/", "GET", 404, "unknown_path"),
    ):
        response = await server.client.request(method, path)
        assert response.status_code == status
        assert check_envelope(response.json())["code"] == code
        assert "location" not in response.headers
    response = await server.client.get(CHAT)
    assert response.headers["allow"] == "POST"
    response = await server.client.post(CHAT, content=b" " * 100_001, headers=JSON_TYPE)
    assert response.status_code == 413
    assert check_envelope(response.json())["code"] == "request_too_large"
    response = await server.post(CHAT, {"model": "gpt-9", "messages": [USER]})
    assert response.status_code == 404
    error = check_envelope(response.json())
    assert (error["code"], error["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({"priority": 1}, 404, None, "request_not_found"),
        ({}, 400, "priority", "missing_required_parameter"),
        ({"priority": None}, 400, "priority", "invalid_type"),
        ({"priority": 1.5}, 400, "priority", "invalid_type"),
        ({"priority": True}, 400, "priority", "invalid_type"),
        ({"priority": 2**31}, 400, "priority", "invalid_value"),
        ({"priority": 1, "model": "echo"}, 400, "model", "unknown_parameter"),
    ],
)
async def test_wrong_priorities(
    server: MemoryServer, body: dict[str, Any], status: int, param: str | None, code: str
) -> None:
    response = await server.client.post("/v1/requests/unknown/priority", json=body)
    error = check_envelope(response.json())
    assert (response.status_code, error["param"], error["code"]) == (status, param, code)


def parse_ids(body: bytes) -> object:
    return prompts(parse_completion(body), vocab_size=258)


NAMES = st.sampled_from(
    ["model", "messages", "prompt", "stream", "stream_options", "max_tokens", "stop", "seed", "n", "top_p", "role"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("echo"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


@given(body=st.dictionaries(NAMES, JSON, max_size=8) | JSON)
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_parsers_raise_nothing_but_api_errors(body: Any) -> None:
    encoded = json.dumps(body, ensure_ascii=False).encode(errors="surrogatepass")
    for parse in (parse_chat, parse_ids):
        error: ApiError | None = None
        try:
            parse(encoded)
        except ApiError as refused:
            error = refused
        if error is not None:
            assert error.status == 400
            check_envelope(json.loads(error.body()))
