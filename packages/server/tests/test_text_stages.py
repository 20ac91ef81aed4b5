"""Tokenizer and detokenizer stages: a failure ends its own request only, and no state is left behind."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tokenizers

from engine_commands import command_of
from memory_link import MemoryLink
from pagewood.engine.api import (
    Abort,
    Command,
    Delta,
    FinishReason,
    Overflow,
    PassOn,
    Refusal,
    Refuse,
    RequestOptions,
    SamplingParams,
    SetPriority,
    Submit,
)
from pagewood.engine.text import Tokenizer
from pagewood.server.messages import wire
from pagewood.server.stages.detokenizing import TextStreams
from pagewood.server.stages.tokenizing import commands, run_tokenizer

MODEL = wire.Model(max_length=10, vocab_size=5)


def generate(prompt: wire.Prompt, *, echo: bool = False) -> wire.Generate:
    return wire.Generate(
        request_id="a",
        prompt=prompt,
        options=RequestOptions(priority=3, deadline_s=9.5, tenant="t"),
        text=wire.TextOptions(stop=("x",)),
        echo=echo,
    )


def command(tokenizer: Tokenizer, message: wire.WithPrompt) -> Command:
    """Return the engine's command for a message about one answer."""
    (only,) = commands(tokenizer, message)
    return only


def test_a_prompt_becomes_a_submit(tokenizer: Tokenizer) -> None:
    submit = command(tokenizer, generate(wire.TextPrompt(text="héllo"), echo=True))
    assert isinstance(submit, Submit)
    assert np.frombuffer(submit.tokens, "<i4").tolist() == tokenizer.encode("héllo").tolist()
    assert (submit.priority, submit.deadline_s, submit.tenant) == (3, 9.5, "t")
    assert wire.carried.decode(submit.carry) == wire.TextOptions(stop=("x",), prefix="héllo")


def test_bad_prompts_are_refused(tokenizer: Tokenizer) -> None:
    refused = [
        generate(wire.ChatPrompt(messages=({"role": "user", "content": "refuse me"},))),
        generate(wire.ChatPrompt(messages=({"role": "user"},))),
        generate(wire.TextPrompt(text="")),
        generate(wire.TokenPrompt(tokens=b"")),
        generate(wire.TokenPrompt(tokens=b"odd")),
    ]
    codes: list[str | None] = []
    for message in refused:
        refuse = command(tokenizer, message)
        assert isinstance(refuse, Refuse)
        assert refuse.refusal.param == "prompt"
        codes.append(refuse.refusal.code)
    assert codes == ["invalid_messages", "invalid_messages", "empty_prompt", "empty_prompt", "invalid_prompt"]


def step(*deltas: Delta) -> wire.Step:
    return wire.Step(deltas)


def answers(message: wire.ToHttp) -> tuple[wire.Answer, ...]:
    assert isinstance(message, wire.Answers)
    return message.answers


def texts(message: wire.ToHttp) -> list[tuple[str, FinishReason | None, bool]]:
    return [(answer.text, answer.finish, answer.ended) for answer in answers(message)]


def test_text_stop_and_end(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer)
    carry = wire.encode(wire.TextOptions(stop=("STOP",), prefix="> "))
    ids = tuple(tokenizer.encode("one STOP two").tolist())
    first = Delta(request_id="a", tokens=ids[:5], first=True, carry=carry)
    assert texts(streams.take(step(first))) == [("> one ", None, False)]
    assert texts(streams.take(step(Delta(request_id="a", tokens=ids[5:])))) == [("", FinishReason.STOP, False)]
    assert texts(streams.take(step(Delta(request_id="a", tokens=ids)))) == []  # its client has already received the end
    last = Delta(request_id="a", finish=FinishReason.ABORT)
    assert texts(streams.take(step(last))) == [("", FinishReason.ABORT, True)]
    assert streams.num_open == 0


def test_bad_words_are_tokenized_without_and_with_a_space(tokenizer: Tokenizer) -> None:
    message = msgspec.structs.replace(generate(wire.TextPrompt(text="x")), bad_words=("foo", " foo", "b", " "))
    submit = command(tokenizer, message)
    assert isinstance(submit, Submit)
    texts = ("foo", " foo", "b", " b", " ")
    expected = [tuple(tokenizer.encode(text, add_special_tokens=False).tolist()) for text in texts]
    assert submit.sampling == SamplingParams(bad_words=tuple(expected))


