"""Requests that are sent again after a process died: behind what they have had, so often, and with other ids."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leaving_client import Client
from memory_server import MemoryServer
from pagewood.engine.api import FinishReason, PauseRequest, RequestOptions, ResumeRequest, SamplingParams
from pagewood.engine.seeds import answer_seed, arrival_seed
from pagewood.engine.text import Tokenizer
from pagewood.server.http.errors import ApiError, unavailable
from pagewood.server.messages import wire
from pagewood.server.messages.token_ids import ids_of
from pagewood.server.metrics.requests import RequestMetrics
from pagewood.server.requests.live import LiveRequests
from pagewood.server.requests.live_group import LiveGroup
from pagewood.server.requests.live_request import SETTLED_ANSWERS
from pagewood.server.requests.status import EngineState
from recorded import Recorder

LOST = unavailable("The engine process died.", code="engine_lost")
GIVEN_UP = "The engine process died. The request is given up: 2 processes in a row died that held it."


def generate(request_id: str, *, siblings: tuple[str, ...] = (), priority: int = 0) -> wire.Generate:
    sampling = SamplingParams(max_tokens=9, temperature=1.0, seed=7)
    prompt = wire.TextPrompt(text=f"prompt of {request_id}")
    return wire.Generate(
        request_id=request_id,
        prompt=prompt,
        options=RequestOptions(sampling=sampling, priority=priority),
        sibling_ids=siblings,
    )


def answer(request_id: str, *, finish: FinishReason | None = None, output: tuple[int, ...] = ()) -> wire.Answers:
    return wire.Answers((wire.Answer(request_id, "t", finish, finish is not None, None, 1, 0, 1, output=output),))


def heard(group: LiveGroup) -> list[str]:
    """Return the answers with their index, and the errors, that a group's reader has got."""
    words: list[str] = []
    while not group.queue.empty():
        item = group.queue.get_nowait()
        words.append(str(item) if isinstance(item, Exception) else f"{item[0]} {item[1].text}")
    return words


def outputs(message: wire.Generate) -> list[list[int]]:
    """Return the tokens that each request of a message has had."""
    return [ids_of(begun.output) for begun in message.begun]


def test_requests_go_on_behind_what_they_have_had_when_the_engine_is_back() -> None:
    sender = Recorder()
    live = LiveRequests([sender], limit=9, max_retries=1)
    begun = live.submit([generate("a")], prompt_param="prompt")
    fresh = live.submit([generate("b", siblings=("b1",)), generate("c")], prompt_param="prompt")
    live.take(answer("a", output=(5, 6)))
    live.take(answer("a", output=(7,)))
    live.take(answer("b1", output=(8,)))
    live.take(answer("c", finish=FinishReason.LENGTH))
    first = sender.sent()
    live.lost(LOST)
    assert (heard(begun), heard(fresh)) == (["0 t", "0 t"], ["1 t", "2 t"])
    assert (live.num_live, live.num_held) == (3, 3)
    assert sender.sent() == []  # not before the engine is ready
    live.take(answer("a", output=(9,)))  # a late answer of the dead engine
    live.resume()
    again = sender.sent()
    assert [outputs(message) for message in again] == [[[5, 6, 7]], [[], [8]]]
    for old, new in zip(first[:2], again, strict=True):
        assert not set(wire.ids_of(old)) & set(wire.ids_of(new))
        names = {"request_id": old.request_id, "sibling_ids": old.sibling_ids, "begun": ()}
        assert msgspec.structs.replace(new, **names) == old
    assert heard(begun) == []
    for index, name in enumerate(wire.ids_of(again[1])):
        live.take(answer(name, finish=FinishReason.LENGTH))
        assert heard(fresh) == [f"{index} t"]
    live.take(answer(again[0].request_id, finish=FinishReason.LENGTH))
    assert (live.num_live, live.num_ending, live.incidents.num_retried, live.incidents.num_lost) == (0, 0, 3, 0)


def test_requests_that_come_while_the_engine_is_away_wait_for_it() -> None:
    sender = Recorder()
    live = LiveRequests([sender], limit=3, max_retries=1)
    live.lost(LOST)
    group = live.submit([generate("a", siblings=("a1",))], prompt_param="prompt")
    left = live.submit([generate("b")], prompt_param="prompt")
    with pytest.raises(ApiError) as refused:  # the queue is as long as ever
        live.submit([generate("c")], prompt_param="prompt")
    assert refused.value.code == "overloaded"
    live.close(left)
    assert (live.num_live, live.num_held, sender.messages) == (2, 2, [])
    live.resume()
    (message,) = sender.sent()
    assert wire.ids_of(message) == ("a", "a1")
    for name in wire.ids_of(message):
        live.take(answer(name, finish=FinishReason.LENGTH))
    assert heard(group) == ["0 t", "1 t"]
    assert (live.num_live, live.incidents.num_retried, live.incidents.num_lost) == (0, 0, 0)


