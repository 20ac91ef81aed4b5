"""Streams of responses for any parts in any steps: what the events say is what the whole response says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewood.engine.api import FinishReason
from pagewood.server.messages import wire
from pagewood.server.protocols.common.formats import Choice, PromptTokensDetails, Tally, Usage
from pagewood.server.protocols.responses.format import ResponsesFormat
from pagewood.server.protocols.responses.objects import Response
from response_events import assembled, events_of, without_ids

USAGE = Usage(1, 2, 3, PromptTokensDetails(0))
RESPONSE = Response(
    id="resp_1", created_at=1, model="m", instructions=None, previous_response_id=None, max_output_tokens=None,
    max_tool_calls=None, metadata={}, parallel_tool_calls=True, prompt_cache_key=None, reasoning={},
    safety_identifier=None, store=False, temperature=1.0, text={}, tool_choice="auto", tools=(), top_logprobs=0,
    top_p=1.0, user=None,
)  # fmt: skip
FORMAT = ResponsesFormat(response=RESPONSE, shows_logprobs=True)


def step(parts: list[wire.Part], number: int, finish: FinishReason | None = None) -> wire.Answer:
    """Return the message of a step with one token, whose text is its number."""
    token = wire.ScoredToken(number, str(number).encode(), -1.0)
    return wire.Answer(
        request_id="r", text="", finish=finish, ended=finish is not None, refusal=None, num_prompt_tokens=1,
        num_cached_tokens=0, num_output_tokens=number + 1, parts=tuple(parts),
        logprobs=wire.Logprobs((wire.TokenEntry(token, 1, 0, ()),)),
    )  # fmt: skip


@st.composite
def answers(draw: st.DrawFn) -> list[wire.Answer]:
    """Draw the messages of an answer. A call may break off: then another section follows, or the end."""
    steps: list[list[wire.Part]] = []
    kinds = ["content", "reasoning", "tool_call", "arguments", "call_end"]
    num_calls, arguments = 0, None
    for drawn in draw(st.lists(st.lists(st.sampled_from(kinds), max_size=3))):
        parts: list[wire.Part] = []
        for kind in drawn:
            if kind == "tool_call":
                parts.append(wire.Part("tool_call", f"f{num_calls}", num_calls))
                num_calls, arguments = num_calls + 1, ""
            elif kind == "arguments" and arguments is not None and "}" not in arguments:
                text = draw(st.sampled_from(["{", "{}"] if not arguments else [" ", "}"]))
                arguments += text
                parts.append(wire.Part("arguments", text, num_calls - 1))
            elif kind == "call_end" and arguments is not None and "}" in arguments:
                arguments = None
                parts.append(wire.Part("call_end", "", num_calls - 1))
            elif kind in ("content", "reasoning"):
                arguments = None
                parts.append(wire.Part("content" if kind == "content" else "reasoning", draw(st.sampled_from("ab "))))
        steps.append(parts)
    finish = draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
    return [*(step(parts, i) for i, parts in enumerate(steps)), step([], len(steps), finish)]


def streamed(messages: list[wire.Answer]) -> list[dict[str, Any]]:
    stream = FORMAT.stream(lambda: USAGE)
    text = b"".join([stream.take(0, message) for message in messages]) + stream.end()
    assembled(events_of(text.decode()))
    return events_of(text.decode())


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(answers())
def test_a_stream_says_what_the_whole_says(messages: list[wire.Answer]) -> None:
    choice = Choice()
    for message in messages:
        choice.add(message)
    whole = json.loads(FORMAT.whole([choice], USAGE))
    assert without_ids(streamed(messages)[-1]["response"]) == without_ids(whole)
    # Every part is in its place, and every token in one section.
    parts = [part for message in messages for part in message.parts or ()]
    for kind, found in (("content", choice.text), ("reasoning", choice.reasoning)):
        assert found == "".join(part.text for part in parts if part.kind == kind)
    ended = [part.index for part in parts if part.kind == "call_end"]
    assert [call.arguments for call in choice.calls] == [
        "".join(part.text for part in parts if (part.kind, part.index) == ("arguments", index)) for index in ended
    ]
    num_begun = sum(part.kind == "tool_call" for part in parts)
    assert choice.has_broken_off == (num_begun > len(ended))
    assert (whole["status"] == "completed") == (choice.finish == "stop" and not choice.has_broken_off)
    if choice.sections:
        thought = [entry for section in choice.sections if section.kind == "reasoning" for entry in section.tokens]
        assert tally(messages).num_reasoning_tokens == len(thought)
        assert sorted(entry.chosen.token for section in choice.sections for entry in section.tokens) == list(
            range(len(messages))
        )


def test_a_call_that_broke_off_is_incomplete_and_has_no_done_event() -> None:
    messages = [
        step([wire.Part("tool_call", "f", 0), wire.Part("arguments", '{"a": 1', 0)], 0),
        step([wire.Part("content", "oh"), wire.Part("tool_call", "g", 1), wire.Part("arguments", "{}", 1)], 1),
        step([wire.Part("call_end", "", 1)], 2),
        step([], 3, FinishReason.STOP),
    ]
    events = streamed(messages)
    broken, message, complete = events[-1]["response"]["output"]
    assert (broken["arguments"], broken["status"]) == ('{"a": 1', "incomplete")
    assert (message["status"], complete["status"], complete["arguments"]) == ("completed", "completed", "{}")
    done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert [event["output_index"] for event in done] == [2]
    assert (events[-1]["type"], events[-1]["response"]["incomplete_details"]) == ("response.incomplete", {})


def tally(messages: Sequence[wire.Answer]) -> Tally:
    found = Tally()
    for message in messages:
        found.add(message)
    return found


def test_a_step_with_several_parts_counts_as_content() -> None:
    messages = [
        step([], 0),  # a mark
        step([wire.Part("reasoning", "a")], 1),
        step([wire.Part("reasoning", "b"), wire.Part("content", "c"), wire.Part("tool_call", "f", 0)], 2),
        step([wire.Part("arguments", "{}", 0)], 3),
        step([], 4, FinishReason.STOP),
    ]
    choice = Choice()
    for message in messages:
        choice.add(message)
    assert [len(section.tokens) for section in choice.sections] == [2, 1, 2]
    assert tally(messages).num_reasoning_tokens == 2
    assert [entry.chosen.token for entry in choice.sections[1].tokens] == [2]
