"""Log probabilities over HTTP, against the numbers that the echo model makes up; streamed and whole alike."""

from __future__ import annotations

import asyncio
import codecs
import json
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_folder import EOS_ID
from memory_server import MemoryServer
from pagewood.engine.api import Delta, FinishReason, TokenLogprob
from pagewood.engine.testing.echo import echo_logprob
from pagewood.engine.text import Tokenizer
from pagewood.server.messages import wire
from pagewood.server.protocols.common import respond
from pagewood.server.protocols.common.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from pagewood.server.stages.detokenizing import TextStreams

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PROMPT = "zwei ü 世"


def events(text: str) -> list[Any]:
    *lines, done, nothing = text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def bytes_of(tokenizer: Tokenizer, token: int) -> bytes:
    """Return the bytes of a token of the echo folder, from its vocabulary alone."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    special = {EOS_ID - 1: b"<|start|>", EOS_ID: b"<|end|>"}
    if token >= 256:
        return special.get(token, b"")
    return bytes([[*printable, *others][token]])


def token_json(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    data = bytes_of(tokenizer, token)
    return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}


def expected_chat(tokenizer: Tokenizer, tokens: Sequence[int], first: int, num_top: int) -> dict[str, Any]:
    """Return `logprobs` of a message whose first token is at position `first`."""
    content: list[dict[str, Any]] = []
    for i, token in enumerate(tokens):
        entry = echo_logprob(token, first + i, num_top)
        top = [token_json(tokenizer, other, logprob) for other, logprob in entry.top]
        content.append({**token_json(tokenizer, token, entry.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def expected_completion(tokenizer: Tokenizer, tokens: Sequence[int], first: int, num_top: int) -> dict[str, Any]:
    """Return `logprobs` without offsets of a text whose first token is at position `first`."""
    entries = [echo_logprob(token, first + i, num_top) for i, token in enumerate(tokens)]
    tops: list[dict[str, float]] = []
    for entry in entries:
        top: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            text = bytes_of(tokenizer, token).decode(errors="replace")
            top[text] = max(top.get(text, -math.inf), logprob)
        tops.append(top)
    return {
        "tokens": [bytes_of(tokenizer, token).decode(errors="replace") for token in tokens],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": tops,
    }


def expected_offsets(tokenizer: Tokenizer, tokens: Sequence[int], start: int) -> list[int]:
    """Return the number of characters that are complete before each token."""
    offsets: list[int] = []
    for i in range(len(tokens)):
        before = b"".join([bytes_of(tokenizer, token) for token in tokens[:i]]).decode(errors="replace")
        # The last U+FFFD may be an unfinished character, which the token continues.
        whole = b"".join([bytes_of(tokenizer, token) for token in tokens[: i + 1]]).decode(errors="replace")
        is_continued = len(whole) == len(before)
        offsets.append(start + len(before) - is_continued)
    return offsets


@pytest.mark.anyio
@pytest.mark.parametrize("num_top", [None, 0, 3])
async def test_chat(server: MemoryServer, num_top: int | None) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 30, "logprobs": True}
    body |= {} if num_top is None else {"top_logprobs": num_top}
    prompt = server.tokenizer.encode_chat([{"role": "user", "content": "Hi"}]).tolist()
    tokens = server.expected_tokens(prompt, max_tokens=30)
    expected = expected_chat(server.tokenizer, tokens, len(prompt), num_top or 0)
    choice = (await server.post(CHAT, body)).json()["choices"][0]
    assert choice["logprobs"] == expected
    data = b"".join([bytes(entry["bytes"]) for entry in choice["logprobs"]["content"]])
    assert data.decode(errors="replace") == choice["message"]["content"]  # exact bytes, also of parts of characters
    first, *chunks, end = events((await server.post(CHAT, {**body, "stream": True})).text)
    assert first["choices"][0]["logprobs"] is end["choices"][0]["logprobs"] is None
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [len(one["content"]) for one in streamed] == [1] * 30  # in each chunk those of its tokens
    assert [entry for one in streamed for entry in one["content"]] == expected["content"]


@pytest.mark.anyio
async def test_without_the_field_there_are_none(server: MemoryServer) -> None:
    for fields in ({}, {"logprobs": False}, {"logprobs": None}):
        for path, body in ((CHAT, {"messages": [{"role": "user", "content": "x"}]}), (COMPLETIONS, {"prompt": "x"})):
            answer = (await server.post(path, {**body, **fields, "max_tokens": 3})).json()
            assert answer["choices"][0]["logprobs"] is None
            assert "prompt_logprobs" not in answer
            assert "prompt_logprobs" not in answer["choices"][0]


@pytest.mark.anyio
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses"])
async def test_long_answers_are_written_beside_the_event_loop(
    server: MemoryServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body: dict[str, Any] = {
        CHAT: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 30, "logprobs": True, "top_logprobs": 3},
        COMPLETIONS: {"prompt": PROMPT, "max_tokens": 30, "logprobs": 3},
        "/v1/responses": {
            "input": "Hi",
            "max_output_tokens": 30,
            "top_logprobs": 3,
            "include": ["message.output_text.logprobs"],
        },
    }[path]
    apart: list[Any] = []
    to_thread = asyncio.to_thread

    async def counted(*arguments: Any) -> Any:
        apart.append(arguments)
        return await to_thread(*arguments)

    monkeypatch.setattr(respond.asyncio, "to_thread", counted)
    name = "output" if "responses" in path else "choices"
    (short,) = (await server.post(path, body)).json()[name]
    monkeypatch.setattr(respond, "MAX_WRITTEN_AT_ONCE", 29)
    assert not apart
    (long,) = (await server.post(path, body)).json()[name]
    assert len(apart) == 1
    assert {**long, "id": ""} == {**short, "id": ""}


@pytest.mark.anyio
@pytest.mark.parametrize("num_top", [0, 2, 5, 64])
@pytest.mark.parametrize("echo", [False, True])
async def test_completions(server: MemoryServer, num_top: int, echo: bool) -> None:
    body = {"prompt": PROMPT, "max_tokens": 20, "logprobs": num_top, "echo": echo}
    prompt = server.tokenizer.encode(PROMPT).tolist()
    tokens = server.expected_tokens(prompt, max_tokens=20)
    expected = expected_completion(server.tokenizer, tokens, len(prompt), num_top)
    expected["text_offset"] = expected_offsets(server.tokenizer, tokens, len(PROMPT) if echo else 0)
    if echo:
        before = expected_completion(server.tokenizer, prompt, 0, num_top)
        before["token_logprobs"][0] = before["top_logprobs"][0] = None
        before["text_offset"] = expected_offsets(server.tokenizer, prompt, 0)
        expected = {name: before[name] + expected[name] for name in expected}
    choice = (await server.post(COMPLETIONS, body)).json()["choices"][0]
    assert choice["logprobs"] == expected
    assert "".join(choice["logprobs"]["tokens"][: 5 if echo else 0]) == ("zwei " if echo else "")
    *chunks, end = events((await server.post(COMPLETIONS, {**body, "stream": True})).text)
    assert end["choices"][0]["logprobs"] is None
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert {name: [one for part in parts for one in part[name]] for name in expected} == expected


@pytest.mark.anyio
@pytest.mark.parametrize("echo", [False, True])
async def test_the_token_that_ends_a_text_has_a_log_probability(server: MemoryServer, echo: bool) -> None:
    """Clients that score texts leave out the last token, because one is always computed behind them."""
    prompt = server.tokenizer.encode(PROMPT).tolist()
    tokens = server.expected_tokens(prompt, max_tokens=30)
    num = next(i for i in range(3, 30) if tokens[i] not in tokens[:i])
    shown = [*prompt, *tokens[: num + 1]] if echo else tokens[: num + 1]
    body = {"prompt": PROMPT, "max_tokens": 30, "logprobs": 2, "stop_token_ids": [tokens[num]], "echo": echo}
    answer = (await server.post(COMPLETIONS, body)).json()
    [choice] = answer["choices"]
    text = server.tokenizer.decode(shown[:-1])
    assert (choice["text"], choice["finish_reason"], answer["usage"]["completion_tokens"]) == (text, "stop", num + 1)
    expected = expected_completion(server.tokenizer, shown, 0 if echo else len(prompt), 2)
    for name, values in expected.items():
        assert choice["logprobs"][name][echo:] == values[echo:]
    assert choice["logprobs"]["text_offset"][-1] == len(text)
    chunks = events((await server.post(COMPLETIONS, {**body, "stream": True})).text)
    streamed = [chunk["choices"][0] for chunk in chunks]
    assert "".join(one["text"] for one in streamed) == text
    found = [token for one in streamed if one["logprobs"] for token in one["logprobs"]["token_logprobs"]]
    assert found == choice["logprobs"]["token_logprobs"]


@pytest.mark.anyio
@pytest.mark.parametrize("as_ids", [False, True])
async def test_a_text_is_scored_without_an_answer(server: MemoryServer, as_ids: bool) -> None:
    prompt = server.tokenizer.encode(PROMPT).tolist()
    body = {"prompt": [prompt, [70]] if as_ids else [PROMPT, "g"], "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = (await server.post(COMPLETIONS, body)).json()
    scored, single = answer["choices"]
    assert scored["text"] == PROMPT
    assert scored["finish_reason"] == "length"
    assert scored["logprobs"]["token_logprobs"] == [
        None,
        *[echo_logprob(token, i, 0).logprob for i, token in enumerate(prompt) if i],
    ]
    assert single["text"] == "g"
    assert single["logprobs"] == {
        "tokens": ["g"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]
    }  # fmt: skip
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == len(prompt) + 1
    chunks = events((await server.post(COMPLETIONS, {**body, "stream": True})).text)
    shown = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["finish_reason"] is None]
    assert sorted(choice["text"] for choice in shown) == sorted([PROMPT, "g"])
    by_index = {choice["index"]: choice["logprobs"] for choice in shown}
    assert by_index == {0: scored["logprobs"], 1: single["logprobs"]}


@pytest.mark.anyio
async def test_scoring_shows_no_end_and_no_stop_string(server: MemoryServer) -> None:
    """The engine generates a token for it, and what that token is must not show."""
    prompt = server.tokenizer.encode(PROMPT).tolist()
    (token,) = server.expected_tokens(prompt, max_tokens=1)
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 0}
    plain = (await server.post(COMPLETIONS, body)).json()["choices"]
    assert plain[0]["finish_reason"] == "length"
    for fields in ({"stop_token_ids": [token]}, {"stop": [server.tokenizer.decode([token])]}):
        assert (await server.post(COMPLETIONS, {**body, **fields})).json()["choices"] == plain


@pytest.mark.anyio
async def test_prompt_logprobs(server: MemoryServer) -> None:
    long = "A prompt of several pages, all of it in the cache. " * 2
    prompt = server.tokenizer.encode(long).tolist()

    def expected(tokens: list[int], num_top: int) -> list[Any]:
        found: list[Any] = [None]
        for position, token in list(enumerate(tokens))[1:]:
            entry = echo_logprob(token, position, num_top)
            one = {str(other): rank for rank, (other, _) in enumerate(entry.top, start=1)} | {str(token): entry.rank}
            values = dict(entry.top) | {token: entry.logprob}
            found.append(
                {
                    key: {
                        "logprob": values[int(key)],
                        "rank": rank,
                        "decoded_token": bytes_of(server.tokenizer, int(key)).decode(errors="replace"),
                    }
                    for key, rank in one.items()
                }
            )
        return found

    body = {"prompt": long, "max_tokens": 2}
    await server.post(COMPLETIONS, body)
    for fields, num_top in (({"prompt_logprobs": 2}, 2), ({"prompt_logprobs": 0, "logprobs": 3, "echo": True}, 0)):
        answer = (await server.post(COMPLETIONS, {**body, **fields})).json()
        assert answer["choices"][0]["prompt_logprobs"] == expected(prompt, num_top)
        assert (answer["choices"][0]["logprobs"] is None) == ("logprobs" not in fields)
        assert answer["usage"]["prompt_tokens"] == len(prompt)
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "prompt_logprobs": 1, "n": 2}
    answer = (await server.post(CHAT, chat)).json()
    tokens = server.tokenizer.encode_chat([{"role": "user", "content": "Hi"}]).tolist()
    assert answer["prompt_logprobs"] == expected(tokens, 1)
    assert answer["choices"][0]["logprobs"] is None


def test_minus_infinity_and_equal_ranks() -> None:
    none = wire.ScoredToken(7, b"\xe2", -math.inf)
    same = [wire.ScoredToken(i, bytes([97 + i]), -0.5) for i in range(2)]
    entry = wire.TokenEntry(none, 3, 0, (*same, wire.ScoredToken(2, b"c", -2.0)))
    (chat,) = json.loads(msgspec.json.encode(chat_logprobs([entry])))["content"]
    assert (chat["token"], chat["logprob"], chat["bytes"]) == ("\ufffd", -9999.0, [0xE2])
    completion = completion_logprobs([entry], num_top=2)
    assert completion.token_logprobs == [-9999.0]
    assert completion.top_logprobs == [{"a": -0.5, "b": -0.5, "\ufffd": -9999.0}]
    (prompt,) = prompt_logprobs([entry], num_top=3)
    assert prompt is not None
    assert {token: (one.rank, one.logprob) for token, one in prompt.items()} == {
        7: (3, -9999.0), 0: (1, -0.5), 1: (1, -0.5), 2: (3, -2.0)
    }  # fmt: skip


TOKENS = st.lists(st.integers(0, 255) | st.sampled_from(list(b"STOPab")), max_size=24)
STOPS = st.lists(st.sampled_from(["STOP", "OP", "ab", "a", "\ufffd", "é"]), max_size=2)


@given(data=st.data(), tokens=TOKENS, stop=STOPS, num_top=st.integers(0, 2), ending=st.sampled_from(FinishReason))
@settings(max_examples=300, deadline=None)
def test_streamed_entries_are_those_of_the_whole_answer(
    tokenizer: Tokenizer, data: st.DataObject, tokens: list[int], stop: list[str], num_top: int, ending: FinishReason
) -> None:
    """For any steps: one entry for each token up to the one that completes a stop string, as the usage counts them."""
    finish = FinishReason.LENGTH if ending is FinishReason.REFUSED else ending
    ids = [tokenizer.encode(chr(token)).tolist()[0] if token < 128 else token for token in tokens]
    entries = [echo_logprob(token, i, num_top) for i, token in enumerate(ids)]
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(ids))), max_size=6)))
    steps = [(start, end) for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    if finish in (FinishReason.ABORT, FinishReason.ERROR):  # such an answer of the engine has no tokens
        steps.append((len(ids), len(ids)))
    carry = wire.encode(wire.TextOptions(stop=tuple(stop)))

    def run(steps: list[tuple[int, int]]) -> tuple[str, list[wire.TokenEntry], FinishReason, int]:
        streams = TextStreams(tokenizer)
        text, found, ended, num_output = "", list[wire.TokenEntry](), None, 0
        for i, (start, end) in enumerate(steps):
            is_last = i == len(steps) - 1
            delta = Delta(
                request_id="a",
                tokens=tuple(ids[start:end]),
                finish=finish if is_last else None,
                first=i == 0,
                carry=carry if i == 0 else b"",
                num_output_tokens=end + (is_last and finish is FinishReason.STOP),
                logprobs=tuple(entries[start:end]),
            )
            message = streams.take(wire.Step((delta,)))
            assert isinstance(message, wire.Answers)
            for answer in message.answers:
                if ended is None:
                    text, ended, num_output = text + answer.text, answer.finish, answer.num_output_tokens
                    found += answer.logprobs.tokens if answer.logprobs else ()
                else:
                    assert answer.logprobs is None
        assert ended is not None
        return text, found, ended, num_output

    # The end of a sequence is a token.
    ending_alone = [] if finish is FinishReason.LENGTH else [(len(ids), len(ids))]
    whole = run([(i, i + 1) for i in range(len(ids))] + ending_alone or [(0, 0)])
    assert run(steps) == whole
    _, found, ended, num_output = whole
    num_shown = len(ids)
    decoder = codecs.getincrementaldecoder("utf-8")  # keeps back the beginning of a character
    if ended is FinishReason.STOP:
        for n in range(len(ids) + 1):
            known = decoder("replace").decode(b"".join(bytes_of(tokenizer, token) for token in ids[:n]))
            if "\ufffd" not in stop and any(one in known for one in stop):
                num_shown = n
                break
    if "\ufffd" not in stop:
        assert [entry.chosen.token for entry in found] == ids[:num_shown]
        assert num_output - len(found) in (0, 1)  # the end-of-sequence token counts, and has no entry
    assert [TokenLogprob(e.chosen.token, e.chosen.logprob, e.rank, tuple((t.token, t.logprob) for t in e.top))
            for e in found] == entries[: len(found)]  # fmt: skip


def test_an_answer_without_logprobs_is_small(tokenizer: Tokenizer) -> None:
    delta = Delta(request_id="a", tokens=(65,), first=True)
    message = TextStreams(tokenizer).take(wire.Step((delta,)))
    assert isinstance(message, wire.Answers)
    assert message.answers[0].logprobs is None
    assert wire.to_http.decode(wire.encode(message)) == message
