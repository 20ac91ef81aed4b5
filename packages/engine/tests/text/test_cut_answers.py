"""Answers that are cut, in every format: what is shown was written as text, and whole calls are known as such."""

# pyright: basic
from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewood.engine.text import ResponseParser, ResponseTemplate, StopExpressions, StopStrings
from responses.formats import FORMATS
from responses.writers import WRITERS, Message
from scale import scaled

PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in (("get_weather", PROPERTIES), ("now", {}))
]
NAMES = ResponseTemplate.names()
FIRST = ("get_weather", {"city": "Rome < Oslo", "days": 31, "where": {"x": [1, {"y": None}]}})
SECOND = ("get_weather", {"city": "a\nb", "days": -2})
MESSAGES = {
    "content": Message("Hello, world.\n\nIt is < 5, or <b>6</b> {not JSON} [1]."),
    "reasoning": Message("Hello.", "First,\n  then <b>."),
    "calls": Message("", "", [FIRST, ("now", {}), SECOND]),
    "all": Message("I look.", "Two < three.", [FIRST, SECOND]),
}


def can_say(name: str, key: str) -> bool:
    message, form = MESSAGES[key], FORMATS[name]
    is_both = bool(message.content and message.calls)
    return not ((message.reasoning and not form.reasoning_ends) or (is_both and form.is_either))


CASES = [(name, key) for name in NAMES for key in MESSAGES if can_say(name, key)]


def divided(text: str, draws: random.Random) -> list[str]:
    pieces = []
    while text:
        size = draws.randint(1, 12)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def said(
    name: str, pieces: list[str], *, is_cut: bool, **options: Any
) -> tuple[str, str, list[tuple[str, str, bool]], bool]:
    """Return content, reasoning, calls (name, arguments, whether complete), and whether the answer is over."""
    parser = ResponseParser(ResponseTemplate.named(name), tools=TOOLS, **options)
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish(is_cut=is_cut)
    calls: list[list[Any]] = []
    for part in parts:
        if part.kind == "tool_call":
            calls.append([part.text, "", False])
        elif part.kind == "arguments":
            calls[part.index][1] += part.text
        elif part.kind == "call_end":
            calls[part.index][2] = True
    content, reasoning = (
        "".join(part.text for part in parts if part.kind == kind) for kind in ("content", "reasoning")
    )
    return content, reasoning, [tuple(call) for call in calls], parser.is_over


