# pyright: basic
# The bindings of `tokenizers` carry no usable annotations.
"""Structural tags: which texts are complete, which are the start of one, and what is refused.

The expected texts of triggered tags are those that xgrammar 0.2.8 accepts (`test_xgrammar.py` compares both).
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from grammars.vocabularies import Vocabulary
from grammars.walks import walk
from pagewood.engine.api import Grammar
from pagewood.engine.grammar import Backend

INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
CALL = {"type": "tag", "begin": "<f=a>", "content": INTEGER, "end": "</f>"}
OTHER = {"type": "tag", "begin": "<f=b>", "content": {"type": "regex", "pattern": "[x/]{2}"}, "end": "</f>"}
ANY = {"type": "any_text"}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def triggered(**more: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<f"], "tags": [CALL, OTHER], **more}


CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "const": (const('a "b"\n'), ['a "b"\n'], ["a", ""]),
    "schema": (INTEGER, ["5", "-12"], ["x", "", "5 "]),
    "any schema": ({"type": "json_schema", "json_schema": True}, ["5", '{"a": [1]}', "null"], ["x", ""]),
    "regex": ({"type": "regex", "pattern": "[a-c]+/\n"}, ["abc/\n"], ["/\n", "d"]),
    "grammar": ({"type": "grammar", "grammar": 'start: "x" A\nA: /[0-9]/'}, ["x7"], ["x", "7"]),
    "any": (ANY, ["", "anything\n<f>"], []),
    "any without": ({"type": "any_text", "excludes": ["no.", "/x"]}, ["", "no", "nox/"], ["a no. b", "no.", "/x"]),
    "sequence": ({"type": "sequence", "elements": [const("a"), INTEGER, const("b")]}, ["a5b"], ["a5", "ab", "5b"]),
    "sequence with text": ({"type": "sequence", "elements": [const("a"), ANY]}, ["a", "a5b"], ["b", ""]),
    "or": ({"type": "or", "elements": [const("ab"), INTEGER, const("ac")]}, ["ab", "ac", "7"], ["a", "abac", ""]),
    "optional": (
        {"type": "sequence", "elements": [{"type": "optional", "content": INTEGER}, const(".")]},
        [".", "1."],
        [""],
    ),
    "plus": ({"type": "plus", "content": const("ab")}, ["ab", "abab"], ["", "aba"]),
    "star": ({"type": "star", "content": CALL}, ["", "<f=a>1</f>", "<f=a>1</f><f=a>2</f>"], ["<f=a>1", "x"]),
    "tag": (CALL, ["<f=a>5</f>"], ["<f=a>5", "5", "<f=a>x</f>", "<f=a>5</f> "]),
    "tag with text": (
        {"type": "tag", "begin": "<think>", "content": ANY, "end": "</think>"},
        ["<think></think>", "<think>a < b </ think></think>"],
        ["<think>", "<think></think>x", "<think></think></think>"],
    ),
    "tag with ends": (
        {"type": "tag", "begin": "(", "content": ANY, "end": [")", "]"]},
        ["()", "(a]", "(a[)"],
        ["(", "(a)b]"],
    ),
    "tag without an end": ({"type": "tag", "begin": "=", "content": INTEGER, "end": ""}, ["=1"], ["=", "1"]),
    "thinking, then an answer": (
        {
            "type": "sequence",
            "elements": [{"type": "tag", "begin": "<think>", "content": ANY, "end": "</think>"}, INTEGER],
        },
        ["<think>so</think>4"],
        ["<think>so</think>", "<think>so</think>x", "4"],
    ),
    "triggered": (
        triggered(),
        [
            "",
            "abc",
            "x<f=a>5</f>",
            "<f=a>5</f>",
            "<f=a>5</f>tail",
            "<f=a>5</f><f=b>x/</f>",
            "<f=a>5</f>x<f=a>6</f>y",
            "<",
        ],
        ["<fx", "<f", "<f=a>", "<f=c>", "<f=a>5</f><f=b>5</f>", "a<f=a>5"],
    ),
    "triggered at least once": (
        triggered(at_least_one=True),
        ["<f=a>5</f>", "<f=a>5</f>tail", "<f=a>5</f><f=a>6</f>", "<f=b>xx</f>x<f=a>6</f>y"],
        ["", "abc", "x<f=a>5</f>", "<fx", "<"],
    ),
    "triggered once": (
        triggered(stop_after_first=True),
        ["", "abc", "x<f=a>5</f>", "<f=a>5</f>", "<"],
        ["<f=a>5</f>tail", "<f=a>5</f><f=a>6</f>", "<fx"],
    ),
    "triggered exactly once": (
        triggered(at_least_one=True, stop_after_first=True),
        ["<f=a>5</f>"],
        ["", "abc", "x<f=a>5</f>", "<f=a>5</f>tail", "<f=a>5</f><f=a>6</f>"],
    ),
    "triggered without": (triggered(excludes=["zz"]), ["az<f=a>5</f>z"], ["azz", "zz<f=a>5</f>", "<f=a>5</f>zz"]),
    "triggered in a tag": (
        {"type": "tag", "begin": "<c>", "content": triggered(), "end": "</c>"},
        ["<c></c>", "<c>text<f=a>5</f>more</c>", "<c><f=a>5</f></c>"],
        ["<c>", "<c>text<f=a>5</f>more", "<c>a</c>b", "<c><fx</c>"],
    ),
    "two triggers": (
        {
            "type": "triggered_tags",
            "triggers": ["<f=", "<g"],
            "tags": [CALL, {"type": "tag", "begin": "<g>", "content": const("!"), "end": ""}],
        },
        ["<f<g>!<f=a>1</f>", "<g>!<g>!"],
        ["<g", "<g>", "<f="],
    ),
    "separated": (
        {"type": "tags_with_separator", "tags": [CALL, OTHER], "separator": ", "},
        ["", "<f=a>5</f>", "<f=a>5</f>, <f=b>//</f>"],
        ["<f=a>5</f>, ", "<f=a>5</f><f=a>5</f>", ", "],
    ),
    "separated at least once": (
        {"type": "tags_with_separator", "tags": [CALL], "separator": "", "at_least_one": True},
        ["<f=a>5</f>", "<f=a>5</f><f=a>6</f>"],
        ["", "<f=a>5"],
    ),
    "separated once": (
        {"type": "tags_with_separator", "tags": [CALL], "separator": ";", "stop_after_first": True},
        ["", "<f=a>5</f>"],
        ["<f=a>5</f>;", "<f=a>5</f>;<f=a>6</f>"],
    ),
}
"""A format, texts that are complete, and texts that are not."""

REFUSED: dict[str, tuple[Any, str]] = {
    "not an object": ([], "structural tag must be a JSON object"),
    "no type": ({"format": ANY}, "must have the type structural_tag, got null"),
    "nothing": ({"type": "structural_tag"}, "must have a list as structures"),
    "unknown format": ({"type": "structural_tag", "format": {"type": "dispatch", "rules": []}}, 'got "dispatch"'),
    "token": (
        {"type": "structural_tag", "format": {"type": "sequence", "elements": [{"type": "token"}]}},
        'got "token"',
    ),
    "token as begin": (
        {"type": "structural_tag", "format": {**CALL, "begin": {"type": "token", "token": 5}}},
        "must have a string as begin",
    ),
    "style": (
        {"type": "structural_tag", "format": {**INTEGER, "style": "qwen_xml"}},
        "only fields that are supported, got style",
    ),
    "max_tokens": ({"type": "structural_tag", "format": {**ANY, "max_tokens": 5}}, "got max_tokens"),
    "text in the middle": (
        {"type": "structural_tag", "format": {"type": "sequence", "elements": [ANY, INTEGER]}},
        "free text only as its last part",
    ),
    "text that repeats": ({"type": "structural_tag", "format": {"type": "star", "content": ANY}}, "free text only"),
    "text without an end": (
        {"type": "structural_tag", "format": {**CALL, "content": ANY, "end": ""}},
        "free text only",
    ),
    "no trigger": ({"type": "structural_tag", "format": triggered(triggers=[])}, "triggers that are not empty"),
    "empty trigger": ({"type": "structural_tag", "format": triggered(triggers=[""])}, "triggers that are not empty"),
    "two triggers for a tag": ({"type": "structural_tag", "format": triggered(triggers=["<f", "<"])}, "one trigger"),
    "no trigger for a tag": ({"type": "structural_tag", "format": triggered(triggers=["<g"])}, "one trigger"),
    "no tags": ({"type": "structural_tag", "format": triggered(tags=[])}, "must have a list as tags"),
    "EBNF": ({"type": "structural_tag", "format": {"type": "grammar", "grammar": 'root ::= "a"'}}, "got one in EBNF"),
    "wrong schema": (
        {"type": "structural_tag", "format": {**INTEGER, "json_schema": {"not": {}}}},
        "Unimplemented keys",
    ),
    "schema that is none": ({"type": "structural_tag", "format": {**INTEGER, "json_schema": 5}}, "must have a schema"),
    "empty exclude": ({"type": "structural_tag", "format": {**ANY, "excludes": [""]}}, "strings that are not empty"),
    "older form without triggers": (
        {"type": "structural_tag", "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}]},
        "a list of strings as triggers, got null",
    ),
    "older form with more": (
        {"type": "structural_tag", "structures": [], "triggers": [], "at_least_one": True},
        "got at_least_one",
    ),
}


def ids(vocabulary: Vocabulary, text: str) -> list[int]:
    return vocabulary.tokenizer.encode(text, add_special_tokens=False).ids


def compiled(backend: Backend, vocabulary: Vocabulary, value: Any) -> Any:
    grammar = Grammar(kind="structural_tag", text=json.dumps(value))
    return backend.compile(grammar).matcher(frozenset(vocabulary.eos_token_ids))


@pytest.mark.parametrize("name", CASES)
def test_texts_of_a_format(backend: Backend, vocabulary: Vocabulary, name: str) -> None:
    value, complete, incomplete = CASES[name]
    matcher = compiled(backend, vocabulary, {"type": "structural_tag", "format": value})
    end = vocabulary.eos_token_ids[0]
    for text in complete:
        tokens = [*ids(vocabulary, text), end]
        assert matcher.accepts(tokens) == len(tokens), text
    for text in incomplete:
        tokens = [*ids(vocabulary, text), end]
        assert matcher.accepts(tokens) < len(tokens), text


@pytest.mark.parametrize("name", CASES)
def test_walks_through_a_format(backend: Backend, vocabulary: Vocabulary, name: str) -> None:
    value = CASES[name][0]
    matcher = compiled(backend, vocabulary, {"type": "structural_tag", "format": value})
    for seed in range(5):
        said = walk(matcher.copy(), vocabulary, seed, max_tokens=60, free_tokens=20)
        assert matcher.accepts(said.tokens) == len(said.tokens)


def test_the_older_form(backend: Backend, vocabulary: Vocabulary) -> None:
    value = {
        "type": "structural_tag",
        "structures": [
            {
                "begin": "<function=add>",
                "schema": {"type": "array", "items": {"type": "integer"}},
                "end": "</function>",
            },
            {"begin": "<function=now>", "schema": {"type": "object"}, "end": "</function>"},
        ],
        "triggers": ["<function="],
    }
    matcher = compiled(backend, vocabulary, value)
    end = vocabulary.eos_token_ids[0]
    for text in (
        "",
        "Just text.",
        "I add: <function=add>[1, 2]</function> and <function=now>{}</function>.",
        "<function",
    ):
        tokens = [*ids(vocabulary, text), end]
        assert matcher.accepts(tokens) == len(tokens), text
    for text in ("<function=add>{}</function>", "<function=sub>[]</function>", "<function=add>[1]"):
        tokens = [*ids(vocabulary, text), end]
        assert matcher.accepts(tokens) < len(tokens), text


def test_excluded_strings_do_not_come(backend: Backend, vocabulary: Vocabulary) -> None:
    excludes = ["e", ".*", "a|b", "\\d", "[x]", "^$", "-", "&", "#", "~", "/", " ", "é", "\n"]
    matcher = compiled(backend, vocabulary, {"type": "structural_tag", "format": {**ANY, "excludes": excludes}})
    found = re.compile("|".join(map(re.escape, excludes)))
    for seed in range(10):
        assert not found.search(walk(matcher.copy(), vocabulary, seed, max_tokens=60).text)
    for text in excludes:
        assert matcher.accepts(ids(vocabulary, f"x{text}")) < len(ids(vocabulary, f"x{text}"))
    assert matcher.accepts(ids(vocabulary, "ab.*"[:3])) == len(ids(vocabulary, "ab."))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(backend: Backend, vocabulary: Vocabulary, name: str) -> None:
    value, message = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        compiled(backend, vocabulary, value)
