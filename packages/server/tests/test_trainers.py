"""What the clients of trainers send and read, restated: trl and SkyRL (vLLM's words), slime (SGLang's).

Their weights come over NCCL, which an engine on a CPU does not have; over gloo the same routes are in
`test_weight_routes.py`.
"""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from io import BytesIO
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from memory_server import MemoryServer
from pagewood.engine.testing.echo import EXPERT_SHAPE, echo_experts, echo_logprob, oracle_states

pytestmark = pytest.mark.anyio

TEXT = "b" * 24


async def post(server: MemoryServer, path: str, body: dict[str, Any], *, status: int = 200) -> Any:
    response = await server.client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def prompt_of(server: MemoryServer, text: str = TEXT) -> list[int]:
    return server.tokenizer.encode(text).tolist()


def states_of(text: list[int]) -> NDArray[np.float32]:
    return oracle_states(text, window=None, adapter=0, start=0, has_states=False)


def kept_of(prompt: list[int], output: list[int]) -> list[list[int]]:
    """Return what the echo model keeps for each token of an output."""
    found = [echo_logprob(token, len(prompt) + i, 0, has_kept=True).kept for i, token in enumerate(output)]
    return [np.frombuffer(kept or b"", "<i4").tolist() for kept in found]


def experts_of(text: list[int]) -> NDArray[np.int32]:
    return echo_experts(states_of(text))


def ending(server: MemoryServer, prompt: list[int]) -> tuple[list[int], int]:
    """Return the greedy answer to a prompt up to a token that has not occurred before, and that token."""
    tokens = server.expected_tokens(prompt, max_tokens=20)
    place = next(index for index in range(3, 20) if tokens[index] not in tokens[:index])
    return tokens[: place + 1], tokens[place]


