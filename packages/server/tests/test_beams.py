"""Beam search over HTTP: the sequences of the search itself, their texts, the usage, errors and cancellation."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from echo_folder import EOS_ID
from memory_link import MemoryLink
from memory_server import MAX_LENGTH, MemoryServer
from pagewood.engine.api import Grammar, SamplingParams
from pagewood.engine.beam_search import Beam, BeamSearch, BeamSearchParams
from pagewood.engine.testing.echo import echo_logprob, oracle_tokens
from pagewood.server.http.errors import ApiError
from pagewood.server.messages import wire
from pagewood.server.protocols.common.beams import BeamResponse
from pagewood.server.protocols.common.fields import StreamOptions
from pagewood.server.protocols.openai import beams
from pagewood.server.protocols.openai.chat import parse_chat
from pagewood.server.protocols.openai.completions import CompletionFormat, extent, parse_completion
from pagewood.server.requests.live import LiveRequests

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PROMPT = "a prompt that is longer than two pages of sixteen tokens, so that it is shared"
LIMIT = 64


def expected(
    server: MemoryServer,
    prompt: list[int],
    params: BeamSearchParams,
    *,
    stops: Callable[[tuple[int, ...]], bool] | None = None,
    num_more: int = 0,
) -> tuple[Beam, ...]:
    """Return what a search finds that asks the echo model's oracle; all ids that it asks about must exist."""
    vocab_size = server.tokenizer.vocab_size
    stop_ids = params.stop_ids((EOS_ID,))
    longest = params.longest(num_prompt=len(prompt), max_length=MAX_LENGTH)
    assert isinstance(longest, int)
    search = BeamSearch(params, stop_ids=stop_ids, max_tokens=longest, stops=stops)
    while sequences := search.sequences:
        answers: list[tuple[tuple[int, float], ...]] = []
        for sequence in sequences:
            tokens = [*prompt, *sequence]
            assert max(tokens) < vocab_size, "choose another prompt: the echo model made up an id that does not exist"
            sampling = SamplingParams(max_tokens=1, temperature=0.0)
            (token,) = oracle_tokens(
                tokens, sampling, vocab_size=vocab_size, stop_ids=frozenset(), max_length=MAX_LENGTH
            )
            answers.append(echo_logprob(token, len(tokens), params.beam_width + len(stop_ids) + num_more).top)
        search.take(answers)
    return search.best


def text(server: MemoryServer, beam: Beam) -> str:
    return server.tokenizer.decode(beam.tokens)


@pytest.mark.anyio
async def test_completions_are_the_best_sequences(server: MemoryServer) -> None:
    prompts = [PROMPT, "short"]
    fields = {"length_penalty": 0.5, "early_stopping": "never", "use_beam_search": True, "stop_token_ids": [7, 8]}
    params = BeamSearchParams(
        beam_width=5, max_tokens=9, length_penalty=0.5, early_stopping="never", stop_token_ids=(7, 8)
    )
    best = [expected(server, server.tokenizer.encode(prompt).tolist(), params) for prompt in prompts]
    body = {"prompt": prompts, "n": 3, "best_of": 5, "max_tokens": 9, "temperature": 0, "seed": 3, **fields}
    response = await server.post(COMPLETIONS, body)
    assert response.status_code == 200, response.text
    answer = response.json()
    shown = [beam for beams in best for beam in beams[:3]]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["text"] for choice in answer["choices"]] == [text(server, beam) for beam in shown]
    assert [choice["finish_reason"] for choice in answer["choices"]] == [beam.finish.value for beam in shown]
    num_prompt = sum(map(len, prompts))
    num_output = sum(beam.num_output_tokens for beams in best for beam in beams)
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.anyio
async def test_a_prompt_of_ids_and_one_beam(server: MemoryServer) -> None:
    prompt = [5, 6, 7]
    (beam,) = expected(server, prompt, BeamSearchParams(beam_width=1, max_tokens=16, ignore_eos=True))
    body = {"prompt": prompt, "use_beam_search": True, "ignore_eos": True}
    (choice,) = (await server.post(COMPLETIONS, body)).json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == (text(server, beam), "length", None)