def num_common(one: str, other: str) -> int:
    """Return how many characters two texts have in common at their beginning."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def bounds_of_calls(name: str, message: Message) -> list[tuple[int, int]]:
    """Return for each call between which lengths of the text it must become complete."""
    whole, calls, found = WRITERS[name](message), message.calls, []
    for index, (function, arguments) in enumerate(calls):
        longer = [*calls[:index], (function, arguments | {"zz": "q"}), *calls[index + 1 :]]
        fewer = calls[: index + 1]
        texts = [WRITERS[name](Message(message.content, message.reasoning, some)) for some in (longer, fewer)]
        least, most = (num_common(whole, text) for text in texts)
        found.append((least, most))
    return found


def check_cut(name: str, message: Message, cut: int, draws: random.Random) -> None:
    text = WRITERS[name](message)
    _, _, whole_calls, _ = said(name, [text], is_cut=False)
    found = said(name, [text[:cut]], is_cut=True)
    assert said(name, divided(text[:cut], draws), is_cut=True) == found
    content, reasoning, calls, _ = found
    assert message.content.startswith(content)
    assert message.reasoning.startswith(reasoning)
    for index, (function, arguments, is_complete) in enumerate(calls):
        assert function == message.calls[index][0]
        assert whole_calls[index][1].startswith(arguments)
        assert index == len(calls) - 1 or is_complete
        if is_complete:
            assert json.loads(arguments) == message.calls[index][1]
    num_complete = sum(is_complete for *_, is_complete in calls)
    for index, (least, most) in enumerate(bounds_of_calls(name, message)):
        if cut < least:
            assert num_complete <= index
        if cut >= most:
            assert num_complete > index


@settings(max_examples=scaled(50), deadline=None)
@given(st.sampled_from(CASES), st.integers(0, 2000), st.randoms(use_true_random=False))
def test_random_cuts(case: tuple[str, str], cut: int, draws: random.Random) -> None:
    name, key = case
    check_cut(name, MESSAGES[key], cut % (len(WRITERS[name](MESSAGES[key])) + 1), draws)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "key"), CASES)
def test_every_cut(name: str, key: str) -> None:
    for cut in range(len(WRITERS[name](MESSAGES[key])) + 1):
        check_cut(name, MESSAGES[key], cut, random.Random(cut))


@settings(max_examples=scaled(25), deadline=None)
@given(st.sampled_from(CASES), st.integers(0, 2000), st.randoms(use_true_random=False))
def test_the_model_may_end_anywhere(case: tuple[str, str], cut: int, draws: random.Random) -> None:
    """Its own end shows what it wrote, but a call that it has not closed is not complete either."""
    name, key = case
    text = WRITERS[name](MESSAGES[key])
    cut %= len(text) + 1
    found = said(name, [text[:cut]], is_cut=False)
    assert said(name, divided(text[:cut], draws), is_cut=False) == found
    *_, calls, _ = said(name, [text[:cut]], is_cut=True)
    complete = [call for call in found[2] if call[2]]
    assert [call for call in calls if call[2]] == complete
    for _, arguments, _ in complete:
        json.loads(arguments)


@pytest.mark.parametrize("name", NAMES)
def test_without_parallel_calls_the_first_is_the_last(name: str) -> None:
    text = WRITERS[name](MESSAGES["calls"])
    for pieces in ([text], list(text), divided(text, random.Random(3))):
        _, _, ((function, arguments, is_complete),), is_over = said(name, pieces, is_cut=False, parallel=False)
        assert (function, json.loads(arguments), is_complete, is_over) == (*FIRST, True, True)


@settings(max_examples=scaled(35), deadline=None)
@given(st.sampled_from(CASES), st.data(), st.booleans(), st.randoms(use_true_random=False))
def test_stop_strings_are_searched_in_content(
    case: tuple[str, str], data: st.DataObject, is_regex: bool, draws: random.Random
) -> None:
    name, key = case
    message = MESSAGES[key]
    text = WRITERS[name](message)
    source = data.draw(st.sampled_from([one for one in (message.content, message.reasoning, text) if one]))
    start = data.draw(st.integers(0, len(source) - 1))
    stop = source[start : start + data.draw(st.integers(1, 6))]

    def search() -> Any:
        return StopExpressions([re.escape(stop)]) if is_regex else StopStrings([stop])

    whole = said(name, [text], is_cut=False)
    found = said(name, [text], is_cut=False, stops=search())
    for pieces in (list(text), divided(text, draws)):
        assert said(name, pieces, is_cut=False, stops=search()) == found
    if stop in message.content:
        assert found == (message.content.partition(stop)[0], message.reasoning, [], True)
    else:
        assert found == whole


def test_a_stop_expression_matches_at_the_end_of_content() -> None:
    text = WRITERS["hermes"](Message("I look.", "", [FIRST]))
    for pieces in ([text], list(text)):
        assert said("hermes", pieces, is_cut=False, stops=StopExpressions([r"ok\.$"])) == ("I lo", "", [], True)


def test_nothing_in_the_prompt_ends_an_answer() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    for tail in ("so STOP", call):
        options = {"prompt_tail": f"<|im_start|>assistant\n{tail} ", "stops": StopStrings(["STOP"]), "parallel": False}
        content, _, calls, is_over = said("hermes", [f"and {call}{call}"], is_cut=False, **options)
        assert (content, calls, is_over) == ("and", [("now", "{}", True)], True)


def test_a_call_that_the_prompt_has_begun_is_not_reported() -> None:
    tail = '<|im_start|>assistant\n<tool_call>{"name": "now", "arguments": {"a": 1'
    assert said("hermes", ["2}}</tool_call>so"], is_cut=False, prompt_tail=tail) == ("so", "", [], False)


def test_a_call_without_its_last_brackets_is_complete_if_its_section_is_closed() -> None:
    text = '<tool_call>{"name": "now", "arguments": {"a": 1}\n</tool_call> so'
    assert said("hermes", list(text), is_cut=False) == ("so", "", [("now", '{"a": 1}', True)], False)
    assert said("hermes", [text[: text.index("}") + 1]], is_cut=False)[2] == [("now", '{"a": 1}', False)]