def test_every_answer_keeps_its_seed_and_its_place() -> None:
    """Also one that the client did not choose, when the first answer has ended, and after another death."""
    sender = Recorder()
    live = LiveRequests([sender], limit=9, max_retries=3, seed=4)
    message = generate("a", siblings=("a1", "a2"))
    options = {"seed": None, "prompt_logprobs": 2}
    message = message.with_options(sampling=replace(message.options.sampling, **options))
    group = live.submit([message], prompt_param="prompt")
    (first,) = sender.sent()
    seed = first.options.sampling.seed
    assert seed is not None
    assert seed == arrival_seed(4, 1)
    live.take(answer("a", finish=FinishReason.LENGTH))
    live.take(answer("a2", output=(3,)))
    for tokens in ([3], [3, 4]):
        live.lost(LOST, is_planned=tokens == [3, 4])
        live.resume()
        (again,) = sender.sent()
        assert [begun.seed for begun in again.begun] == [answer_seed(seed, 1), answer_seed(seed, 2)]
        assert outputs(again) == [[], tokens]
        assert again.options.sampling.prompt_logprobs is None  # they came with the first answer
        live.take(answer(wire.ids_of(again)[1], output=(4,)))
    live.close(group)


def test_log_probabilities_of_a_prompt_are_asked_for_until_they_have_come() -> None:
    sender = Recorder()
    live = LiveRequests([sender], limit=9, max_retries=3)
    message = generate("a", siblings=("a1",))
    live.submit(
        [message.with_options(sampling=replace(message.options.sampling, prompt_logprobs=2))], prompt_param="prompt"
    )
    live.take(answer("a1", output=(3,)))
    live.lost(LOST)
    live.resume()
    again = sender.sent()[-1]
    assert again.options.sampling.prompt_logprobs == 2
    live.take(answer(again.request_id, output=(5,)))
    live.lost(LOST)
    live.resume()
    assert sender.sent()[-1].options.sampling.prompt_logprobs is None


def test_metrics_count_a_request_that_is_sent_again_once() -> None:
    now_s = [10.0]
    metrics = RequestMetrics(clock=lambda: now_s[0])
    sender = Recorder()
    live = LiveRequests([sender], limit=9, max_retries=1, watch=metrics)
    live.submit([generate("a", siblings=("a1",))], prompt_param="prompt")
    live.lost(LOST)
    now_s[0] = 14.0
    live.resume()
    (again,) = sender.sent()[1:]
    assert metrics.num_open == 2
    for name in wire.ids_of(again):
        metrics.answered(answer(name, finish=FinishReason.LENGTH))
        live.take(answer(name, finish=FinishReason.LENGTH))
    (account,) = metrics.accounts
    assert (metrics.num_open, account.num_ended) == (0, {"length": 2})
    assert account.request_s.total == 8  # from when it was sent first
    assert sum(metrics.num_answers.counts) == 1


def test_a_request_is_sent_again_only_so_often() -> None:
    sender = Recorder()
    live = LiveRequests([sender], limit=9, max_retries=1)
    group = live.submit([generate("a")], prompt_param="prompt")
    live.lost(LOST)
    live.lost(LOST)  # the next engine dies before it is ready: it had not got the request
    live.resume()
    live.lost(LOST)
    live.resume()
    assert len(sender.sent()) == 2
    assert heard(group) == [GIVEN_UP]
    assert live.num_live == 0


def test_without_retries_a_death_ends_requests_with_its_error() -> None:
    live = LiveRequests([sender := Recorder()], limit=9)
    group = live.submit([generate("a")], prompt_param="prompt")
    (message,) = sender.sent()
    assert message == generate("a")  # nothing is kept, and no tokens are asked for
    live.take(answer("a"))
    live.lost(LOST)
    live.resume()
    assert heard(group) == ["0 t", "The engine process died."]