@pytest.mark.anyio
async def test_chats(server: MemoryServer) -> None:
    messages = [{"role": "user", "content": "Who?"}]
    prompt = server.tokenizer.encode_chat(messages).tolist()
    best = expected(server, prompt, BeamSearchParams(beam_width=4, max_tokens=6))
    body = {"messages": messages, "n": 4, "max_tokens": 6, "use_beam_search": True}
    answer = (await server.post(CHAT, body)).json()
    assert [one["message"]["content"] for one in answer["choices"]] == [text(server, beam) for beam in best]
    assert [one["finish_reason"] for one in answer["choices"]] == [beam.finish.value for beam in best]
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    again = (await server.post(CHAT, body)).json()
    assert again["choices"] == answer["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) // 16 * 16


@pytest.mark.anyio
async def test_a_prompt_that_leaves_no_room_is_refused(server: MemoryServer) -> None:
    beams = {"use_beam_search": True, "n": 2}
    for body, param in (
        ({"prompt": [5] * (MAX_LENGTH - 3), "max_tokens": 4}, "max_tokens"),
        ({"prompt": [5] * (MAX_LENGTH + 1), "max_tokens": 4}, "max_tokens"),
        ({"prompt": ["short", "x" * (MAX_LENGTH + 1)], "max_tokens": 4}, "max_tokens"),
    ):
        response = await server.post(COMPLETIONS, {**body, **beams})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == param
    messages = [{"role": "user", "content": "refuse me"}]
    response = await server.post(CHAT, {"messages": messages, **beams})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_messages"


@pytest.mark.anyio
async def test_an_answer_may_be_as_long_as_fits(server: MemoryServer) -> None:
    prompt = [5] * (MAX_LENGTH - 2)
    body = {"prompt": prompt, "max_tokens": 2, "n": 2, "use_beam_search": True, "ignore_eos": True}
    response = await server.post(COMPLETIONS, body)
    assert response.status_code == 200, response.text
    best = expected(server, prompt, BeamSearchParams(beam_width=2, max_tokens=2, ignore_eos=True))
    assert [choice["text"] for choice in response.json()["choices"]] == [text(server, beam) for beam in best]


@pytest.mark.anyio
async def test_a_client_that_leaves_ends_the_search(server: MemoryServer) -> None:
    server.gate.allow(5)
    body = {"prompt": "short", "max_tokens": 200, "n": 3, "use_beam_search": True, "ignore_eos": True}
    request = asyncio.create_task(server.post(COMPLETIONS, body))
    await server.until(lambda: server.gate.is_held)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    server.gate.open()
    await server.until_idle()
    assert server.service.live.submit([], prompt_param="prompt", room=LIMIT).room == LIMIT  # nothing is reserved


@pytest.mark.anyio
async def test_room_is_kept_for_the_beams(server: MemoryServer) -> None:
    """A search whose first step is one request holds as many places as it has beams."""
    server.gate.close()
    body = {"prompt": "short", "max_tokens": 3, "n": 40, "use_beam_search": True, "ignore_eos": True}
    first = asyncio.create_task(server.post(COMPLETIONS, body))
    await server.until(lambda: server.has_command_at_gate or server.gate.is_held)
    second = await server.post(COMPLETIONS, body)
    assert (second.status_code, second.json()["error"]["code"]) == (429, "overloaded")
    server.gate.open()
    assert (await first).status_code == 200
    assert (await server.post(COMPLETIONS, body)).status_code == 200


@pytest.mark.anyio
async def test_a_priority_holds_for_later_steps(server: MemoryServer) -> None:
    sent: list[wire.Generate] = []
    send = LiveRequests._send  # pyright: ignore[reportPrivateUsage]
    server.gate.allow(2)
    with pytest.MonkeyPatch.context() as patch:

        def recording(self: LiveRequests, group: Any, prompts: Any, frames: Any) -> None:
            sent.extend(prompts)
            send(self, group, prompts, frames)

        patch.setattr(LiveRequests, "_send", recording)
        body = {"model": "echo", "prompt": "short", "max_tokens": 6, "n": 2, "use_beam_search": True, "priority": 1}
        request = asyncio.create_task(
            server.client.post(COMPLETIONS, json=body, headers={"X-Client-Request-Id": "search"})
        )
        await server.until(lambda: server.gate.is_held)
        response = await server.client.post("/v1/requests/search/priority", json={"priority": 9})
        assert response.status_code == 200
        server.gate.open()
        assert (await request).status_code == 200
    assert sent[0].options.priority == 1
    assert sent[-1].options.priority == 9


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream", True), ("temperature", 0.7), ("top_p", 0.9), ("top_k", 5), ("min_p", 0.1), ("typical_p", 0.5),
        ("top_n_sigma", 1.0),
        ("prompt_logprobs", 0), ("logprobs_kind", "processed"),
    ],
)  # fmt: skip
def test_what_a_search_cannot_follow_is_refused_by_name(name: str, value: Any) -> None:
    for parse, body in (
        (parse_chat, {"messages": [{"role": "user", "content": "x"}]}),
        (parse_completion, {"prompt": "x"}),
    ):
        with pytest.raises(ApiError, match=f"The '{name}' parameter is not available when 'use_beam_search'"):
            parse(json.dumps({"model": "m", "use_beam_search": True, **body, name: value}).encode())


