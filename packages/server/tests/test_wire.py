"""Messages are decoded as they were encoded, other frames are dropped, and no module uses pickle."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pagewood.engine
import pagewood.server
from engine_commands import command_of
from pagewood.engine.api import (
    Abort,
    CachedPrefix,
    Command,
    Delta,
    Explanation,
    FinishReason,
    Grammar,
    PassOn,
    Refusal,
    Refuse,
    RequestOptions,
    RequestTimings,
    SamplingParams,
    SetPriority,
    Submit,
    TokenLogprob,
)
from pagewood.server.messages import wire

TEXT = st.text(max_size=10)
COUNT = st.integers(0, 10**6)
SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(1, 2**31),
    temperature=st.floats(0, 2),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop_token_ids=st.lists(st.integers(0, 2**31)).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 64),
    grammar=st.none() | st.builds(Grammar, kind=st.sampled_from(["regex", "lark"]), text=st.text(min_size=1)),
)
REFUSAL = st.builds(Refusal, message=TEXT, param=st.none() | TEXT, code=st.none() | TEXT)
SUBMIT = st.builds(
    Submit,
    request_id=TEXT,
    tokens=st.binary(),
    sampling=SAMPLING,
    priority=st.integers(-9, 9),
    carry=st.binary(),
    explain=st.booleans(),
)
COMMAND = (
    SUBMIT
    | st.builds(Abort, request_id=TEXT)
    | st.builds(SetPriority, request_id=TEXT, priority=st.integers(-9, 9))
    | st.builds(Refuse, request_id=TEXT, refusal=REFUSAL)
    | st.builds(PassOn, request_id=TEXT, carry=st.binary())
)
TOKEN = st.integers(0, 2**31 - 1)
LOGPROB = st.floats(max_value=0.0, allow_nan=False)
LOGPROBS = st.lists(
    st.builds(
        TokenLogprob, token=TOKEN, logprob=LOGPROB, rank=COUNT, top=st.lists(st.tuples(TOKEN, LOGPROB)).map(tuple)
    ),
    max_size=3,
).map(tuple)
TIME = st.floats(0, 1e9)
PREFIX = st.builds(
    CachedPrefix,
    cause=st.sampled_from(["complete", "page_rounding", "evicted", "never_seen", "no_cache"]),
    num_reusable_tokens=COUNT,
    num_tokens=COUNT,
    first_difference=COUNT,
    num_possible_tokens=COUNT,
    evicted_by=st.none() | TEXT,
    evicted_s=st.none() | TIME,
)
DELTA = st.builds(
    Delta,
    request_id=TEXT,
    tokens=st.lists(TOKEN).map(tuple),
    finish=st.none() | st.sampled_from(FinishReason),
    refusal=st.none() | REFUSAL,
    first=st.booleans(),
    carry=st.binary(),
    num_prompt_tokens=COUNT,
    num_cached_tokens=COUNT,
    num_output_tokens=COUNT,
    num_drafted_tokens=COUNT,
    num_accepted_tokens=COUNT,
    logprobs=LOGPROBS,
    prompt_logprobs=LOGPROBS,
    explanation=st.none() | st.builds(Explanation, prefix=PREFIX, arrived_s=TIME, admitted_s=TIME),
    timings=st.none()
    | st.builds(
        RequestTimings,
        arrived_s=TIME,
        queued_s=st.none() | TIME,
        admitted_s=st.none() | TIME,
        chunks=st.lists(st.tuples(TIME, COUNT), max_size=3).map(tuple),
        num_preempted=COUNT,
        preempted_s=st.lists(TIME, max_size=3).map(tuple),
        first_token_s=st.none() | TIME,
        finished_s=TIME,
    ),
)
PROMPT = (
    st.builds(wire.TextPrompt, text=TEXT)
    | st.builds(wire.TokenPrompt, tokens=st.binary())
    | st.builds(wire.ChatPrompt, messages=st.lists(st.dictionaries(TEXT, TEXT)).map(tuple))
)


@given(command=COMMAND)
def test_commands(command: Command) -> None:
    frame = wire.encode(command)
    (message,) = wire.read(wire.engine_commands, [frame])
    assert command_of(message) == command


@given(deltas=st.lists(DELTA, max_size=3))
def test_steps(deltas: list[Delta]) -> None:
    step = wire.Step(tuple(deltas))
    assert list(wire.read(wire.from_engine, [wire.encode(step)])) == [step]


@given(
    counters=st.dictionaries(TEXT, COUNT),
    speculation=st.none()
    | st.builds(
        wire.Speculation,
        num_drafted=COUNT,
        num_accepted=COUNT,
        drafted_by_position=st.lists(COUNT).map(tuple),
        accepted_by_position=st.lists(COUNT).map(tuple),
        draft_s=st.floats(0, 1e6),
        verify_s=st.floats(0, 1e6),
        num_rebuilt=COUNT,
        num_postponed=COUNT,
        num_short=COUNT,
        reason=TEXT,
    ),
)
def test_pulses(counters: dict[str, int], speculation: wire.Speculation | None) -> None:
    model = wire.Model(max_length=10, vocab_size=5, eos_token_ids=(1, 4))
    pulse = wire.Pulse(incarnation=1, model=model, counters=counters, speculation=speculation)
    for decoder in (wire.from_engine, wire.to_http):
        assert decoder.decode(wire.encode(pulse)) == pulse


SCORED = st.builds(wire.ScoredToken, TOKEN, st.binary(max_size=4), LOGPROB)
ENTRIES = st.lists(st.builds(wire.TokenEntry, SCORED, COUNT, COUNT, st.lists(SCORED).map(tuple)), max_size=3).map(tuple)


@given(logprobs=st.none() | st.builds(wire.Logprobs, ENTRIES, st.none() | ENTRIES, st.binary()))
def test_answers(logprobs: wire.Logprobs | None) -> None:
    answers = wire.Answers((wire.Answer("a", "t", None, False, None, 1, 0, 1, logprobs=logprobs),))
    assert list(wire.read(wire.to_http, [wire.encode(answers)])) == [answers]


@given(prompt=PROMPT, sampling=SAMPLING, stop=st.lists(TEXT).map(tuple), echo=st.booleans())
def test_requests(prompt: wire.Prompt, sampling: SamplingParams, stop: tuple[str, ...], echo: bool) -> None:
    generate = wire.Generate(
        request_id="a", prompt=prompt, options=RequestOptions(sampling=sampling), sibling_ids=stop, echo=echo,
        text=wire.TextOptions(stop=stop, is_scoring=echo), prefix_tokens=b"\x01\x00\x00\x00", reports_prompt=echo,
    )  # fmt: skip
    cancel = Abort(request_id="a")
    prioritize = SetPriority(request_id="a", priority=-3)
    frames = [wire.encode(generate), wire.encode(prioritize), wire.encode(cancel)]
    assert list(wire.read(wire.to_tokenizer, frames)) == [generate, prioritize, cancel]


@pytest.mark.parametrize("decoder", [wire.to_tokenizer, wire.engine_commands, wire.from_engine, wire.to_http])
def test_invalid_frames_are_dropped(decoder: Any, caplog: pytest.LogCaptureFixture) -> None:
    cancel = Abort(request_id="a")
    wrong = [
        pickle.dumps(cancel.request_id),
        pickle.dumps({"type": "abort"}),
        b"",
        b"\x81" * 100_000,  # nested too deeply to be read
        wire.encode({"type": "abort"}),
        wire.encode({"type": "submit", "request_id": "a", "tokens": b"", "sampling": {"max_tokens": 0}}),
    ]
    good = wire.encode(wire.Answers(()))
    expected = [wire.Answers(())] if decoder is wire.to_http else []
    assert list(wire.read(decoder, [*wrong, good])) == expected
    assert caplog.text.count("dropped a malformed message") == len(wrong) + (not expected)


GENERATES_CODE = "runner/cpu/compiled/instruction.py"
"""The one module that runs text: what it has made of the signatures of its own kernels, when it is imported."""


def test_no_source_uses_pickle() -> None:
    forbidden = re.compile(r"\b(pickle|marshal|shelve|dill|_pyobj|multiprocessing|eval\(|exec\()\b")
    for package in (pagewood.server, pagewood.engine):
        assert package.__file__ is not None
        for file in Path(package.__file__).parent.rglob("*.py"):
            found = set(forbidden.findall(file.read_text()))
            assert found == ({"exec("} if file.as_posix().endswith(GENERATES_CODE) else set()), file