def test_a_stop_expression_ends_the_text(tokenizer: Tokenizer) -> None:
    options = wire.TextOptions(stop_regex=(r"\n[A-Z][a-z]{1,9}:",))
    submit = command(tokenizer, wire.Generate(request_id="a", prompt=wire.TextPrompt(text="x"), text=options))
    assert isinstance(submit, Submit)
    streams, shown = TextStreams(tokenizer), ""
    for i, token in enumerate(tokenizer.encode("one two three\nUser: four").tolist()):
        delta = Delta(request_id="a", tokens=(token,), first=i == 0, carry=b"" if i else submit.carry)
        for text, finish, _ in texts(streams.take(step(delta))):
            shown += text
            assert "one two three".startswith(shown)
            assert (finish is FinishReason.STOP) == (shown == "one two three")
    assert shown == "one two three"


@pytest.mark.parametrize(
    ("finish", "seen"), [("LENGTH", "STOP"), ("STOP", "STOP"), ("ABORT", "ABORT"), ("ERROR", "ERROR")]
)
def test_a_match_at_the_end_of_the_text_counts_if_the_text_is_complete(
    tokenizer: Tokenizer, finish: str, seen: str
) -> None:
    streams = TextStreams(tokenizer)
    carry = wire.encode(wire.TextOptions(stop_regex=("END$",)))
    ids = tuple(tokenizer.encode("the END").tolist())
    (answer,) = answers(streams.take(step(Delta("a", ids, FinishReason[finish], first=True, carry=carry))))
    assert (answer.text, answer.finish) == ("the ", FinishReason[seen])


@pytest.mark.parametrize("finish", [None, FinishReason.LENGTH, FinishReason.STOP])
def test_tokens_after_a_stop_string_in_the_same_step_do_not_count(
    tokenizer: Tokenizer, finish: FinishReason | None
) -> None:
    """A step yields several tokens if the engine speculates; the usage must be that of one token per step."""
    streams = TextStreams(tokenizer)
    carry = wire.encode(wire.TextOptions(stop=("STOP",)))
    ids = tuple(tokenizer.encode("one STOP two").tolist())
    num_output = len(ids) + (finish is FinishReason.STOP)  # the token that ended the request is not in `tokens`
    delta = Delta("a", ids, finish, first=True, carry=carry, num_output_tokens=num_output)
    (answer,) = answers(streams.take(step(delta)))
    assert (answer.text, answer.finish, answer.ended) == ("one ", FinishReason.STOP, finish is not None)
    assert answer.num_output_tokens == len(tokenizer.encode("one STOP"))
    whole = msgspec.structs.replace(delta, request_id="b", carry=wire.encode(wire.TextOptions(stop=("three",))))
    (answer,) = answers(streams.take(step(whole)))
    assert answer.num_output_tokens == num_output


def test_draft_tokens_are_passed_on(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer)
    delta = Delta("a", (1, 2), first=True, num_drafted_tokens=9, num_accepted_tokens=4)
    (answer,) = answers(streams.take(step(delta)))
    assert (answer.num_drafted_tokens, answer.num_accepted_tokens) == (9, 4)


def test_held_text_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer)
    carry = wire.encode(wire.TextOptions(stop=("STOP",)))
    ids = tuple(tokenizer.encode("ST").tolist()) + tuple(tokenizer.encode("é").tolist())[:1]
    streams.take(step(Delta(request_id="a", tokens=(), first=True, carry=carry)))
    assert texts(streams.take(step(Delta(request_id="a", tokens=ids[:2])))) == [("", None, False)]
    end = Delta(request_id="a", tokens=ids[2:], finish=FinishReason.LENGTH)
    assert texts(streams.take(step(end))) == [("ST\ufffd", FinishReason.LENGTH, True)]


def test_a_request_whose_beginning_is_unknown_fails(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer)  # this process replaces one that died
    unknown = Delta(request_id="a", tokens=(1,))
    (answer,) = answers(streams.take(step(unknown)))
    assert (answer.text, answer.finish, answer.ended) == ("", FinishReason.ERROR, False)
    assert answer.refusal is not None
    assert "restarted" in answer.refusal.message
    assert texts(streams.take(step(unknown))) == []  # once is enough
    last = Delta(request_id="a", finish=FinishReason.LENGTH)
    assert texts(streams.take(step(last))) == [("", FinishReason.LENGTH, True)]
    assert streams.num_open == 0
    # If the first Delta that arrives is the last one, the answer is incomplete: it ends with an error.
    for finish in (FinishReason.STOP, FinishReason.LENGTH):
        end = Delta(request_id="b", tokens=(1,), finish=finish)
        assert texts(streams.take(step(end))) == [("", FinishReason.ERROR, True)]
    assert streams.num_open == 0


