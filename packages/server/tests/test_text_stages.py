"""Tokenizer and detokenizer on their own: what fails only fails its own request, and nothing is left behind."""

from __future__ import annotations

import numpy as np

from pagewood.engine.api import Abort, Delta, FinishReason, Refuse, SamplingParams, SetPriority, Submit
from pagewood.engine.text import Tokenizer
from pagewood.server import wire
from pagewood.server.detokenizing import TextStreams
from pagewood.server.tokenizing import command

MODEL = wire.Model(max_length=10, vocab_size=5)


def generate(prompt: wire.Prompt, *, echo: bool = False) -> wire.Generate:
    return wire.Generate(request_id="a", prompt=prompt, sampling=SamplingParams(), echo=echo, stop=("x",), priority=3)


def test_a_prompt_becomes_a_submit(tokenizer: Tokenizer) -> None:
    submit = command(tokenizer, generate(wire.TextPrompt(text="héllo"), echo=True))
    assert isinstance(submit, Submit)
    assert np.frombuffer(submit.tokens, "<i4").tolist() == tokenizer.encode("héllo").tolist()
    assert submit.priority == 3
    assert wire.text_options.decode(submit.carry) == wire.TextOptions(stop=("x",), prefix="héllo")
    assert command(tokenizer, wire.Cancel(request_id="a")) == Abort(request_id="a")
    prioritize = wire.Prioritize(request_id="a", priority=-2)
    assert command(tokenizer, prioritize) == SetPriority(request_id="a", priority=-2)


def test_what_cannot_be_tokenized_is_refused(tokenizer: Tokenizer) -> None:
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


def texts(message: wire.ToHttp) -> list[tuple[str, FinishReason | None, bool]]:
    assert isinstance(message, wire.Answers)
    return [(answer.text, answer.finish, answer.ended) for answer in message.answers]


def test_text_stop_and_end(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer)
    carry = wire.encode(wire.TextOptions(stop=("STOP",), prefix="> "))
    ids = tuple(tokenizer.encode("one STOP two").tolist())
    first = Delta(request_id="a", tokens=ids[:5], first=True, carry=carry)
    assert texts(streams.take(step(first))) == [("> one ", None, False)]
    assert texts(streams.take(step(Delta(request_id="a", tokens=ids[5:])))) == [("", FinishReason.STOP, False)]
    assert texts(streams.take(step(Delta(request_id="a", tokens=ids)))) == []  # its client has heard the end
    last = Delta(request_id="a", finish=FinishReason.ABORT)
    assert texts(streams.take(step(last))) == [("", FinishReason.ABORT, True)]
    assert streams.num_open == 0


def test_what_is_held_comes_at_the_end(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer)
    carry = wire.encode(wire.TextOptions(stop=("STOP",)))
    ids = tuple(tokenizer.encode("ST").tolist()) + tuple(tokenizer.encode("é").tolist())[:1]
    streams.take(step(Delta(request_id="a", tokens=(), first=True, carry=carry)))
    assert texts(streams.take(step(Delta(request_id="a", tokens=ids[:2])))) == [("", None, False)]
    end = Delta(request_id="a", tokens=ids[2:], finish=FinishReason.LENGTH)
    assert texts(streams.take(step(end))) == [("ST\ufffd", FinishReason.LENGTH, True)]


def test_requests_of_another_life_are_dropped(tokenizer: Tokenizer) -> None:
    streams = TextStreams(tokenizer)
    unknown = Delta(request_id="a", tokens=(1,))
    assert texts(streams.take(step(unknown))) == []  # this process was started again
    streams.take(step(Delta(request_id="b", tokens=(1,), first=True)))
    assert streams.num_open == 1
    pulse = wire.Pulse(incarnation=0, model=MODEL, counters={})
    assert streams.take(pulse) == pulse
    assert streams.num_open == 1
    loading = wire.Loading(incarnation=1, what="x", done=0, total=1)  # the engine was
    assert streams.take(loading) == loading
    assert streams.num_open == 0
