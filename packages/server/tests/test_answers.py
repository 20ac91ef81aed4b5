"""Several answers to a prompt over HTTP: tokenized and computed once, each with its index, its seed and its end."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_commands import command_of
from memory_link import MemoryLink
from memory_server import MemoryServer
from pagewood.engine.api import Abort, FinishReason, Refuse, RequestOptions, Rows, SamplingParams, SetPriority, Submit
from pagewood.engine.seeds import answer_seed
from pagewood.engine.testing.echo import echo_logprob
from pagewood.engine.text import Tokenizer
from pagewood.server.messages import wire
from pagewood.server.protocols.common.formats import Choice, Tally, usage
from pagewood.server.requests.prompt_sharing import PromptSharing
from pagewood.server.stages.tokenizing import TokenizerStage, commands

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
LONG = "a prompt that is longer than two pages of sixteen tokens, so that it is shared"


def events(text: str) -> list[Any]:
    *lines, done, nothing = text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def seeded_texts(server: MemoryServer, prompt: str, n: int, *, max_tokens: int = 12, seed: int = 5) -> list[str]:
    return [
        server.expected_text(prompt, max_tokens=max_tokens, temperature=1.0, seed=answer_seed(seed, i))
        for i in range(n)
    ]


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_completions_prompt_major(server: MemoryServer, stream: bool) -> None:
    prompts = [LONG, "short"]
    body = {"prompt": prompts, "n": 3, "seed": 5, "temperature": 1.0, "max_tokens": 12, "stream": stream}
    expected = [text for prompt in prompts for text in seeded_texts(server, prompt, 3)]
    response = await server.post(COMPLETIONS, body)
    if stream:
        texts = [""] * 6
        for event in events(response.text):
            (choice,) = event["choices"]
            texts[choice["index"]] += choice["text"]
        assert texts == expected
        return
    answer = response.json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert answer["usage"] == {
        "prompt_tokens": len(LONG) + len("short"),
        "completion_tokens": 72,
        "total_tokens": len(LONG) + len("short") + 72,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.anyio
async def test_chat(server: MemoryServer) -> None:
    messages = [{"role": "user", "content": LONG}]
    prompt = server.tokenizer.render_chat(messages)
    body = {"messages": messages, "n": 3, "seed": 5, "temperature": 1.0, "max_tokens": 12}
    answer = (await server.post(CHAT, body)).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == seeded_texts(server, prompt, 3)
    num_prompt = answer["usage"]["prompt_tokens"]
    assert num_prompt == len(server.tokenizer.encode(prompt))
    response = await server.post(CHAT, {**body, "stream": True, "stream_options": {"include_usage": True}})
    *chunks, last = events(response.text)
    texts, begun, ended = [""] * 3, [0] * 3, [0] * 3
    for chunk in chunks:
        (choice,) = chunk["choices"]
        begun[choice["index"]] += "role" in choice["delta"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        ended[choice["index"]] += choice["finish_reason"] is not None
    assert (begun, ended) == ([1] * 3, [1] * 3)
    assert texts == seeded_texts(server, prompt, 3)
    assert last["usage"]["completion_tokens"] == 36
    assert last["usage"]["prompt_tokens"] == num_prompt
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == (num_prompt - 1) // 16 * 16


@pytest.mark.anyio
async def test_the_prompt_is_computed_once(server: MemoryServer) -> None:
    await server.post(COMPLETIONS, {"prompt": LONG, "n": 8, "max_tokens": 1, "ignore_eos": True})
    await server.until_idle()
    shared = (len(LONG) - 1) // 16 * 16
    assert server.service.status.counters["num_tokens"] <= len(LONG) + 7 * (len(LONG) - shared) + 8


@pytest.mark.anyio
async def test_greedy_answers_are_equal(server: MemoryServer) -> None:
    answer = (await server.post(COMPLETIONS, {"prompt": "x", "n": 4, "max_tokens": 9})).json()
    assert [choice["text"] for choice in answer["choices"]] == [server.expected_text("x", max_tokens=9)] * 4


@pytest.mark.anyio
async def test_answers_end_at_stop_strings_of_their_own(server: MemoryServer) -> None:
    whole = seeded_texts(server, LONG, 3, max_tokens=40)
    stop = whole[1][10:13]
    body = {"prompt": LONG, "n": 3, "seed": 5, "temperature": 1.0, "max_tokens": 40, "stop": stop}
    choices = (await server.post(COMPLETIONS, body)).json()["choices"]
    assert [choice["text"] for choice in choices] == [text.split(stop)[0] for text in whole]
    assert choices[1]["finish_reason"] == "stop"


@pytest.mark.anyio
async def test_a_client_that_leaves_ends_all_answers(server: MemoryServer) -> None:
    server.gate.allow(3)
    body = {"messages": [{"role": "user", "content": LONG}], "n": 5, "ignore_eos": True, "stream": True}
    asking = asyncio.create_task(server.post(CHAT, body))
    await server.until(lambda: server.service.live.num_live == 5 and server.gate.is_held)
    asking.cancel()
    await server.until(lambda: server.service.live.num_live == 0)
    assert server.service.live.num_ending == 5
    server.gate.open()
    await server.until_idle()
    assert server.service.status.counters["num_tokens"] < 300


@pytest.mark.anyio
async def test_a_priority_reaches_all_answers(server: MemoryServer) -> None:
    server.gate.close()
    body = {"model": "echo", "prompt": "x", "n": 3, "max_tokens": 2}
    asking = asyncio.create_task(server.client.post(COMPLETIONS, json=body, headers={"x-request-id": "mine"}))
    await server.until(lambda: server.gate.is_held)
    num_queued = server.num_queued_commands
    response = await server.client.post("/v1/requests/mine/priority", json={"priority": 7})
    assert response.status_code == 200
    await server.until(lambda: server.num_queued_commands == num_queued + 3)
    server.gate.open()
    assert (await asking).status_code == 200


@pytest.mark.anyio
async def test_a_prompt_that_is_refused_is_refused_once(server: MemoryServer) -> None:
    response = await server.post(CHAT, {"messages": [{"role": "user", "content": "refuse me"}], "n": 4})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_messages")
    await server.until_idle()


@pytest.mark.anyio
@pytest.mark.parametrize("shows_logprobs", [False, True])
async def test_best_of(server: MemoryServer, shows_logprobs: bool) -> None:
    tokens = server.tokenizer.encode(LONG).tolist()
    body: dict[str, Any] = {"prompt": [LONG, "y"], "seed": 5, "temperature": 1.0, "max_tokens": 6, "n": 2, "best_of": 5}
    body |= {"logprobs": 1} if shows_logprobs else {}
    answer = (await server.post(COMPLETIONS, body)).json()
    expected: list[str] = []
    for prompt in (tokens, server.tokenizer.encode("y").tolist()):
        scored: list[tuple[float, str]] = []
        for i in range(5):
            output = server.expected_tokens(prompt, max_tokens=6, temperature=1.0, seed=answer_seed(5, i))
            logprobs = [echo_logprob(token, len(prompt) + j, 0).logprob for j, token in enumerate(output)]
            scored.append((sum(logprobs) / len(logprobs), server.tokenizer.decode(output)))
        expected += [text for _, text in sorted(scored, reverse=True)[:2]]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["logprobs"] is not None for choice in answer["choices"]] == [shows_logprobs] * 4
    assert answer["usage"]["completion_tokens"] == 60
    assert answer["usage"]["prompt_tokens"] == len(LONG) + 1


@pytest.mark.anyio
async def test_best_of_as_many_as_are_shown_changes_nothing(server: MemoryServer) -> None:
    body = {"prompt": LONG, "seed": 5, "temperature": 1.0, "max_tokens": 6, "n": 3, "best_of": 3}
    answer = (await server.post(COMPLETIONS, body)).json()
    assert [choice["text"] for choice in answer["choices"]] == seeded_texts(server, LONG, 3, max_tokens=6)
    streamed = await server.post(COMPLETIONS, {**body, "stream": True})
    assert len({event["choices"][0]["index"] for event in events(streamed.text)}) == 3


@pytest.mark.anyio
@pytest.mark.parametrize("prompt", [LONG, "xyz"])
async def test_each_answer_has_the_scores_of_the_prompt(server: MemoryServer, prompt: str) -> None:
    """The engine computes them once, with the first answer, also for a short prompt that is not shared."""
    body = {
        "prompt": ["q", prompt],
        "n": 3,
        "seed": 5,
        "temperature": 1.0,
        "max_tokens": 4,
        "echo": True,
        "logprobs": 0,
    }
    choices = (await server.post(COMPLETIONS, {**body, "prompt_logprobs": 1})).json()["choices"]
    tokens = server.tokenizer.encode(prompt).tolist()
    expected = [None, *[echo_logprob(token, i, 0).logprob for i, token in enumerate(tokens) if i]]
    for choice in choices[3:]:
        assert choice["logprobs"]["token_logprobs"][: len(tokens)] == expected
        assert len(choice["logprobs"]["token_logprobs"]) == len(tokens) + 4
        assert choice["prompt_logprobs"] == choices[3]["prompt_logprobs"]
        assert len(choice["prompt_logprobs"]) == len(tokens)
    streamed: dict[int, list[Any]] = {}
    for event in events((await server.post(COMPLETIONS, {**body, "stream": True})).text):
        (choice,) = event["choices"]
        if choice["finish_reason"] is None:
            streamed.setdefault(choice["index"], []).extend(choice["logprobs"]["token_logprobs"])
    assert streamed == {choice["index"]: choice["logprobs"]["token_logprobs"] for choice in choices}


def generate(prompt: wire.Prompt, num_siblings: int = 2, **sampling: Any) -> wire.Generate:
    siblings = tuple(f"s{i}" for i in range(num_siblings))
    return wire.Generate(
        request_id="a", prompt=prompt, options=RequestOptions(sampling=SamplingParams(**sampling)), sibling_ids=siblings
    )


class Counting:
    """A tokenizer that counts what it encodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.num_encoded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Any:
        self.num_encoded += 1
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)