@pytest.mark.parametrize("incarnation", [0, 1, 7])
def test_a_new_detokenizer_keeps_the_streams_of_an_engine_that_was_restarted(
    tokenizer: Tokenizer, incarnation: int
) -> None:
    streams = TextStreams(tokenizer, incarnation=1)
    ids = tuple(tokenizer.encode("abc").tolist())
    first = wire.Step((Delta(request_id="a", tokens=ids[:1], first=True),), incarnation)
    assert texts(streams.take(first)) == [("a", None, False)]
    pulse = wire.Pulse(incarnation=incarnation, model=MODEL, counters={})
    assert streams.take(pulse) == msgspec.structs.replace(pulse, relay=1)
    last = wire.Step((Delta(request_id="a", tokens=ids[1:], finish=FinishReason.LENGTH),), incarnation)
    assert texts(streams.take(last)) == [("bc", FinishReason.LENGTH, True)]


@pytest.mark.parametrize("kind", ["step", "pulse", "loading"])
def test_the_streams_of_a_dead_engine_are_forgotten(tokenizer: Tokenizer, kind: str) -> None:
    streams = TextStreams(tokenizer)
    streams.take(step(Delta(request_id="a", tokens=(1,), first=True)))
    assert streams.num_open == 1
    streams.take(
        {
            "step": wire.Step((), 1),
            "pulse": wire.Pulse(incarnation=1, model=MODEL, counters={}),
            "loading": wire.Loading(incarnation=1, what="x", done=0, total=1),
        }[kind]
    )
    assert streams.num_open == (kind != "step")  # while the next engine loads, the one before it may still work


def test_a_late_message_of_a_replaced_engine_changes_nothing(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer)
    ids = tuple(tokenizer.encode("ab").tolist())
    streams.take(wire.Loading(incarnation=1, what="x", done=0, total=1))
    assert texts(streams.take(wire.Step((Delta(request_id="a", tokens=ids[:1], first=True),), 1))) == [
        ("a", None, False)
    ]
    late = wire.Step((Delta(request_id="b", tokens=ids, finish=FinishReason.LENGTH),), 0)
    assert texts(streams.take(late)) == []
    last = wire.Step((Delta(request_id="a", tokens=ids[1:], finish=FinishReason.LENGTH),), 1)
    assert texts(streams.take(last)) == [("b", FinishReason.LENGTH, True)]