def test_a_request_that_gets_on_may_survive_any_number_of_deaths() -> None:
    live = LiveRequests([sender := Recorder()], limit=9, max_retries=1)
    group = live.submit([generate("a")], prompt_param="prompt")
    for number in range(5):
        (message,) = sender.sent()
        assert outputs(message) == ([[7] * (number * SETTLED_ANSWERS)] if number else [])
        for _ in range(SETTLED_ANSWERS):
            live.take(answer(message.request_id, output=(7,)))
        live.lost(LOST)
        live.resume()
    assert heard(group) == ["0 t"] * 5 * SETTLED_ANSWERS


def test_a_replacement_on_purpose_is_no_death() -> None:
    live = LiveRequests([sender := Recorder()], limit=9, max_retries=1)
    group = live.submit([generate("a")], prompt_param="prompt")
    for _ in range(5):
        live.lost(LOST, is_planned=True)
        live.resume()
    assert len(sender.sent()) == 6
    assert heard(group) == []


def test_a_deadly_request_is_ended_and_all_others_finish(caplog: pytest.LogCaptureFixture) -> None:
    """The engine dies in every step that has the deadly request, before any answer."""
    live = LiveRequests([sender := Recorder()], limit=40, max_retries=3)
    names = [f"r{number}" for number in range(20)]
    groups = {name: live.submit([generate(name)], prompt_param="prompt", names=frozenset({name})) for name in names}
    deadly, num_deaths, most_alone = generate("r13").prompt, 0, 0
    while live.num_live:
        sent = sender.sent()
        if any(message.prompt == deadly for message in sent):
            num_deaths += 1
            live.lost(LOST)
            live.resume()
            continue
        most_alone = max(most_alone, len(sent))
        for message in sent:
            for place in range(SETTLED_ANSWERS + 1):
                finish = FinishReason.LENGTH if place == SETTLED_ANSWERS else None
                live.take(answer(message.request_id, finish=finish))
    assert num_deaths == 4
    for name, group in groups.items():
        (*_, last) = heard(group)
        assert last == ("0 t" if name != "r13" else GIVEN_UP.replace("2 pro", "4 pro"))
    assert "(r13) is ended: 4 processes in a row died that held it" in caplog.text
    assert caplog.text.count("is ended") == 1


def test_suspects_run_one_by_one_and_then_in_larger_groups() -> None:
    live = LiveRequests([sender := Recorder()], limit=40, max_retries=3)
    for number in range(20):
        live.submit([generate(f"{number}")], prompt_param="prompt")
    for _ in range(2):
        live.lost(LOST)
        live.resume()
    fresh = live.submit([generate("new")], prompt_param="prompt")  # it waits for nobody
    sizes: list[int] = []
    sent = [message for message in sender.sent()[20:] if message.prompt != generate("new").prompt][20:]
    while sent:
        sizes.append(len(sent))
        for message in sent:
            for _ in range(SETTLED_ANSWERS):
                live.take(answer(message.request_id))
        sent = sender.sent()
    assert sizes == [1, 2, 4, 8, 5]
    assert fresh.open_ids == {"new"}


def test_what_is_kept_of_a_request_is_its_message_and_four_bytes_a_token() -> None:
    """The bound that docs/howto/staying-up.md states; lists of Python numbers would take eight times as much."""
    live = LiveRequests([sender := Recorder()], limit=9, max_retries=1)
    live.submit([generate("a")], prompt_param="prompt")
    (kept,) = live._live.values()  # pyright: ignore[reportPrivateUsage]
    for token in range(20_000):
        live.take(answer("a", output=(token,)))
    assert kept.frame == wire.encode(sender.sent()[0])
    assert 4 * 20_000 <= sys.getsizeof(kept.output) <= 4.6 * 20_000 + 200


@pytest.mark.anyio
async def test_a_deadline_that_runs_out_while_a_request_is_held_ends_it() -> None:
    sender = Recorder()
    live = LiveRequests([sender], limit=9, max_retries=1)
    group = live.submit([generate("a")], prompt_param="prompt")
    live.take(answer("a"))
    live.end_at(group, time.monotonic() + 0.01)
    live.lost(LOST)
    sender.sent()
    while live.num_live:
        await asyncio.sleep(0.001)
    live.resume()
    assert sender.sent() == []
    assert (live.num_held, live.num_ending) == (0, 0)
    *_, item = [group.queue.get_nowait() for _ in range(2)]
    assert isinstance(item, ApiError)
    assert item.code == "deadline_exceeded"