def test_why_a_search_is_not_streamed_is_said() -> None:
    with pytest.raises(ApiError, match="which sequences are the best is known at the end of the search only"):
        parse_completion(b'{"model": "m", "prompt": "x", "use_beam_search": true, "stream": true}')


CHANGES: dict[str, Any] = {
    "frequency_penalty": 0.5, "presence_penalty": 0.25, "repetition_penalty": 1.1, "logit_bias": {"5": 1},
    "min_tokens": 2, "bad_words": ["bad"], "guided_regex": "[a-z]+",
}  # fmt: skip


@pytest.mark.parametrize("fields", [CHANGES, {"bad_words": ["bad"]}])
def test_each_step_has_what_changes_logits(fields: dict[str, Any]) -> None:
    """What the engine makes of it is compared with `transformers` in the engine's tests."""
    body = {"model": "m", "prompt": [5], "n": 2, "max_tokens": 4, "use_beam_search": True, **fields}
    said = parse_completion(json.dumps(body).encode())
    model = wire.Model(max_length=100, vocab_size=256, eos_token_ids=(EOS_ID,))
    response = BeamResponse(
        live=LiveRequests([MemoryLink(stopping=lambda: False)], limit=1),
        params=beams.params(said, extent(said), model),
        model=model,
        prompts=[],
        prompt_param="prompt",
        grammar_param=None,
        bad_words=tuple(said.bad_words),
        names=frozenset(),
        priority=0,
        num_choices=2,
        format=CompletionFormat(id="x", model="m", created=1, options=StreamOptions()),
        is_speculating=False,
    )
    prompt = wire.TokenPrompt(tokens=b"")
    first, later = (response._step(prompt, tokens) for tokens in ((), (9, 9, 9)))  # pyright: ignore[reportPrivateUsage]
    assert first.options.is_search
    assert later.options.is_search
    assert (first.begun, later.begun) == ((), (wire.Begun(output=bytes([9, 0, 0, 0] * 3)),))
    for step, min_tokens in ((first, 1), (later, 2)):
        sampling = step.options.sampling
        assert step.bad_words == ("bad",)
        assert (sampling.logprobs, sampling.logprobs_kind, sampling.stop_token_ids) == (3, "processed", (EOS_ID,))
        if len(fields) > 1:
            assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (
                0.5, 0.25, 1.1
            )  # fmt: skip
            assert (sampling.logit_bias, sampling.min_tokens) == (((5, 1.0),), min_tokens)
            assert sampling.grammar == Grammar.regex("[a-z]+")


