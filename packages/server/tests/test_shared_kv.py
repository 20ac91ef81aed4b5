"""Fields for KV that servers share: how much of a prompt must be cached, and what another server does for a request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from memory_server import MemoryServer

pytestmark = pytest.mark.anyio

PROMPT = "A prompt of several pages, which another server might have computed before this one"
CHAT = {"messages": [{"role": "user", "content": PROMPT}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "echo", "max_tokens": 4, **CHAT},
    "/v1/completions": {"model": "echo", "max_tokens": 4, "prompt": PROMPT},
    "/generate": {"sampling_params": {"max_new_tokens": 4}, "text": PROMPT},
}


async def answer(server: MemoryServer, path: str, **more: Any) -> Any:
    body = BODIES[path] | more
    if "model" in body:
        body["model"] = (await server.client.get("/v1/models")).json()["data"][0]["id"]
    response = await server.client.post(path, json=body)
    return response.json() if not more.get("stream") else response.text


def reason(path: str, answer: Any) -> str:
    return (
        answer["meta_info"]["finish_reason"]["type"] if path == "/generate" else answer["choices"][0]["finish_reason"]
    )


@pytest.mark.parametrize("path", BODIES)
async def test_an_answer_below_the_threshold_is_empty(server: MemoryServer, path: str) -> None:
    before = await answer(server, path, cache_hit_threshold=0.5)
    assert reason(path, before) == "cache_threshold"
    if path == "/generate":
        assert (before["text"], before["output_ids"]) == ("", [])
        assert before["meta_info"]["completion_tokens"] == 0
    else:
        choice = before["choices"][0]
        assert choice.get("text", choice.get("message", {}).get("content")) == ""
        assert before["usage"]["completion_tokens"] == 0
        assert before["usage"]["prompt_tokens"] > 16
    assert reason(path, await answer(server, path, cache_hit_threshold=0)) == "length"
    after = await answer(server, path, cache_hit_threshold=1)
    assert reason(path, after) == "length"
    metrics = (await server.client.get("/metrics")).text
    assert 'reason="cache_threshold"' in metrics


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_below_the_threshold_ends_with_that_reason(server: MemoryServer, path: str) -> None:
    text = await answer(server, path, cache_hit_threshold=0.5, stream=True)
    *events, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert done == "[DONE]"
    last = json.loads(events[-1])
    assert reason(path, last) == "cache_threshold"


@pytest.mark.parametrize("path", BODIES)
async def test_parameters_of_a_handshake_have_no_effect(server: MemoryServer, path: str) -> None:
    for said in (
        None, {}, {"do_remote_decode": False, "do_remote_prefill": None},
        {"remote_block_ids": [1, 2], "remote_engine_id": "x", "remote_host": "h", "remote_port": 5},
    ):  # fmt: skip
        assert reason(path, await answer(server, path, kv_transfer_params=said)) == "length"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"cache_hit_threshold": 1.5}, "cache_hit_threshold", "1.5"),
        ({"cache_hit_threshold": -0.1}, "cache_hit_threshold", "-0.1"),
        ({"cache_hit_threshold": "half"}, "cache_hit_threshold", "string"),
        ({"kv_transfer_params": [1]}, "kv_transfer_params", "array"),
        ({"kv_transfer_params": {"do_remote_decode": "yes"}}, "kv_transfer_params", "as 'do_remote_decode'"),
        (
            {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": True}},
            "kv_transfer_params",
            "at most one of",
        ),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params", "has no shared cache"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params", "has no shared cache"),
    ],
)
async def test_wrong_fields_are_refused_by_name(
    server: MemoryServer, path: str, fields: dict[str, Any], param: str, message: str
) -> None:
    error = (await answer(server, path, **fields))["error"]
    assert error["param"] == param
    assert message in error["message"], error


async def test_beam_search_has_no_threshold(server: MemoryServer) -> None:
    beams = {"use_beam_search": True, "n": 2, "temperature": 0}
    for fields in ({"cache_hit_threshold": 0.5}, {"kv_transfer_params": {"do_remote_decode": True}}):
        error = (await answer(server, "/v1/completions", **beams, **fields))["error"]
        assert error["param"] == next(iter(fields))
    found = await answer(server, "/v1/completions", **beams, cache_hit_threshold=0, kv_transfer_params={})
    assert len(found["choices"]) == 2