def test_the_requests_of_a_dead_tokenizer_go_to_a_tokenizer_at_once() -> None:
    senders = [Recorder(), Recorder()]
    live = LiveRequests(senders, limit=9, max_retries=1)
    group = live.submit([generate("a"), generate("b")], prompt_param="prompt")
    begun = live.submit([generate("c"), generate("d")], prompt_param="prompt")
    live.take(answer("d"))
    for sender in senders:
        sender.sent()
    live.tokenizer_lost(0)
    again = [message for sender in senders for message in sender.sent()]
    assert [message.prompt for message in again] == [generate(name).prompt for name in "ac"]
    live.take(answer(again[0].request_id))
    live.take(answer("b"))
    assert (heard(group), heard(begun)) == (["0 t", "1 t"], ["1 t"])


def test_a_held_request_can_be_cancelled_prioritized_and_failed() -> None:
    sender = Recorder()
    live = LiveRequests([sender], limit=9, max_retries=1)
    groups = [live.submit([generate(name)], prompt_param="prompt", names=frozenset({name})) for name in "abc"]
    live.lost(LOST)
    sender.messages.clear()
    live.close(groups[0])
    assert live.prioritize("b", 5)
    assert (sender.messages, live.num_live, live.num_ending, live.num_held) == ([], 2, 0, 2)
    live.resume()
    assert [message.options.priority for message in sender.sent()] == [5, 0]
    live.close(groups[1])
    group = live.submit([generate("d")], prompt_param="prompt")
    live.lost(LOST)
    live.fail_all(LOST)  # the server ends
    assert heard(group) == ["The engine process died."]
    assert (live.num_live, live.num_held) == (0, 0)


def test_a_request_that_was_paused_is_sent_again_paused() -> None:
    senders = [Recorder(), Recorder()]
    live = LiveRequests(senders, limit=20, max_retries=3)
    names = {name: frozenset({name}) for name in "abc"}
    groups = {name: live.submit([generate(name)], prompt_param="prompt", names=names[name]) for name in "ab"}
    growing = live.submit([generate("c")], prompt_param="prompt", names=names["c"], room=2)
    assert [live.hold(name, "in_place") for name in "abc"] == [1, 1, 1]
    assert live.hold("b", "resume") == 1
    live.take(answer("c", finish=FinishReason.LENGTH))
    live.lost(LOST)
    for sender in senders:
        sender.messages.clear()
    live.resume()
    again = {sent.prompt: sent for sender in senders for sent in sender.sent()}
    assert [again[generate(name).prompt].options.is_paused for name in "ab"] == [True, False]
    live.extend(growing, [generate("d")])
    (further,) = [sent for sender in senders for sent in sender.sent()]
    assert further.options.is_paused
    live.lost(LOST)
    assert live.hold("a", "resume") == 1  # while it is held
    live.resume()
    last = {sent.prompt: sent for sender in senders for sent in sender.sent()}
    assert [last[generate(name).prompt].options.is_paused for name in "abd"] == [False, False, True]
    for group in (*groups.values(), growing):
        live.close(group)


def test_a_suspect_that_is_paused_holds_up_no_other_one() -> None:
    live = LiveRequests([sender := Recorder()], limit=9, max_retries=3)
    for name in "abc":
        live.submit([generate(name)], prompt_param="prompt", names=frozenset({name}))
    for _ in range(2):
        live.lost(LOST)
        live.resume()
    assert [one.prompt for one in sender.sent()[6:]] == [generate("a").prompt]
    live.hold("a", "in_place")
    assert [one.prompt for one in sender.sent()] == [generate(name).prompt for name in "bc"]
    live.lost(LOST)  # it was in no step
    live.resume()
    assert [one.prompt for one in sender.sent()] == [generate(name).prompt for name in "ab"]


def test_a_pause_that_died_with_a_tokenizer_is_sent_again() -> None:
    sender = Recorder()
    live = LiveRequests([sender], limit=9, max_retries=1)
    for name in "abc":
        live.submit([generate(name)], prompt_param="prompt", names=frozenset({name}))
        live.take(answer(name))  # it has left its tokenizer
    assert live.hold("a", "retract") == live.hold("b", "resume") == 1
    sender.messages.clear()
    live.tokenizer_lost(0)
    found = [message for message in sender.messages if isinstance(message, PauseRequest | ResumeRequest)]
    assert found == [PauseRequest(request_id="a", retract=True), ResumeRequest(request_id="b")]


