"""Streams of responses for any parts in any steps: what the events say is what the whole response says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewood.engine.api import FinishReason
from pagewood.server import wire
from pagewood.server.formats import Choice, PromptTokensDetails, Tally, Usage
from pagewood.server.responses.format import ResponsesFormat
from pagewood.server.responses.objects import Response
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
    """Draw the messages of an answer. A call gets arguments until the next one begins, also behind other text."""
    steps: list[list[wire.Part]] = []
    num_calls, arguments = 0, ""
    for kinds in draw(
        st.lists(st.lists(st.sampled_from(["content", "reasoning", "tool_call", "arguments"]), max_size=3))
    ):
        parts: list[wire.Part] = []
        for kind in kinds:
            if kind == "tool_call":
                parts.append(wire.Part("tool_call", f"f{num_calls}", num_calls))
                num_calls, arguments = num_calls + 1, ""
            elif kind == "arguments":
                if num_calls and "}" not in arguments:  # nothing comes behind a complete object
                    text = draw(st.sampled_from(["{", "{}"] if not arguments else [" ", "}"]))
                    arguments += text
                    parts.append(wire.Part("arguments", text, num_calls - 1))
            else:
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
    for index, call in enumerate(choice.calls):
        expected = "".join(part.text for part in parts if (part.kind, part.index) == ("arguments", index))
        assert call.arguments == expected
    if choice.sections:
        thought = [entry for section in choice.sections if section.kind == "reasoning" for entry in section.tokens]
        assert tally(messages).num_reasoning_tokens == len(thought)
        assert sorted(entry.chosen.token for section in choice.sections for entry in section.tokens) == list(
            range(len(messages))
        )


def test_text_between_the_arguments_of_a_call() -> None:
    """The call goes on behind the text, and ends when it is known that it gets no more."""
    messages = [
        step([wire.Part("tool_call", "f", 0), wire.Part("arguments", '{"a": 1', 0)], 0),
        step([wire.Part("content", "oh")], 1),
        step([wire.Part("arguments", "}", 0)], 2),
        step([], 3, FinishReason.STOP),
    ]
    call, message = streamed(messages)[-1]["response"]["output"]
    assert (call["arguments"], call["status"]) == ('{"a": 1}', "completed")
    assert message["content"][0]["text"] == "oh"


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
