"""The native endpoints: generation with ids, the tokenizer, and control of the server."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from echo_folder import EOS_ID
from memory_server import MAX_LENGTH, MemoryServer
from pagewood.engine.seeds import answer_seed
from pagewood.engine.testing.echo import echo_logprob

pytestmark = pytest.mark.anyio

PROMPT = "Generate from me, please"
PAGE = 16


async def post(server: MemoryServer, path: str, body: dict[str, Any], **headers: str) -> Any:
    response = await server.client.post(path, json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


async def command(server: MemoryServer, path: str, body: dict[str, Any]) -> Any:
    """Send a request to an admin route."""
    response = await server.admin.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def error(server: MemoryServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await server.client.post(path, json=body)
    assert response.status_code in (400, 404), response.text
    return response.json()["error"]


async def events(server: MemoryServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await server.client.post("/generate", json={**body, "stream": True})
    assert response.status_code == 200, response.text
    *lines, done, nothing = response.text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_text_ids_and_messages_give_the_oracles_tokens(server: MemoryServer) -> None:
    ids = server.tokenizer.encode(PROMPT).tolist()
    params = {"max_new_tokens": 12}
    expected = server.expected_tokens(ids, max_tokens=12)
    by_text = await post(server, "/generate", {"text": PROMPT, "sampling_params": params})
    by_ids = await post(server, "/generate", {"input_ids": ids, "sampling_params": params})
    assert by_text["output_ids"] == by_ids["output_ids"] == expected
    assert by_text["text"] == by_ids["text"] == server.tokenizer.decode(expected)
    meta = by_text["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (len(ids), 12, 0)
    assert by_ids["meta_info"]["cached_tokens"] == (len(ids) - 1) // PAGE * PAGE == PAGE
    messages = [{"role": "user", "content": PROMPT}]
    chat = await post(server, "/generate", {"messages": messages, "sampling_params": params})
    rendered = server.tokenizer.encode(server.tokenizer.render_chat(messages), add_special_tokens=False).tolist()
    assert chat["output_ids"] == server.expected_tokens(rendered, max_tokens=12)


async def test_the_token_that_ends_an_answer_counts_and_is_not_among_its_ids(server: MemoryServer) -> None:
    tokens = server.expected_tokens(server.tokenizer.encode(PROMPT).tolist(), max_tokens=5)
    body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 9, "stop_token_ids": [tokens[3]]}}
    found = await post(server, "/generate", body)
    assert tokens[3] not in tokens[:3]
    assert found["output_ids"] == tokens[:3]
    assert found["meta_info"]["finish_reason"] == {"type": "stop"}
    assert found["meta_info"]["completion_tokens"] == 4


async def test_several_prompts_and_answers_are_an_array(server: MemoryServer) -> None:
    params = {"max_new_tokens": 6, "n": 2, "temperature": 1, "sampling_seed": 3}
    found = await post(server, "/generate", {"text": ["a", "bc"], "sampling_params": params})
    assert [one["index"] for one in found] == [0, 1, 2, 3]
    expected = [
        server.expected_tokens(
            server.tokenizer.encode(text).tolist(), max_tokens=6, temperature=1.0, seed=answer_seed(3, index)
        )
        for text in ("a", "bc")
        for index in range(2)
    ]
    assert [one["output_ids"] for one in found] == expected
    assert [one["meta_info"]["prompt_tokens"] for one in found] == [1, 1, 2, 2]
    one = await post(server, "/generate", {"text": ["a"], "sampling_params": {"max_new_tokens": 1}})
    assert [one["index"] for one in one] == [0]


async def test_a_stream_has_what_is_new(server: MemoryServer) -> None:
    body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 9}, "return_logprob": True, "logprob_start_len": 0}
    whole = await post(server, "/generate", body)
    found = await events(server, body)
    assert "".join(one["text"] for one in found) == whole["text"]
    assert [token for one in found for token in one["output_ids"]] == whole["output_ids"]
    assert [one["meta_info"]["completion_tokens"] for one in found] == list(range(1, 10))
    for name in ("input_token_logprobs", "output_token_logprobs"):
        joined = [entry for one in found for entry in one["meta_info"].get(name, ())]
        assert joined == whole["meta_info"][name]
    reasons = [one["meta_info"]["finish_reason"] for one in found]
    assert reasons == [None] * 8 + [whole["meta_info"]["finish_reason"]]
    assert all("index" not in one for one in found)
    several = await events(server, {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 2}})
    assert {one["index"] for one in several} == {0, 1}


async def test_logprobs(server: MemoryServer) -> None:
    ids = server.tokenizer.encode(PROMPT).tolist()
    body = {
        "text": PROMPT, "sampling_params": {"max_new_tokens": 4}, "return_logprob": True, "top_logprobs_num": 2,
        "logprob_start_len": 3, "return_text_in_logprobs": True,
    }  # fmt: skip
    meta = (await post(server, "/generate", body))["meta_info"]
    tokens = server.expected_tokens(ids, max_tokens=4)
    expected = [echo_logprob(token, len(ids) + i, 0).logprob for i, token in enumerate(tokens)]
    assert [(logprob, token) for logprob, token, _ in meta["output_token_logprobs"]] == [
        *zip(expected, tokens, strict=True)
    ]
    assert b"".join(server.tokenizer.token_bytes(token) for _, token, _ in meta["input_token_logprobs"]) == (
        PROMPT[3:].encode()
    )
    assert [text for _, _, text in meta["input_token_logprobs"]] == list(PROMPT[3:])
    assert [logprob for logprob, _, _ in meta["input_token_logprobs"]] == [
        echo_logprob(token, i, 0).logprob for i, token in enumerate(ids) if i >= 3
    ]
    assert [len(top) for top in meta["output_top_logprobs"]] == [2] * 4
    assert [len(top) for top in meta["input_top_logprobs"]] == [2] * (len(PROMPT) - 3)
    plain = (await post(server, "/generate", {"text": PROMPT, "return_logprob": True}))["meta_info"]
    assert plain.keys().isdisjoint({"output_top_logprobs", "input_token_logprobs"})
    assert {text for _, _, text in plain["output_token_logprobs"]} == {None}
    first = await post(server, "/generate", {**body, "logprob_start_len": 0})
    assert first["meta_info"]["input_token_logprobs"][0] == [None, ids[0], PROMPT[0]]
    assert first["meta_info"]["input_top_logprobs"][0] is None


async def test_timings(server: MemoryServer) -> None:
    began_s = time.time()
    body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 3}, "return_timings": True}
    times = (await post(server, "/generate", body))["meta_info"]["timings"]
    in_order = [began_s - 0.1, times["received_s"], times["first_token_s"], times["finished_s"], time.time()]
    assert in_order == sorted(in_order)
    streamed = [one["meta_info"]["timings"] for one in await events(server, body)]
    assert [one["finished_s"] is None for one in streamed] == [True, True, False]
    assert len({one["first_token_s"] for one in streamed}) == 1


async def test_explanations(server: MemoryServer) -> None:
    """Whole and streamed say the same, once for each answer."""
    ids = server.tokenizer.encode(PROMPT).tolist()
    params = {"max_new_tokens": 3}
    body = {"input_ids": ids, "sampling_params": params, "explain": True}
    meta = (await post(server, "/generate", body))["meta_info"]
    unknown = {
        "cause": "never_seen", "reusable_tokens": len(ids) - 1, "cached_tokens": 0, "first_difference": 0,
        "possible_tokens": 0, "evicted_by": None, "evicted_at_s": None,
    }  # fmt: skip
    assert meta["cache"] == unknown
    times = [meta["timings"][name] for name in ("received_s", "queued_s", "admitted_s", "first_token_s", "finished_s")]
    assert times == sorted(times)
    assert abs(times[0] - time.time()) < 60
    known = unknown | {"cause": "page_rounding", "cached_tokens": PAGE}
    known |= {"first_difference": PAGE, "possible_tokens": PAGE}  # the next page is not full
    again = (await post(server, "/generate", body))["meta_info"]
    assert again["cache"] == known
    assert again["cached_tokens"] == PAGE
    first, *others = await events(server, body)
    assert first["meta_info"]["cache"] == known
    assert all("cache" not in one["meta_info"] for one in others)
    assert len({one["meta_info"]["timings"]["admitted_s"] for one in (first, *others)}) == 1
    two = await post(server, "/generate", {**body, "sampling_params": {**params, "n": 2}})
    assert [one["meta_info"]["cache"]["cause"] for one in two] == ["page_rounding"] * 2
    plain = (await post(server, "/generate", {"input_ids": ids, "return_timings": True}))["meta_info"]
    assert "cache" not in plain
    assert plain["timings"].keys() == {"received_s", "first_token_s", "finished_s"}
    salted = (await post(server, "/generate", {**body, "cache_salt": "mine"}))["meta_info"]
    assert salted["cache"] == unknown, "what others have sent is not told"


@pytest.mark.parametrize("num_steps", [0, 3])
async def test_a_deadline_ends_a_request_that_waits_or_runs(server: MemoryServer, num_steps: int) -> None:
    server.gate.allow(num_steps)
    body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 300}, "deadline": 0.3}
    began_s = time.monotonic()
    refused = await error(server, "/generate", body)
    assert time.monotonic() - began_s > 0.25
    assert (refused["code"], refused["param"]) == ("deadline_exceeded", "deadline")
    streamed = await server.client.post("/generate", json={**body, "stream": True})
    if streamed.status_code == 200:
        assert json.loads(streamed.text.split("\n\n")[-2].removeprefix("data: "))["error"]["code"] == refused["code"]
    else:
        assert streamed.json()["error"]["code"] == refused["code"]
    assert server.service.live.num_live == 0
    server.gate.open()
    await server.until_idle()  # the engine has dropped them


async def test_a_deadline_that_is_kept_changes_nothing(server: MemoryServer) -> None:
    body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 5}}
    expected = await post(server, "/generate", body)
    found = await post(server, "/generate", {**body, "deadline": 60})
    assert found["output_ids"] == expected["output_ids"]
    loop: Any = asyncio.get_running_loop()
    assert not [handle for handle in loop._scheduled if not handle.cancelled() and handle.when() > loop.time() + 50]


@pytest.mark.parametrize("value", [0, -1, "soon", 1e7])
async def test_wrong_deadlines(server: MemoryServer, value: Any) -> None:
    assert (await error(server, "/generate", {"text": "a", "deadline": value}))["param"] == "deadline"


async def test_stop_strings_and_grammars_have_sglangs_names(server: MemoryServer) -> None:
    whole = await post(server, "/generate", {"text": PROMPT, "sampling_params": {"max_new_tokens": 30}})
    stop = whole["text"][4:6]
    body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 30, "stop": stop}}
    assert (await post(server, "/generate", body))["text"] == whole["text"].split(stop)[0]
    refused = await error(server, "/generate", {"text": PROMPT, "sampling_params": {"regex": "a+"}})
    assert refused["param"] == "sampling_params.regex"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "text", "'text' or 'input_ids' or 'messages'"),
        ({"text": "a", "input_ids": [1]}, "input_ids", "'text' and 'input_ids' cannot both be sent"),
        ({"text": []}, "text", "a non-empty array of strings"),
        ({"text": ["a"] * 129}, "text", "at most 128 prompts, but got 129"),
        ({"text": ["a"] * 2, "sampling_params": {"n": 65}}, "sampling_params.n", "2 x 65"),
        ({"text": "a", "sampling_params": {"n": 65}}, "sampling_params.n", "at most 64 answers"),
        ({"input_ids": [True]}, "input_ids", "token ids"),
        ({"input_ids": [258]}, "input_ids", "[0, 258), but got 258"),
        ({"input_ids": [[1], [-1]]}, "input_ids", "[0, 258), but got -1"),
        ({"text": "a", "extra_key": "x"}, "extra_key", "not supported"),
        ({"text": "a", "mood": 1}, "mood", "Unrecognized"),
        ({"text": "a", "tools": []}, "tools", "only allowed with 'messages'"),
        ({"text": "a", "top_logprobs_num": 1}, "top_logprobs_num", "'return_logprob' is enabled"),
        ({"text": "a", "sampling_params": {"max_tokens": 5}}, "sampling_params.max_tokens", "Unrecognized"),
        ({"text": "a", "sampling_params": {"top_p": 2}}, "sampling_params.top_p", "<= 1"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens", ">= 1"),
        ({"text": "a", "sampling_params": {"max_new_tokens": MAX_LENGTH}}, "sampling_params.max_new_tokens", "400"),
        ({"text": "a", "sampling_params": {"min_new_tokens": 200}}, "sampling_params.min_new_tokens", "128"),
        ({"text": "a", "sampling_params": {"custom_params": {"a": 1}}}, "sampling_params.custom_params.a", "Unrec"),
        ({"text": "a", "sampling_params": {"stop_token_ids": [999]}}, "sampling_params.stop_token_ids", "got 999"),
        ({"text": "a", "sampling_params": {"bad_words": ["x" * 99]}}, "sampling_params.bad_words", "32 tokens"),
        ({"messages": [{"role": "user", "content": "refuse me"}]}, "messages", "I refuse"),
        ({"text": "x" * 500}, "sampling_params.max_new_tokens", "500 tokens"),
    ],
)  # fmt: skip
async def test_wrong_requests(server: MemoryServer, body: dict[str, Any], param: str, words: str) -> None:
    found = await error(server, "/generate", body)
    assert (found["param"], found["type"]) == (param, "invalid_request_error")
    assert words in found["message"]


async def test_values_that_no_message_can_carry_are_refused(server: MemoryServer) -> None:
    messages = [{"role": "user", "content": "a"}]
    for path, body in (
        ("/apply_template", {"messages": messages, "chat_template_kwargs": {"x": 2**70}}),
        ("/v1/chat/completions", {"model": "echo", "messages": messages, "documents": [{"x": -(2**70)}]}),
    ):
        assert "[-2**63, 2**64)" in (await error(server, path, body))["message"]
    await server.until_idle()


async def test_the_tokenizer(server: MemoryServer) -> None:
    text = "héllo"
    ids = server.tokenizer.encode(text).tolist()
    found = await post(server, "/tokenize", {"text": text, "return_pieces": True})
    assert found == {
        "tokens": ids, "count": 6, "max_model_len": MAX_LENGTH, "pieces": ["h", "\ufffd", "\ufffd", "l", "l", "o"],
    }  # fmt: skip
    assert "pieces" not in await post(server, "/tokenize", {"text": text})
    assert (await post(server, "/tokenize", {"text": ""}))["tokens"] == []
    assert (await post(server, "/tokenize", {"prompt": text, "add_special_tokens": False}))["tokens"] == ids  # vLLM
    assert await post(server, "/detokenize", {"tokens": ids}) == {"text": text, "prompt": text}
    special = [*ids, EOS_ID]
    assert (await post(server, "/detokenize", {"tokens": special}))["text"] == text
    kept = await post(server, "/detokenize", {"tokens": special, "skip_special_tokens": False})
    assert kept["text"] == text + "<|end|>"
    assert (await error(server, "/detokenize", {"tokens": [258]}))["param"] == "tokens"
    refused = await error(server, "/tokenize", {"text": "x" * 40_000, "return_pieces": True})
    assert (refused["code"], refused["param"]) == ("too_many_pieces", "text")
    assert (await post(server, "/tokenize", {"text": "x" * 40_000}))["count"] == 40_000


async def test_the_chat_template(server: MemoryServer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    found = await post(server, "/apply_template", {"messages": messages})
    assert found["text"] == server.tokenizer.render_chat(messages)
    tokens = (await post(server, "/tokenize", {"messages": messages}))["tokens"]
    assert found["count"] == len(tokens)
    assert server.tokenizer.decode(tokens, skip_special_tokens=False) == found["text"]
    bare = await post(server, "/apply_template", {"messages": messages, "add_generation_prompt": False})
    assert bare["text"] == found["text"].removesuffix("<|start|>assistant\n")
    assert (await error(server, "/apply_template", {}))["code"] == "missing_required_parameter"


async def test_flush_drops_what_no_request_uses(server: MemoryServer) -> None:
    params = {"max_new_tokens": 4}
    await post(server, "/generate", {"text": "a" * 64, "sampling_params": params})
    again = await post(server, "/generate", {"text": "a" * 64, "sampling_params": params})
    assert again["meta_info"]["cached_tokens"] == 48
    assert await command(server, "/flush_cache", {}) == {"flushed_tokens": 64}
    cold = await post(server, "/generate", {"text": "a" * 64, "sampling_params": params})
    assert cold["meta_info"]["cached_tokens"] == 0
    assert cold["output_ids"] == again["output_ids"]
    response = await server.admin.post("/flush_cache", headers={"content-type": "application/json"})
    assert response.status_code == 200


async def test_flush_leaves_a_running_request_alone(server: MemoryServer) -> None:
    body = {"text": "b" * 64, "sampling_params": {"max_new_tokens": 20}}
    server.gate.allow(8)
    running = asyncio.create_task(post(server, "/generate", body))
    await server.until(lambda: server.gate.is_held)
    flushing = asyncio.create_task(command(server, "/flush_cache", {}))
    await server.until(lambda: server.has_command_at_gate)
    server.gate.open()
    assert await flushing == {"flushed_tokens": 0}
    assert (await running)["output_ids"] == server.expected_tokens(
        server.tokenizer.encode("b" * 64).tolist(), max_tokens=20
    )


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_paused_server_queues_requests_and_goes_on_with_those_that_ran(server: MemoryServer, mode: str) -> None:
    body = {"text": "b" * 64, "sampling_params": {"max_new_tokens": 20}}
    server.gate.allow(8)
    running = asyncio.create_task(post(server, "/generate", body))
    await server.until(lambda: server.gate.is_held)
    pausing = asyncio.create_task(command(server, "/pause", {"mode": mode}))
    await server.until(lambda: server.has_command_at_gate)
    server.gate.open()
    assert await pausing == {"paused": True}
    queued = asyncio.create_task(post(server, "/generate", {**body, "text": "c" * 64}))
    done, _ = await asyncio.wait([running, queued], timeout=0.2)
    assert not done
    assert await command(server, "/resume", {}) == {"paused": False}
    for answer, letter in ((await running, "b"), (await queued, "c")):
        expected = server.expected_tokens(server.tokenizer.encode(letter * 64).tolist(), max_tokens=20)
        assert answer["output_ids"] == expected
    assert (await server.admin.post("/pause", json={"mode": "drop"})).json()["error"]["param"] == "mode"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": PROMPT, "rid": "mine", "sampling_params": {"max_new_tokens": 200, "n": 2}}),
        ("/v1/completions", {"model": "echo", "prompt": [PROMPT, "b"], "max_tokens": 200, "ignore_eos": True}),
    ],
)
async def test_abort_ends_all_of_one_request(
    server: MemoryServer, path: str, body: dict[str, Any], stream: bool
) -> None:
    server.gate.allow(8)
    sent = {**body, "stream": stream}
    running = asyncio.create_task(server.client.post(path, json=sent, headers={"x-request-id": "trace-7"}))
    other = asyncio.create_task(server.client.post("/generate", json={"text": "other", "rid": "mine2"}))
    await server.until(lambda: server.gate.is_held and server.service.live.num_live == 3)
    assert (await error(server, "/abort", {"rid": "min"}))["code"] == "request_not_found"
    name = "mine" if path == "/generate" else "trace-7"
    live = server.service.live._live  # pyright: ignore[reportPrivateUsage]

    def all_answered() -> bool:
        if all(one.answered for one in live.values() if name in one.group.names):
            return True
        if server.gate.is_held:
            server.gate.allow(1)  # the steps before may have been those of the first request alone
        return False

    await server.until(all_answered)
    assert await post(server, "/abort", {"rid": name}) == {"aborted": 1}
    server.gate.open()
    aborted = await running
    assert ('"type":"abort"' if path == "/generate" else '"code":"aborted"') in aborted.text
    if not stream:
        assert aborted.status_code == (200 if path == "/generate" else 400)
    assert (await other).status_code == 200
    await server.until_idle()


async def test_abort_ends_a_beam_search(server: MemoryServer) -> None:
    server.gate.allow(2)
    body = {"model": "echo", "prompt": PROMPT, "n": 3, "use_beam_search": True, "max_tokens": 50}
    searching = asyncio.create_task(server.client.post("/v1/completions", json=body, headers={"x-request-id": "beam"}))
    await server.until(lambda: server.gate.is_held and server.service.live.num_live > 0)
    assert await post(server, "/abort", {"rid": "beam"}) == {"aborted": 1}
    server.gate.open()
    assert (await searching).json()["error"]["code"] == "aborted"
    await server.until_idle()


async def test_server_info(server: MemoryServer) -> None:
    found = (await server.admin.get("/server_info")).json()
    assert (found["model"], found["max_model_len"], found["vocab_size"]) == ("echo", MAX_LENGTH, 258)
    assert found["config"]["chunked_prefill_size"] == 512  # chosen at the start: nobody has set it
    assert found["kv_memory"]["num_tokens"] == found["kv_memory"]["num_pages"] * found["kv_memory"]["page_size"] == 1600
    assert found["engine"]["num_pages"] == 100
    assert {"pagewood-server", "pagewood-engine", "python"} <= found["versions"].keys()