@pytest.mark.parametrize(
    ("template", "code"),
    [("{{ raise_exception('\\ud800') }}", "invalid_messages"), ("{{ '\\ud800' }}", "invalid_prompt")],
)
def test_lone_surrogates_of_a_template_can_be_reported(
    model_folder: Path, tmp_path: Path, template: str, code: str
) -> None:
    shutil.copytree(model_folder, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    message = generate(wire.ChatPrompt(messages=({"role": "user", "content": "x"},)))
    refuse = command(Tokenizer.from_folder(tmp_path / "model"), message)
    assert isinstance(refuse, Refuse)
    assert refuse.refusal.code == code
    assert wire.encode(refuse)


def panicking() -> Tokenizer:
    """Return a tokenizer whose decoder panics on a piece that is a single space."""
    # The decoder slices [1:0] when it strips a space from both ends of a piece that is one space.
    return Tokenizer(
        tokenizers.Tokenizer.from_str(
            json.dumps(
                {
                    "version": "1.0",
                    "added_tokens": [],
                    "decoder": {"type": "Strip", "content": " ", "start": 1, "stop": 1},
                    "model": {
                        "type": "WordLevel",
                        "vocab": {"<unk>": 0, " ": 1, "x": 2},
                        "unk_token": "<unk>",
                    },
                }
            )
        )
    )


def test_a_panic_of_the_library_fails_its_own_request_only() -> None:
    tokenizer = panicking()
    streams = TextStreams(tokenizer)
    good, bad = [Delta(request_id=name, tokens=(token,), first=True) for name, token in (("a", 2), ("b", 1))]
    assert texts(streams.take(step(good, bad))) == [("x", None, False), ("", FinishReason.ERROR, False)]
    ends = [Delta(request_id=name, tokens=(2,), finish=FinishReason.LENGTH) for name in "ab"]
    assert texts(streams.take(step(*ends))) == [("x", FinishReason.LENGTH, True), ("", FinishReason.LENGTH, True)]
    assert streams.num_open == 0
    # In the tokenizer, the echo of a prompt is decoded.
    refuse = command(tokenizer, generate(wire.TokenPrompt(tokens=b"\1\0\0\0"), echo=True))
    assert isinstance(refuse, Refuse)
    assert refuse.refusal.code == "invalid_prompt"
    assert isinstance(command(tokenizer, generate(wire.TokenPrompt(tokens=b"\2\0\0\0"), echo=True)), Submit)


class PanicException(BaseException):
    """Named as the exception in which pyo3 wraps a panic, which no module exports."""


def test_a_panic_while_encoding_refuses_the_request() -> None:
    # No text is known on which this version of the library panics while it encodes: this one is a stand-in.
    library = tokenizers.Tokenizer(tokenizers.models.BPE())

    class Panics:
        def __getattr__(self, name: str) -> Any:
            return getattr(library, name)

        def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> Any:
            raise PanicException("no entry found for key")

    stand_in: Any = Panics()
    refuse = command(Tokenizer(stand_in), generate(wire.TextPrompt(text="x")))
    assert isinstance(refuse, Refuse)
    assert "panicked: no entry found" in refuse.refusal.message


@pytest.mark.parametrize("text", ["\ud800", "a\udfff b"])
def test_lone_surrogates_are_refused(tokenizer: Tokenizer, text: str) -> None:
    prompts: list[wire.Prompt] = [
        wire.TextPrompt(text=text),
        wire.ChatPrompt(messages=({"role": "user", "content": text},)),
    ]
    for prompt in prompts:
        refuse = command(tokenizer, generate(prompt))
        assert isinstance(refuse, Refuse)
        assert "lone surrogate" in refuse.refusal.message


class Counting:
    """A tokenizer that records what it encodes, and can be paused."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.encoded: list[int] = []
        self.started = threading.Event()
        self.may_go_on = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Any:
        self.encoded.append(len(text))
        if text.startswith("wait"):
            self.started.set()
            assert self.may_go_on.wait(60)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)


class Stage:
    """A running tokenizer stage between two links in memory."""

    def __init__(self, tokenizer: Any) -> None:
        self._stopped = threading.Event()
        self.inbox, self.outbox = [MemoryLink(stopping=self._stopped.is_set) for _ in range(2)]
        self._thread = threading.Thread(
            target=run_tokenizer, args=(tokenizer, self.inbox, self.outbox), kwargs={"stopped": self._stopped.is_set}
        )

    def start(self) -> None:
        self._thread.start()

    def send(self, *messages: wire.ToTokenizer) -> None:
        for message in messages:
            self.inbox.send(wire.encode(message))

    def receive(self, num_commands: int) -> list[Command]:
        """Return that many commands, or fewer if they do not come."""
        commands: list[Command] = []
        deadline_s = time.monotonic() + 60
        while len(commands) < num_commands and time.monotonic() < deadline_s:
            frames = self.outbox.receive(timeout_s=1)
            commands += [command_of(message) for message in wire.read(wire.engine_commands, frames)]
        return commands

    def stop(self) -> None:
        self._stopped.set()
        self.inbox.wake()
        self._thread.join(60)
        assert not self._thread.is_alive()


def prompt(request_id: str, text: str, *, max_length: int | None = None, group_id: str = "") -> wire.Generate:
    return wire.Generate(
        request_id=request_id, prompt=wire.TextPrompt(text=text), max_length=max_length, group_id=group_id
    )


def test_a_long_prompt_does_not_hold_up_a_short_one(tokenizer: Tokenizer) -> None:
    counting = Counting(tokenizer)
    stage = Stage(counting)
    stage.start()
    # Two of one lane, one of the next; the first stands still.
    stage.send(prompt("long", "wait" + "a" * 20_000), prompt("next", "b" * 20_000), prompt("longer", "c" * 300_000))
    assert counting.started.wait(60)
    stage.send(prompt("short", "d"))
    assert sorted(command.request_id for command in stage.receive(2)) == ["longer", "short"]
    stage.send(SetPriority(request_id="long", priority=7), Abort(request_id="next"))
    stage.send(SetPriority(request_id="short", priority=3))  # in the engine by now
    assert stage.receive(1) == [SetPriority(request_id="short", priority=3)]
    counting.may_go_on.set()
    long, cancelled = stage.receive(2)
    assert isinstance(long, Submit)
    assert long.priority == 7
    assert isinstance(cancelled, Refuse)
    assert (cancelled.request_id, cancelled.refusal.code) == ("next", "cancelled")
    stage.send(Abort(request_id="long"))
    assert stage.receive(1) == [Abort(request_id="long")]
    stage.stop()
    assert sorted(counting.encoded) == [1, 20_004, 300_000]  # what was cancelled in its queue is not encoded


@pytest.mark.parametrize("text", ["a", "a" * 20_000])
def test_the_prompts_of_a_group_do_not_hold_up_others_of_their_lane(tokenizer: Tokenizer, text: str) -> None:
    counting = Counting(tokenizer)
    stage = Stage(counting)
    stage.start()
    stage.send(prompt("first", "wait" + text))  # stands still until all are queued
    assert counting.started.wait(60)
    stage.send(*[prompt(str(i), text, group_id="0") for i in range(20)], prompt("other", text))
    stage.send(wire.Encode(request_id="ids", prompt=wire.TextPrompt(text=text)))
    until_read = SetPriority(request_id="in the engine", priority=1)
    if len(text) > 1:  # short prompts are encoded in the thread that reads
        stage.send(until_read)
        assert stage.receive(1) == [SetPriority(request_id="in the engine", priority=1)]
    counting.may_go_on.set()
    found = [command.request_id for command in stage.receive(23)]
    stage.stop()
    assert found == ["first", "0", "other", "ids", *map(str, range(1, 20))]


def test_a_request_cancelled_while_it_is_tokenized_does_not_reach_the_engine(tokenizer: Tokenizer) -> None:
    counting = Counting(tokenizer)
    stage = Stage(counting)
    stage.start()
    stage.send(prompt("long", "wait" + "a" * 20_000))
    assert counting.started.wait(60)
    stage.send(Abort(request_id="long"), prompt("short", "d"))
    assert [command.request_id for command in stage.receive(1)] == ["short"]  # the cancellation was read before it
    counting.may_go_on.set()
    (ended,) = stage.receive(1)
    assert isinstance(ended, Refuse)
    stage.stop()


def test_a_prompt_cancelled_before_it_is_started_is_not_tokenized(tokenizer: Tokenizer) -> None:
    counting = Counting(tokenizer)
    stage = Stage(counting)
    for name in ("a", "b", "c"):
        stage.send(prompt(name, "x" * 100))
    stage.send(Abort(request_id="a"), Abort(request_id="c"))
    stage.start()
    commands = {command.request_id: command for command in stage.receive(3)}
    stage.stop()
    assert counting.encoded == [100]
    assert isinstance(commands["b"], Submit)
    for name in ("a", "c"):  # the end of every request is confirmed
        assert isinstance(commands[name], Refuse)


def test_a_prompt_too_long_by_its_bytes_is_not_encoded(tokenizer: Tokenizer) -> None:
    counting: Any = Counting(tokenizer)
    text = "a" * 100_000
    too_long = command(counting, prompt("a", text, max_length=1000))
    assert isinstance(too_long, Refuse)
    assert counting.encoded == []
    assert too_long.refusal == Refusal(
        message=(
            "This model's maximum context length is 1000 tokens, "
            "but the prompt has at least 11112 tokens and max_tokens asks for 128 more"
        ),
        param="max_tokens",
        code="context_length_exceeded",
        overflow=Overflow(num_prompt=11112, max_length=1000, max_tokens=128, is_counted=False),
    )
    assert isinstance(command(counting, prompt("a", text, max_length=200_000)), Submit)
    assert isinstance(command(counting, prompt("a", text)), Submit)
    assert isinstance(command(counting, prompt("a", "a" * 872, max_length=1000)), Submit)


def test_the_ids_of_a_prompt_pass_the_engine_and_are_the_answer(tokenizer: Tokenizer) -> None:
    messages = ({"role": "user", "content": "héllo"},)
    for prompt, expected in (
        (wire.TextPrompt(text="héllo"), tokenizer.encode("héllo").tolist()),
        (wire.TextPrompt(text=""), []),
        (wire.TokenPrompt(tokens=np.array([3, 9], "<i4").tobytes()), [3, 9]),
        (
            wire.ChatPrompt(messages=messages),
            tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False).tolist(),
        ),
    ):
        pass_on = command(tokenizer, wire.Encode(request_id="a", prompt=prompt))
        assert isinstance(pass_on, PassOn)
        streams = TextStreams(tokenizer)
        delta = Delta(request_id="a", finish=FinishReason.STOP, first=True, carry=pass_on.carry)
        (answer,) = answers(streams.take(step(delta)))
        assert (answer.finish, answer.ended, answer.refusal, answer.text) == (FinishReason.STOP, True, None, "")
        assert answer.encoded is not None
        assert np.frombuffer(answer.encoded.tokens, "<i4").tolist() == expected
        assert streams.num_open == 0


def test_a_prompt_that_cannot_be_encoded_is_refused(tokenizer: Tokenizer) -> None:
    prompt = wire.ChatPrompt(messages=({"role": "user", "content": "refuse me"},))
    refuse = command(tokenizer, wire.Encode(request_id="a", prompt=prompt))
    assert isinstance(refuse, Refuse)
    assert refuse.refusal.code == "invalid_messages"