def test_a_prompt_is_tokenized_once(tokenizer: Tokenizer) -> None:
    counting: Any = Counting(tokenizer)
    submits = commands(counting, generate(wire.TextPrompt(text="héllo"), seed=3, prompt_logprobs=1))
    assert counting.num_encoded == 1
    assert [submit.request_id for submit in submits] == ["a", "s0", "s1"]
    seeds: list[int | None] = []
    for index, submit in enumerate(submits):
        assert isinstance(submit, Submit)
        seeds.append(submit.sampling.seed)
        options = wire.carried.decode(submit.carry)
        assert isinstance(options, wire.TextOptions)
        first_token = tokenizer.encode("h").tolist()[0]
        assert options.first_token == (None if index else first_token)
        assert submit.sampling.prompt_logprobs == (None if index else 1)
    assert seeds == [answer_seed(3, i) for i in range(3)]


def test_every_request_of_a_refused_prompt_is_refused(tokenizer: Tokenizer) -> None:
    refused = commands(tokenizer, generate(wire.TextPrompt(text="")))
    assert [(type(one), one.request_id) for one in refused] == [(Refuse, "a"), (Refuse, "s0"), (Refuse, "s1")]


def test_answers_are_cancelled_one_by_one(tokenizer: Tokenizer) -> None:
    link = MemoryLink(stopping=lambda: False)
    stage = TokenizerStage(tokenizer, link)
    stage.take(generate(wire.TextPrompt(text="x")), num_bytes=1)
    stage.take(Abort(request_id="s0"), num_bytes=1)
    stage.take(SetPriority(request_id="s1", priority=4), num_bytes=1)
    stage.tokenize_one()
    sent = [command_of(message) for message in wire.read(wire.engine_commands, link.receive(timeout_s=0))]
    assert [type(one) for one in sent] == [Submit, Refuse, Submit]
    assert [one.priority for one in sent if isinstance(one, Submit)] == [0, 4]
    counting: Any = Counting(tokenizer)
    stage = TokenizerStage(counting, link)
    stage.take(generate(wire.TextPrompt(text="x")), num_bytes=1)
    for name in ("a", "s0", "s1"):
        stage.take(Abort(request_id=name), num_bytes=1)
    stage.tokenize_one()
    sent = [command_of(message) for message in wire.read(wire.engine_commands, link.receive(timeout_s=0))]
    assert [(type(one), one.request_id) for one in sent] == [(Refuse, "a"), (Refuse, "s0"), (Refuse, "s1")]
    assert counting.num_encoded == 0