def test_a_group_between_two_steps_can_be_paused() -> None:
    sender = Recorder()
    live = LiveRequests([sender], limit=9)
    group = live.submit([generate("a")], prompt_param="prompt", names=frozenset({"x"}), room=2)
    live.take(answer("a", finish=FinishReason.LENGTH))
    assert live.hold("x", "in_place") == 2
    live.extend(group, [generate("b")])
    assert [message.options.is_paused for message in sender.sent()] == [False, True]


EVENTS = st.sampled_from(["submit", "submit2", "text", "end", "close", "tokenizer", "engine", "resume", "priority"])


@given(events=st.lists(st.tuples(EVENTS, st.integers(0, 5)), max_size=40))
def test_every_client_gets_one_end_of_each_request(events: list[tuple[str, int]]) -> None:
    senders = [Recorder(), Recorder()]
    live = LiveRequests(senders, limit=100, max_retries=1)
    groups: list[LiveGroup] = []
    closed: set[int] = set()
    for event, choice in events:
        names = [name for group in groups for name in sorted(group.open_ids)]
        if event in ("submit", "submit2"):
            siblings = () if event == "submit" else (f"{len(groups)}s",)
            groups.append(live.submit([generate(f"{len(groups)}", siblings=siblings)], prompt_param="prompt"))
        elif event == "tokenizer":
            live.tokenizer_lost(choice % 2)
        elif event == "engine":
            live.lost(LOST)
        elif event == "resume":
            live.resume()
        elif event == "close" and groups:
            live.close(groups[choice % len(groups)])
            closed.add(choice % len(groups))
        elif names:
            finish = FinishReason.LENGTH if event == "end" else None
            live.take(answer(names[choice % len(names)], finish=finish))
    live.resume()
    while names := [name for group in groups for name in sorted(group.open_ids)]:
        for name in names:
            live.take(answer(name, finish=FinishReason.LENGTH))
    assert (live.num_live, live.num_held) == (0, 0)
    for index, group in enumerate(groups):
        items = heard(group)
        assert not group.open_ids
        assert items or index in closed


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_notices_nothing_of_a_death(
    model_folder: Path, tokenizer: Tokenizer, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    server = MemoryServer(model_folder, tokenizer, limit=64, max_retries=1)
    await server.start()
    server.gate.allow(5)
    given = {"model": "echo", "prompt": "Hi", "max_tokens": 99, "ignore_eos": True, "stream": True}
    running = Client(server, given, path="/v1/completions")
    received = running.messages()
    messages = [await anext(received), await anext(received)]  # the second one has text
    await server.until(lambda: server.gate.is_held)
    body = {"model": "echo", "prompt": "A question", "max_tokens": 20, "temperature": 1.0, "seed": 3, "stream": stream}
    late = Client(server, body, path="/v1/completions")
    caplog.set_level(logging.INFO, "pagewood.server.requests")
    live, status = server.service.live, server.engine_status
    await server.until(lambda: live.num_live == 2)
    status.lost(next_incarnation=1)
    live.lost(LOST)
    assert (live.num_held, status.state) == (2, EngineState.DOWN)
    assert (await server.client.get("/ready")).status_code == 503
    assert (await server.admin.post("/flush_cache", json={})).status_code == 503  # commands are not repeated
    latest = Client(server, body, path="/v1/completions")
    await server.until(lambda: live.num_held == 3)
    status.incarnation = 0  # not ours; the engine of this test did not die: it plays the next one
    server.gate.open()
    messages += [message async for message in received]
    assert messages[0]["status"] == 200
    assert messages[-2]["body"] == b"data: [DONE]\n\n" or messages[-1]["body"] == b"data: [DONE]\n\n"
    expected = server.expected_text("A question", max_tokens=20, temperature=1.0, seed=3)
    for client in (late, latest):
        messages = [message async for message in client.messages()]
        text = b"".join(message.get("body", b"") for message in messages).decode()
        if stream:
            chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]) == expected
        else:
            assert json.loads(text)["choices"][0]["text"] == expected
    assert live.incidents.num_retried == 2
    assert (await server.client.get("/ready")).json()["incidents"]["retried"] == 2
    await server.until_idle()
    await server.stop()
    await asyncio.gather(late.served, latest.served, running.served)
    posts = [record for record in caplog.records if record.getMessage().startswith("POST /v1/completions")]
    engine_ids = [record.__dict__["fields"]["engine_ids"] for record in posts]
    assert sorted(map(len, engine_ids)) == [1, 2, 2]  # the last one was sent once
    assert len({name for names in engine_ids for name in names}) == 5
