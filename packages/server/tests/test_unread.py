"""What a slow reader leaves: merged, whole, in order, and never more than a limit."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from leaving_client import Client
from memory_server import MemoryServer
from pagewood.engine.api import FinishReason
from pagewood.engine.text import Tokenizer
from pagewood.server.http.errors import ApiError
from pagewood.server.messages import wire
from pagewood.server.requests import unread as unread_module
from pagewood.server.requests.live import LiveRequests
from pagewood.server.requests.unread import MAX_ITEMS, MERGE_FROM, PIECE_CHARS, Unread


def piece(text: str, kind: str = "", *, num: int = 1, tokens: bytes = b"") -> wire.Answer:
    parts = (wire.Part(kind, text),) if kind else None  # type: ignore[arg-type]
    return wire.Answer("a", "" if kind else text, None, False, None, 3, 2, num, parts=parts, tokens=tokens)


@given(seed=st.integers(0, 2**32), num_kinds=st.integers(1, 3))
@settings(max_examples=60)
def test_merged_texts_are_the_texts(seed: int, num_kinds: int) -> None:
    choose = random.Random(seed)
    kinds = ["content", "reasoning", ""][:num_kinds]
    pieces = [
        (choose.randrange(2), "".join(choose.choices("ab", k=choose.randrange(4))), choose.choice(kinds))
        for _ in range(400)
    ]
    num_read = choose.randrange(400)
    unread = Unread()
    expected: dict[int, list[tuple[str, str]]] = defaultdict(list)
    found: dict[int, list[tuple[str, str]]] = defaultdict(list)

    def read() -> None:
        item = unread.popleft()
        assert isinstance(item, tuple)
        parts = item[1].parts or (wire.Part("", item[1].text),)  # type: ignore[arg-type]
        found[item[0]] += [(part.kind, char) for part in parts for char in part.text]

    for number, (index, text, kind) in enumerate(pieces):
        unread.append((index, piece(text, kind, num=number)))
        expected[index] += [(kind, char) for char in text]
        if number < num_read and len(unread) > MERGE_FROM // 2:
            read()
    while len(unread):
        read()
    assert {index: text for index, text in found.items() if text} == {i: text for i, text in expected.items() if text}


@pytest.mark.parametrize("kind", ["", "content"])
@pytest.mark.parametrize("num_requests", [1, 8])
def test_a_long_text_is_few_items_and_keeps_its_last_counts(kind: str, num_requests: int) -> None:
    unread = Unread()
    num_tokens = 50_000
    for number in range(num_tokens):
        unread.append((number % num_requests, piece("word", kind, num=number + 1)))
    assert len(unread) < MERGE_FROM + 4 * num_tokens / PIECE_CHARS + 2 * num_requests
    items = [unread.popleft() for _ in range(len(unread))]
    last = max((item[1] for item in items if isinstance(item, tuple)), key=lambda answer: answer.num_output_tokens)
    assert (last.num_output_tokens, last.num_prompt_tokens, last.num_cached_tokens) == (num_tokens, 3, 2)


@pytest.mark.parametrize("other", [piece("a", tokens=b"1234"), piece("a", "tool_call")])
def test_what_is_more_than_text_is_not_merged(other: wire.Answer) -> None:
    unread = Unread()
    for _ in range(MERGE_FROM + 5):
        unread.append((0, other))
    assert len(unread) == MERGE_FROM + 5


def test_a_client_that_leaves_too_much_is_ended_and_no_other() -> None:
    class Nowhere:
        def send(self, frame: bytes) -> None:
            pass

    live = LiveRequests([Nowhere()], limit=9)
    groups = [
        live.submit(
            [wire.Generate(request_id=name, prompt=wire.TextPrompt(text="x"))],
            prompt_param="prompt",
        )
        for name in "ab"
    ]
    groups[0].is_sending = True  # not ours; its client takes nothing
    for _ in range(MAX_ITEMS + 2):
        live.take(wire.Answers((wire.Answer("a", "t", None, False, None, 1, 0, 1, tokens=b"1234"),)))
        live.take(wire.Answers((wire.Answer("b", "t", None, False, None, 1, 0, 1),)))
    assert (live.num_live, live.num_ending, live.incidents.num_slow_readers) == (1, 1, 1)

    async def read_all() -> None:
        while True:
            await groups[0].next()

    with pytest.raises(ApiError, match="too slowly"):
        asyncio.run(read_all())
    live.take(wire.Answers((wire.Answer("b", "", FinishReason.LENGTH, True, None, 1, 0, 1),)))
    assert live.num_live == 0


@pytest.mark.anyio
async def test_a_client_that_takes_nothing_is_slow_and_an_answer_that_is_large_is_not(
    model_folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unread_module, "MAX_ITEMS", 5)  # each step has 8 answers, none of which can be merged
    server = MemoryServer(model_folder, tokenizer, limit=64)
    await server.start()
    body = {"model": "echo", "prompt": "Hi", "max_tokens": 60, "ignore_eos": True, "n": 8, "logprobs": 3}
    answer = (await server.client.post("/v1/completions", json=body)).json()
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [60] * 8
    text = (await server.client.post("/v1/completions", json=body | {"stream": True})).text
    assert text.endswith("data: [DONE]\n\n")
    assert text.count('"finish_reason":"length"') == 8
    incidents = server.service.live.incidents
    assert incidents.num_slow_readers == 0
    reads = asyncio.Event()

    app = server.app

    async def blocked(scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a client that takes nothing of the body at first."""

        async def send_later(message: Message) -> None:
            if message["type"] == "http.response.body":
                await reads.wait()
            await send(message)

        await app(scope, receive, send_later)

    server.app = blocked  # not ours
    client = Client(server, body | {"stream": True}, path="/v1/completions")
    await server.until(lambda: incidents.num_slow_readers == 1)
    reads.set()
    messages = [message async for message in client.messages()]
    assert b'"code":"slow_reader"' in messages[-1]["body"]
    await client.served
    await server.until_idle()
    await server.stop()