async def test_completions_have_ids_and_the_token_that_ended_them(server: MemoryServer) -> None:
    """As trl's client reads them."""
    prompts = [prompt_of(server), prompt_of(server, "c" * 10)]
    (first, stop), second = ending(server, prompts[0]), server.expected_tokens(prompts[1], max_tokens=20)
    body = {
        "model": "echo", "prompt": prompts, "n": 1, "repetition_penalty": 1.0, "temperature": 0.0, "top_p": 1.0,
        "top_k": 0, "min_p": 0.0, "max_tokens": 20, "logprobs": 0, "stop_token_ids": [stop],
        "return_token_ids": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    choices = (await post(server, "/v1/completions", body))["choices"]
    second = second[: second.index(stop) + 1] if stop in second else second
    assert [choice["token_ids"] for choice in choices] == [first, second]
    assert [choice["prompt_token_ids"] for choice in choices] == prompts
    for choice in choices:
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
        assert [list(top) for top in logprobs["top_logprobs"]] == [[name] for name in logprobs["tokens"]]
        assert len(logprobs["token_logprobs"]) == len(logprobs["tokens"])
    assert choices[0]["finish_reason"] == "stop"
    assert choices[0]["text"] == server.tokenizer.decode(first[:-1])  # without the text of the stop token
    plain = await post(server, "/v1/completions", {**body, "return_token_ids": False, "logprobs": None})
    assert plain["choices"][0]["text"] == choices[0]["text"]
    assert not {"token_ids", "prompt_token_ids"} & set(plain["choices"][0])
    for other in ({"stream": True}, {"use_beam_search": True}):
        error = (await post(server, "/v1/completions", {**body, "logprobs": None, **other}, status=400))["error"]
        assert error["param"] == "return_token_ids"


async def test_chats_have_ids(server: MemoryServer) -> None:
    messages = [{"role": "user", "content": "b"}]
    body = {
        "model": "echo", "messages": messages, "n": 2, "temperature": 0.0, "top_k": 0, "max_tokens": 6,
        "logprobs": True, "top_logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    answer = await post(server, "/v1/chat/completions", body)
    prompt = (await post(server, "/tokenize", {"messages": messages}))["tokens"]
    assert answer["prompt_token_ids"] == prompt
    assert len(answer["choices"]) == 2
    for choice in answer["choices"]:
        assert choice["token_ids"] == server.expected_tokens(prompt, max_tokens=6)
        assert [one["token"] for one in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in choice["token_ids"]]


async def test_tokens_in_and_out(server: MemoryServer) -> None:
    """As SkyRL sends them, around a pause and a flush."""
    prompt = prompt_of(server)
    expected, stop = ending(server, prompt)
    chosen = {
        "temperature": 0.0,
        "max_tokens": 20,
        "logprobs": 1,
        "stop_token_ids": [stop],
        "skip_special_tokens": True,
    }
    body = {"sampling_params": chosen, "model": "echo", "token_ids": prompt, "cache_salt": "run-1"}
    assert (await server.admin.get("/get_world_size")).json() == {"world_size": 1}
    found = await server.admin.post("/pause", params={"mode": "keep", "clear_cache": "false"})  # no body at all
    assert found.json() == {"paused": True, "status": "paused"}
    running = asyncio.create_task(post(server, "/inference/v1/generate", body))
    await server.until(lambda: server.service.live.num_live > 0)
    assert (await server.admin.post("/resume")).status_code == 200
    from_page = await server.admin.post("/resume", headers={"Origin": "http://memory"})  # a form of a web page
    assert from_page.json()["error"]["code"] == "unsupported_media_type"
    answer = await running
    [choice] = answer["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == (expected, "stop")
    content = choice["logprobs"]["content"]
    assert [one["token_id"] for one in content] == expected
    assert [one["token"] for one in content] == [f"token_id:{token}" for token in expected]
    assert all(one["rank"] >= 1 and len(one["top_logprobs"]) == 1 for one in content)
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": len(expected)}]
    assert (await post(server, "/inference/v1/generate", body))["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    done = await server.admin.post("/reset_prefix_cache", json={"reset_running_requests": True})
    assert done.json() == {"success": True}
    again = await post(server, "/inference/v1/generate", {**body, "sampling_params": {**chosen, "prompt_logprobs": 0}})
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert [list(one) for one in again["prompt_logprobs"][1:]] == [[str(token)] for token in prompt[1:]]
    assert (await server.admin.get("/is_paused")).json() == {"is_paused": False}
    [choice] = (await post(server, "/inference/v1/generate", {**body, "return_routed_experts": True}))["choices"]
    experts = np.load(BytesIO(b64decode(choice["routed_experts"])), allow_pickle=False)
    assert (experts == experts_of([*prompt, *expected[:-1]])).all()
    for logprobs in (1, None):
        masked = {**body, "sampling_params": {**chosen, "logprobs": logprobs}, "return_sampling_mask": True}
        [choice] = (await post(server, "/inference/v1/generate", masked))["choices"]
        assert choice["sampling_mask"] == kept_of(prompt, expected)
        assert (choice["logprobs"] is None) == (logprobs is None)
    wrong = {**body, "sampling_params": {"temperature": -1}}
    assert (await post(server, "/inference/v1/generate", wrong, status=400))["error"]["param"].endswith("temperature")
    wrong = {**body, "token_ids": [10**6]}
    assert (await post(server, "/inference/v1/generate", wrong, status=400))["error"]["param"] == "token_ids"
    wrong = {**body, "stream": True, "sampling_params": {"prompt_logprobs": 0}}
    error = (await post(server, "/inference/v1/generate", wrong, status=400))["error"]
    assert error["param"] == "sampling_params.prompt_logprobs"
    wrong = {**body, "stream_options": {"include_usage": True}}
    assert (await post(server, "/inference/v1/generate", wrong, status=400))["error"]["param"] == "stream_options"


async def test_a_reset_takes_the_memory_of_running_requests_too(server: MemoryServer) -> None:
    prompt = prompt_of(server)
    body = {"token_ids": prompt, "sampling_params": {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}}
    server.gate.allow(8)
    running = asyncio.create_task(post(server, "/inference/v1/generate", body))
    await server.until(lambda: server.gate.is_held)
    resetting = asyncio.create_task(server.admin.post("/reset_prefix_cache", json={"reset_running_requests": True}))
    await server.until(lambda: server.has_command_at_gate)
    server.gate.open()
    assert (await resetting).json() == {"success": True}
    assert (await running)["choices"][0]["token_ids"] == server.expected_tokens(prompt, max_tokens=20)


async def test_generate_as_slime_does(server: MemoryServer) -> None:
    """It reads tokens and log probabilities from `meta_info`, and trains on the token that ended the answer too."""
    prompt = prompt_of(server)
    expected, stop = ending(server, prompt)
    chosen = {
        "temperature": 0.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 20, "stop": None, "stop_token_ids": [stop],
        "skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False,
    }  # fmt: skip
    body = {"input_ids": prompt, "sampling_params": chosen, "return_logprob": True}
    answer = await post(server, "/generate", body)
    meta = answer["meta_info"]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"] == expected
    assert (meta["finish_reason"]["type"], meta["weight_version"]) == ("stop", "default")
    assert answer["text"] == server.tokenizer.decode(expected, skip_special_tokens=False)
    asked = {"return_routed_experts": True, "return_hidden_states": True}
    states = states_of(text := [*prompt, *expected[:-1]])
    for first in (0, 3, -1):
        starts = {"routed_experts_start_len": first, "hidden_states_start_len": first}
        found = (await post(server, "/generate", {**body, **asked, **starts}))["meta_info"]
        start = len(prompt) - 1 if first == -1 else first
        experts = np.frombuffer(b64decode(found["routed_experts"]), "<i4").reshape(len(text) - start, *EXPERT_SHAPE)
        assert (experts == experts_of(text)[start:]).all()
        assert found["routed_experts_start_len"] == start
        of_prompt, *others = found["hidden_states"]
        assert [*of_prompt, *others] == states[start:].tolist()
        assert len(of_prompt) == len(prompt) - start
        assert (found["cached_tokens"] > 0) == (first == -1)
    for wrong in ({**starts}, {**asked, "hidden_states_start_len": 1000}):
        error = (await post(server, "/generate", {**body, **wrong}, status=400))["error"]
        assert error["param"].startswith(("return_", "routed_experts_start"))
    asked = {"sampling_params": {**chosen, "custom_params": {"return_top_p_token_ids": True}}}
    for has_logprobs in (True, False):
        found = (await post(server, "/generate", {**body, **asked, "return_logprob": has_logprobs}))["meta_info"]
        ids, offsets = (np.frombuffer(b64decode(found[f"top_p_token_{name}"]), "<i4") for name in ("ids", "offsets"))
        kept = kept_of(prompt, expected)
        assert [ids[start:end].tolist() for start, end in pairwise(offsets)] == kept
        assert len(offsets) == len(expected) + 1
        assert ("output_token_logprobs" in found) == has_logprobs
    assert "top_p_token_ids" not in meta
    trimmed = await post(server, "/generate", {**body, "sampling_params": {**chosen, "no_stop_trim": False}})
    assert trimmed["output_ids"] == expected[:-1]
    assert trimmed["meta_info"]["completion_tokens"] == meta["completion_tokens"] == len(expected)
    both = {**body, "sampling_params": {**chosen, "stop": ["x"]}}
    error = (await post(server, "/generate", both, status=400))["error"]
    assert error["param"] == "sampling_params.no_stop_trim"
    assert (await server.admin.post("/pause_generation", json={})).status_code == 200  # around an update
    assert (await server.admin.get("/flush_cache")).status_code == 200
    assert (await server.admin.post("/continue_generation", json={})).status_code == 200
    assert (await server.client.get("/health_generate")).status_code == 200


async def events(server: MemoryServer, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the events of a stream."""
    response = await server.client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    *found, last = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert last == "[DONE]"
    return [json.loads(one) for one in found]


def decoded(value: str) -> list[int]:
    return np.frombuffer(b64decode(value), "<i4").tolist()


@pytest.mark.parametrize("num", [1, 3])
async def test_streams_of_generate_have_the_same(num: int, server: MemoryServer) -> None:
    """As SGLang sends them: with the last event what was computed, with each what its tokens were drawn from."""
    chosen = {"max_new_tokens": 9, "n": num, "temperature": 1.0, "sampling_seed": 3, "no_stop_trim": True}
    body: dict[str, Any] = {
        "input_ids": prompt_of(server, "b" * 60), "return_routed_experts": True, "return_hidden_states": True,
        "hidden_states_start_len": 4, "return_logprob": True,
        "sampling_params": {**chosen, "custom_params": {"return_top_p_token_ids": True}},
    }  # fmt: skip
    whole = await post(server, "/generate", body)
    for index, answer in enumerate(whole if num > 1 else [whole]):
        text = [*body["input_ids"], *answer["output_ids"][:-1]]
        experts = np.frombuffer(b64decode(answer["meta_info"]["routed_experts"]), "<i4").reshape(-1, *EXPERT_SHAPE)
        assert (experts == experts_of(text)).all()
        of_prompt, *others = answer["meta_info"]["hidden_states"]
        assert [*of_prompt, *others] == states_of(text)[4:].tolist()
        assert len(others) == len(answer["output_ids"]) - 1
        found = [one for one in await events(server, "/generate", body) if one.get("index", 0) == index]
        *early, last = [one["meta_info"] for one in found]
        assert len(early) > 1
        names = ("routed_experts", "routed_experts_start_len", "hidden_states")
        assert not any(name in one for one in early for name in names)
        assert all(last[name] == answer["meta_info"][name] for name in names)
        masks: list[list[int]] = []
        for one in found:
            ids, offsets = (decoded(one["meta_info"][f"top_p_token_{name}"]) for name in ("ids", "offsets"))
            assert len(offsets) == len(one["output_ids"]) + 1
            masks += [ids[start:end] for start, end in pairwise(offsets)]
        assert masks == kept_of(body["input_ids"], answer["output_ids"])
    if num > 1:  # the prompt is computed once
        assert [one["meta_info"]["cached_tokens"] > 0 for one in whole] == [False, *[True] * (num - 1)]


async def test_streams_of_tokens_have_the_same(server: MemoryServer) -> None:
    """As vLLM sends them to those who add up new tokens, and read the experts of the last event."""
    chosen = {"max_tokens": 9, "n": 2, "temperature": 1.0, "seed": 3, "logprobs": 1}
    asked = {"return_routed_experts": True, "return_sampling_mask": True}
    body: dict[str, Any] = {"token_ids": prompt_of(server), "sampling_params": chosen, **asked}
    whole = await post(server, "/inference/v1/generate", body)
    *found, usage = await events(server, "/inference/v1/generate", {**body, "stream_options": {"include_usage": True}})
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 18
    for expected in whole["choices"]:
        text = [*body["token_ids"], *expected["token_ids"][:-1]]
        experts = np.load(BytesIO(b64decode(expected["routed_experts"])), allow_pickle=False)
        assert (experts == experts_of(text)).all()
        parts = [one for event in found for one in event["choices"] if one["index"] == expected["index"]]
        assert len(parts) > 2
        for name in ("token_ids", "sampling_mask"):
            assert [one for part in parts for one in part[name]] == expected[name]
        assert [one for part in parts for one in part["logprobs"]["content"]] == expected["logprobs"]["content"]
        for name in ("finish_reason", "weight_versions", "routed_experts"):
            assert [part[name] for part in parts] == [*[None] * (len(parts) - 1), expected[name]]
    plain = (await events(server, "/inference/v1/generate", {**body, **dict.fromkeys(asked, False)}))[-1]
    assert (plain["choices"][0]["sampling_mask"], plain["choices"][0]["routed_experts"]) == (None, None)
    assert "usage" not in plain