@pytest.mark.anyio
@pytest.mark.parametrize("field", ["stop", "stop_regex"])
async def test_stop_strings_end_sequences_and_are_not_shown(server: MemoryServer, field: str) -> None:
    prompt = server.tokenizer.encode(PROMPT).tolist()
    free = BeamSearchParams(beam_width=4, max_tokens=8, length_penalty=0.0)
    stop = next(letter for letter in text(server, expected(server, prompt, free)[0])[2:] if letter.isascii())
    written = re.escape(stop) if field == "stop_regex" else stop
    best = expected(server, prompt, free, stops=lambda tokens: stop in server.tokenizer.decode(tokens), num_more=4)
    body = {"prompt": prompt, "n": 4, "max_tokens": 8, "length_penalty": 0, "use_beam_search": True, field: [written]}
    answer = (await server.post(COMPLETIONS, body)).json()
    assert [one["text"] for one in answer["choices"]] == [text(server, beam).partition(stop)[0] for beam in best]
    assert [one["finish_reason"] for one in answer["choices"]] == [beam.finish.value for beam in best]
    assert any(stop in text(server, beam) for beam in best)
    assert answer["usage"]["completion_tokens"] == sum(beam.num_output_tokens for beam in best)


def test_what_asks_for_nothing_is_accepted_with_a_search() -> None:
    neutral: dict[str, Any] = {
        "stream": False, "temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "typical_p": 1.0, "top_n_sigma": -1,
        "stop": None,
        "frequency_penalty": 0.0, "presence_penalty": 0, "repetition_penalty": 1.0, "logit_bias": {}, "bad_words": [],
        "min_tokens": 0, "logprobs_kind": "raw", "prompt_logprobs": None, "seed": 4, "stop_token_ids": [],
    }  # fmt: skip
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": False, "top_logprobs": 0}
    completion = {"prompt": "x", "logprobs": None, "echo": False, "best_of": 2}
    for parse, body in ((parse_chat, chat), (parse_completion, completion)):
        assert parse(json.dumps({"model": "m", "use_beam_search": True, **body, **neutral}).encode()).use_beam_search


@pytest.mark.parametrize(("name", "value"), [("logprobs", 0), ("logprobs", 3), ("echo", True)])
def test_what_a_search_of_completions_cannot_follow(name: str, value: Any) -> None:
    with pytest.raises(ApiError, match=f"'{name}' parameter is not available"):
        parse_completion(json.dumps({"model": "m", "prompt": "x", "use_beam_search": True, name: value}).encode())


@pytest.mark.parametrize(("name", "value"), [("length_penalty", 0.5), ("early_stopping", True)])
def test_what_only_a_search_does_is_refused_without_one(name: str, value: Any) -> None:
    for off in ({}, {"use_beam_search": False}):
        with pytest.raises(ApiError, match=f"'{name}' parameter is only allowed when 'use_beam_search'"):
            parse_completion(json.dumps({"model": "m", "prompt": "x", name: value, **off}).encode())


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 64}, "Invalid value for 'n': beam_width must be at most 63, which is 64 less the number of stop tokens"),
        ({"n": 2, "best_of": 65}, r"Invalid value for 'best_of': beam_width must be in \[1, 64\], got 65"),
        ({"stop_token_ids": [258]}, "Invalid value for 'stop_token_ids'"),
        ({"length_penalty": True}, "Invalid type for 'length_penalty': expected a decimal"),
        ({"length_penalty": 11}, "Invalid value for 'length_penalty': expected a value <= 10"),
        ({"early_stopping": "soon"}, "Invalid value for 'early_stopping': expected true, false or 'never'"),
        ({"early_stopping": 1}, "Invalid value for 'early_stopping'"),
    ],
)
async def test_values_out_of_range(server: MemoryServer, fields: dict[str, Any], message: str) -> None:
    response = await server.post(COMPLETIONS, {"prompt": "x", "use_beam_search": True, **fields})
    assert response.status_code == 400
    with pytest.raises(ValueError, match=message):
        raise ValueError(response.json()["error"]["message"])
