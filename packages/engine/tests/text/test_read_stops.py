"""Stop strings in the content of an answer that is kept as the model writes it, however the text is divided."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewood.engine.text import ReadStops, ResponseParser, ResponseTemplate, stops_of
from scale import scaled

HERMES = ResponseTemplate.named("hermes")
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "END\\n"}}\n</tool_call>'
BROKEN = "<tool_call>\nno END here</tool_call>"


def read_stops(stop: tuple[str, ...], stop_regex: tuple[str, ...] = ()) -> ReadStops:
    return ReadStops(ResponseParser(HERMES, tools=TOOLS, stops=stops_of(stop, stop_regex)))


def cut(text: str, *stop: str, stop_regex: tuple[str, ...] = (), pieces: int | None = None) -> tuple[str, str | None]:
    stops, size = read_stops(stop, stop_regex), pieces or len(text) or 1
    shown = "".join(stops.push(text[at : at + size]) for at in range(0, len(text), size)) + stops.flush()
    return shown, stops.matched


CASES: dict[str, tuple[str, tuple[str, ...], str, str | None]] = {
    "in content": ("one END two", ("END",), "one ", "END"),
    "in reasoning": ("<think>END\n</think>one END two", ("END",), "<think>END\n</think>one ", "END"),
    "in reasoning alone": ("<think>END</think>one", ("END",), "<think>END</think>one", None),
    "in a call": (f"one\n{CALL}\n", ("END",), f"one\n{CALL}\n", None),
    "behind a call": (f"{CALL}\nEND two", ("END",), f"{CALL}\n", "END"),
    "a line break around a call": (f"one\n{CALL}\n{CALL}", ("\n",), f"one\n{CALL}\n{CALL}", None),
    "the first of two line breaks": ("one\n\ntwo", ("\n",), "one", "\n"),
    "line breaks before content": ("\n\none\ntwo", ("\n",), "\n\none", "\n"),
    "line breaks at the end": ("one\n\n", ("\n",), "one\n\n", None),
    "in a call that is none": (f"one {BROKEN}", ("END",), "one <tool_call>\nno ", "END"),
    "the mark of a call": (CALL, ("<tool_call>",), CALL, None),
    "the mark of a call that is none": (BROKEN, ("<tool_call>",), "", "<tool_call>"),
    "the mark of reasoning": ("<think>x</think>y", ("<think>", "</think>"), "<think>x</think>y", None),
    "only a part": ("one EN", ("END",), "one EN", None),
    "in content between sections": (f"a<think>b</think>c{CALL}dENDe", ("END",), f"a<think>b</think>c{CALL}d", "END"),
    "of two, the one that ends first": ("xaby", ("b", "aby"), "xa", "b"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_text_ends_before_a_match_in_its_content(case: str) -> None:
    text, stop, expected, matched = CASES[case]
    for pieces in (1, 2, 3, 7, None):
        assert cut(text, *stop, pieces=pieces) == (expected, matched)


def test_expressions_are_searched_in_content_too() -> None:
    text = "<think>12</think>a 34 b"
    assert cut(text, stop_regex=("[0-9]{2}",)) == ("<think>12</think>a ", "34")
    assert cut(text, "b", stop_regex=("[0-9]{3}",)) == ("<think>12</think>a 34 ", "b")


def test_what_is_shown_is_never_taken_back_and_little_is_held_back() -> None:
    stops = read_stops(("END",))
    shown = [stops.push(text) for text in ("<think>", "EN", "D", "</think>", "one ", "E", "x", " E", "ND")]
    assert shown == ["<think>", "EN", "D", "</think>", "one", " ", "Ex", " ", ""]
    assert (stops.matched, stops.push("more"), stops.flush()) == ("END", "", "")


PIECES = ("one", " ", "\n", "END", "EN", "<think>", "</think>", CALL, BROKEN, "<tool_call>", "x", "<")


@settings(max_examples=scaled(50), deadline=None)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=10),
    stop=st.sampled_from((("END",), ("\n",), ("EN", "x"), (" ",), ("<tool_call>",))),
    size=st.integers(1, 9),
)
def test_content_is_that_of_an_answer_that_is_read(pieces: list[str], stop: tuple[str, ...], size: int) -> None:
    text = "".join(pieces)
    shown, matched = cut(text, *stop, pieces=size)
    assert text.startswith(shown)
    assert (shown, matched) == cut(text, *stop, pieces=1)
    parser = ResponseParser(HERMES, tools=TOOLS, stops=stops_of(stop, ()))
    parts = [*parser.feed(text), *parser.finish(is_cut=True)]
    assert parser.stopped_by == matched
    if matched is None:
        assert shown == text
        return
    assert text[len(shown) :].startswith(matched)
    content = "".join(part.text for part in parts if part.kind == "content")
    again = ResponseParser(HERMES, tools=TOOLS)
    found = [*again.feed(shown), *again.finish()]
    assert "".join(part.text for part in found if part.kind == "content") == content.rstrip()
