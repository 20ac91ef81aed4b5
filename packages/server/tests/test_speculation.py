"""Speculation over HTTP: the text and the counts of tokens do not change, and draft tokens are reported."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from memory_server import MemoryServer
from pagewood.engine.core.steps.speculation import SpeculationCounts
from pagewood.engine.testing.random_drafting import RandomDrafting
from pagewood.engine.text import Tokenizer
from pagewood.server.messages import wire
from pagewood.server.processes.engine_side import log_speculation

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = [{"role": "user", "content": "Hello 世界"}]
HELLO_PROMPT = "<|start|>user\nHello 世界<|end|><|start|>assistant\n"
USAGE = {"include_usage": True}


@pytest.fixture
async def speculating(model_folder: Path, tokenizer: Tokenizer) -> AsyncGenerator[MemoryServer]:
    """A server whose engine speculates; afterwards it must hold no request."""
    async with MemoryServer(model_folder, tokenizer, limit=64, drafting=RandomDrafting(max_tokens=4, seed=1)) as server:
        yield server
        await server.until_idle()


def events(text: str) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]


def drafts_of(usage: dict[str, Any]) -> tuple[int, int]:
    """Return accepted and rejected draft tokens, and check that there are no other details."""
    details = usage["completion_tokens_details"]
    assert set(details) == {"accepted_prediction_tokens", "rejected_prediction_tokens"}
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


async def test_whole_and_streamed_chats_report_draft_tokens(speculating: MemoryServer) -> None:
    expected = speculating.expected_text(HELLO_PROMPT, max_tokens=60)
    whole = (await speculating.post(CHAT, {"messages": HELLO, "max_tokens": 60})).json()
    assert whole["choices"][0]["message"]["content"] == expected
    accepted, rejected = drafts_of(whole["usage"])
    assert 0 < accepted < 60
    assert rejected > 0
    assert whole["usage"]["completion_tokens"] == 60
    body = {"messages": HELLO, "max_tokens": 60, "stream": True, "stream_options": USAGE}
    first, *chunks, _, last = events((await speculating.post(CHAT, body)).text)
    texts = [chunk["choices"][0]["delta"]["content"] for chunk in chunks]
    assert "".join(texts) == expected
    assert first["usage"] is None
    accepted, rejected = drafts_of(last["usage"])
    # One chunk per step. A step yields one token and those drafts that were accepted, of which the last may be unused.
    assert 60 <= len(texts) + accepted <= 60 + 4
    assert rejected > 0


async def test_completions_add_up_the_draft_tokens_of_their_prompts(speculating: MemoryServer) -> None:
    prompts = ["one", "two", "three"]
    body = {"prompt": prompts, "max_tokens": 40, "ignore_eos": True}
    whole = (await speculating.post(COMPLETIONS, body)).json()
    assert [choice["text"] for choice in whole["choices"]] == [
        speculating.expected_text(prompt, max_tokens=40) for prompt in prompts
    ]
    accepted, rejected = drafts_of(whole["usage"])
    status = speculating.service.status
    # Steps of a request that were in flight when it ended count, too.
    await speculating.until(lambda: status.speculation is not None and status.speculation.num_drafted > rejected)
    await speculating.until_idle()
    assert status.speculation is not None
    assert status.speculation.num_accepted >= accepted
    assert status.speculation.num_drafted >= accepted + rejected
    stream = {**body, "stream": True, "stream_options": {"continuous_usage_stats": True}}
    usages = [event["usage"] for event in events((await speculating.post(COMPLETIONS, stream)).text)]
    totals = [sum(drafts_of(usage)) for usage in usages]
    assert totals == sorted(totals)
    assert totals[-1] > 0


@pytest.mark.parametrize("num_last", range(1, 9))
async def test_an_answer_that_ends_inside_an_accepted_run_is_the_same(
    server: MemoryServer, speculating: MemoryServer, num_last: int
) -> None:
    text = server.expected_text(HELLO_PROMPT, max_tokens=60)
    stop = text[8 + num_last : 11 + num_last]
    body = {"messages": HELLO, "max_tokens": 60, "stop": stop}
    plain, drafted = [(await one.post(CHAT, body)).json() for one in (server, speculating)]
    assert drafted["choices"] == plain["choices"]
    assert drafted["choices"][0]["message"]["content"] == text[: text.index(stop)]
    assert "completion_tokens_details" not in plain["usage"]
    del drafted["usage"]["completion_tokens_details"]
    assert drafted["usage"] == plain["usage"]
    limited = {"messages": HELLO, "max_tokens": num_last}
    plain, drafted = [(await one.post(CHAT, limited)).json() for one in (server, speculating)]
    assert drafted["choices"] == plain["choices"]
    assert drafted["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]


async def test_ready_shows_the_counts_of_speculation(server: MemoryServer, speculating: MemoryServer) -> None:
    for one in (server, speculating):
        await one.post(CHAT, {"messages": HELLO, "max_tokens": 60})
        await one.until(lambda status=one.service.status: status.counters["num_tokens"] > 0)
        await one.until_idle()
    assert "speculation" not in (await server.client.get("/ready")).json()
    counts = (await speculating.client.get("/ready")).json()["speculation"]
    assert set(counts) == {one.name for one in fields(SpeculationCounts)}
    assert counts["num_drafted"] == sum(counts["drafted_by_position"]) > 0
    assert counts["num_accepted"] == sum(counts["accepted_by_position"]) > 0
    assert counts["reason"] == "random"
    assert "speculation" not in (await speculating.client.get("/ready")).json()["engine"]


async def test_the_log_shows_draft_tokens_of_each_request(
    server: MemoryServer, speculating: MemoryServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pagewood.server.requests")
    usage = (await speculating.post(CHAT, {"messages": HELLO, "max_tokens": 20})).json()["usage"]
    accepted, rejected = drafts_of(usage)
    assert caplog.messages[-1].endswith(f"tokens_out=20 accepted={accepted} rejected={rejected}")
    await server.post(CHAT, {"messages": HELLO, "max_tokens": 20})
    assert caplog.messages[-1].endswith("tokens_out=20")


COUNTS = wire.Speculation(
    num_drafted=150,
    num_accepted=100,
    drafted_by_position=(100, 50, 0),
    accepted_by_position=(75, 25, 0),
    draft_s=1.25,
    verify_s=3.5,
    num_rebuilt=12,
    num_postponed=3,
    num_short=1,
    reason="saves time",
)


def test_counts_are_logged_in_one_line_when_the_engine_stops(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pagewood.server.processes.engine_side")
    log_speculation(None)
    assert caplog.messages == []
    log_speculation(COUNTS)
    assert caplog.messages == [
        "speculation: 150 draft tokens, 100 accepted (by position: 75% 50%); 1.25 s for drafts, 3.50 s for the rest of "
        "the steps; draft lengths: saves time"
    ]


def test_the_wire_has_every_field_of_the_engines_counts() -> None:
    assert set(wire.Speculation.__struct_fields__) == {one.name for one in fields(SpeculationCounts)}