def test_usage_counts_a_prompt_once_and_its_cached_tokens_as_the_first_request_found_them() -> None:
    tallies = [
        Tally(num_prompt_tokens=40, num_cached_tokens=cached, num_output_tokens=5) for cached in (16, 32, 32)
    ] + [Tally(num_prompt_tokens=10, num_output_tokens=2), Tally(), Tally()]
    counted = usage(tallies, num_answers=3, is_speculating=False)
    assert (counted.prompt_tokens, counted.completion_tokens) == (50, 17)
    assert counted.prompt_tokens_details.cached_tokens == 16


def answer(text: str, prompt: tuple[wire.TokenEntry, ...] | None = None) -> wire.Answer:
    logprobs = None if prompt is None else wire.Logprobs((), prompt)
    return wire.Answer("r", text, None, False, None, 1, 0, 1, logprobs=logprobs)


@given(order=st.permutations([(i, j) for i in range(6) for j in range(2)]))
def test_answers_wait_for_the_scores_of_their_prompt(order: list[tuple[int, int]]) -> None:
    """Whatever comes first: each answer keeps its order, and only its first message has the scores."""
    entries = [(wire.TokenEntry(wire.ScoredToken(i, b"x", -1.0), 1, 0, ()),) for i in range(2)]
    sharing = PromptSharing(3)
    num_seen = dict.fromkeys(range(6), 0)
    sent: list[tuple[int, wire.Answer]] = []
    for index, _ in order:
        count = num_seen[index]
        num_seen[index] += 1
        is_first = index % 3 == 0 and count == 0
        sent += sharing.take(index, answer(str(count), entries[index // 3] if is_first else None))
    assert len(sent) == 12
    for index in range(6):
        mine = [one for i, one in sent if i == index]
        assert [one.text for one in mine] == ["0", "1"]
        assert mine[0].logprobs == wire.Logprobs((), entries[index // 3])
        assert mine[1].logprobs is None


@pytest.mark.parametrize("num_own", [1, 2, 5])
def test_answers_have_the_rows_of_their_prompt(num_own: int) -> None:
    """Those of the first one, unless one has them itself, because it was sent again alone."""

    def with_rows(first: int, end: int) -> wire.Answer:
        rows = Rows((end - first, 1), np.arange(first, end, dtype="<i4").tobytes())
        return wire.Answer("r", "", None, False, None, 7, 0, end - 6, experts=rows)

    sharing = PromptSharing(2)
    assert (
        sharing.take(1, with_rows(7 - num_own, 8)) == []
    )  # positions; the prompt has 7, and the first 2 are not asked
    found = [sharing.take(index, with_rows(first, end)) for index, first, end in [(0, 2, 7), (0, 7, 8), (1, 8, 10)]]
    joined = {i: Rows.joined([one.experts for pair in found for j, one in pair if i == j]) for i in range(2)}
    for rows, end in zip(joined.values(), (8, 10), strict=True):
        assert rows is not None
        positions = np.frombuffer(rows.data, "<i4").tolist()
        assert positions == [*range(2 if end == 8 or num_own < 2 else 7 - num_own, end)]


def test_the_score_of_an_answer_is_a_mean() -> None:
    def scored(*logprobs: float) -> float:
        choice = Choice()
        tokens = tuple(wire.TokenEntry(wire.ScoredToken(1, b"x", one), 1, 0, ()) for one in logprobs)
        choice.add(wire.Answer("r", "", FinishReason.STOP, True, None, 1, 0, 1, logprobs=wire.Logprobs(tokens)))
        return choice.score

    assert scored(-1.0, -3.0) == -2.0
    assert scored(-1.0, -1.0, -1.0) > scored(-1.5)
    assert scored() < scored(-9000.0)
