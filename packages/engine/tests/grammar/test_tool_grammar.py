# pyright: basic
# ruff: noqa: E501, RUF001 (marks of models)
# The bindings of `tokenizers` carry no usable annotations.
"""Grammars of calls: what they allow is parsed back to calls whose arguments obey the schemas of the tools."""

from __future__ import annotations

import re

import jsonschema
import pytest

from grammars.drawn_calls import calls_of, say
from grammars.libraries import llguidance_for
from grammars.vocabularies import Vocabulary, embedded, trained
from grammars.walks import allowed, new_row
from pagewood.engine.grammar import Backend, Matcher
from pagewood.engine.text import Part, ResponseParser, ResponseTemplate, reasoning_ends, tool_grammar
from responses.formats import FORMATS

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
        "is_exact": {"type": "boolean"},
        "limit": {"type": "number", "minimum": -5, "maximum": 5},
        "where": {"$ref": "#/$defs/place"},
        "tags": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}, "maxItems": 3},
        "note": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 8}, {"type": "null"}]},
    },
    "required": ["city", "days", "where"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "integer", "maximum": 99, "minimum": 0}, "y": {"type": "boolean"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
NOW = {"type": "object", "properties": {}}
ADD = {
    "type": "object",
    "properties": {
        "a": {"enum": [1, 22]},
        "b": {"type": "integer", "maximum": 999, "minimum": -9},
        "c": {"type": "null"},
    },
    "required": ["b"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "now": NOW, "add-2": ADD}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
NAMES = ResponseTemplate.names()


@pytest.fixture(scope="module", params=["embedded", pytest.param("trained", marks=pytest.mark.slow)])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return embedded() if request.param == "embedded" else trained(32_768, 5)


@pytest.fixture(scope="module")
def backend(vocabulary: Vocabulary) -> Backend:
    return llguidance_for(vocabulary)


def matcher_of(name: str, backend: Backend, vocabulary: Vocabulary, choice: str, **options) -> Matcher:
    grammar = tool_grammar(ResponseTemplate.named(name), TOOLS, choice, **options)
    assert grammar is not None
    return backend.compile(grammar).matcher(frozenset(vocabulary.eos_token_ids))


def parsed(name: str, text: str) -> list[Part]:
    parser = ResponseParser(ResponseTemplate.named(name), tools=TOOLS)
    return [*parser.feed(text), *parser.finish()]


@pytest.mark.parametrize("name", NAMES)
def test_walks_are_calls_that_obey_their_schemas(backend: Backend, vocabulary: Vocabulary, name: str) -> None:
    matcher = matcher_of(name, backend, vocabulary, "required")
    seen: set[str] = set()
    for seed in range(8):
        text = say(name, matcher.copy(), vocabulary, seed)
        parts = parsed(name, text)
        calls = calls_of(parts)
        assert calls, text
        assert {part.kind for part in parts} == {"tool_call", "arguments", "call_end"}, text
        for function, arguments in calls:
            jsonschema.validate(arguments, SCHEMAS[function])
            seen.add(function)
    assert len(seen) > 1


UNBOUND = {
    "granite_3": ['<tool_call>[{"name": "now", "arguments": {"x": 1}}]'],
    "granite_3_3": ['<tool_call>[{"name": "now", "arguments": {"x": 1}}]'],
    "qwen3_coder": ["<function=now>\n<parameter=x>\n1\n</parameter>\n</function>"],
    "minimax_m2": ['<invoke name="now">\n<parameter name="x">1</parameter>\n</invoke>'],
}
"""Calls without the mark with which the grammar begins one: the parser reads them, so free text may not have them."""


def accepts(matcher: Matcher, vocabulary: Vocabulary, text: str) -> bool:
    tokens = [*vocabulary.tokenizer.encode(text, add_special_tokens=False).ids, vocabulary.eos_token_ids[0]]
    return matcher.copy().accepts(tokens) == len(tokens)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_choice_allows(backend: Backend, vocabulary: Vocabulary, name: str) -> None:
    form = FORMATS[name]
    text, twice = (
        form.call,
        form.two_calls.replace("{}", form.call) if form.two_calls.count("{}") == 2 else form.two_calls,
    )
    required = matcher_of(name, backend, vocabulary, "required")
    single = matcher_of(name, backend, vocabulary, "required", parallel=False)
    named = matcher_of(name, backend, vocabulary, "add-2")
    other = matcher_of(name, backend, vocabulary, "now")
    assert [accepts(one, vocabulary, text) for one in (required, single, named, other)] == [True, True, True, False]
    assert accepts(required, vocabulary, twice or text * 2) == bool(twice)
    assert not any(accepts(one, vocabulary, twice or text * 2) for one in (single, named, other))
    for wrong in ("", "Hello", text.replace("3", '"x"'), text.replace("add-2", "sub"), f"{text}!"):
        assert not accepts(required, vocabulary, wrong), wrong
    assert calls_of(parsed(name, text)) == [("add-2", {"b": 3})]
    if twice:
        assert [function for function, _ in calls_of(parsed(name, twice))] in (["add-2", "now"], ["add-2", "add-2"])


@pytest.mark.parametrize("name", NAMES)
def test_free_text_with_typed_calls(backend: Backend, vocabulary: Vocabulary, name: str) -> None:
    template = ResponseTemplate.named(name)
    grammar = tool_grammar(template, TOOLS, "auto")
    if FORMATS[name].is_bare:
        assert grammar is None  # a call has no mark of its own
        return
    assert grammar is not None
    matcher = backend.compile(grammar).matcher(frozenset(vocabulary.eos_token_ids))
    text = FORMATS[name].call
    for allowed_text in ("", "Hello <b>", f"I add.\n{text}", text, f"{text} Done."):
        assert accepts(matcher, vocabulary, allowed_text), allowed_text
    for wrong in (
        *UNBOUND.get(name, ()),
        text.replace("3", '"x"'),
        f"I add.\n{text.replace('add-2', 'sub')}",
        text[: len(text) // 2],
    ):
        assert not accepts(matcher, vocabulary, wrong), wrong


BOUNDS: dict[str, tuple[dict, list[str], list[str]]] = {
    "pattern": ({"pattern": "^a/[0-9]+$|^none$|<x>"}, ["a/12", "none", "is <x>."], ["a/", "a/1b", "nones", "x"]),
    "part": ({"pattern": r"b[|)]\d"}, ["b|2", "ab)22"], ["b2", "ab|"]),
    "length": ({"minLength": 2, "maxLength": 4}, ["ab", "ab d", "é<é>"], ["a", "abcde", ""]),
    "both": ({"minLength": 3, "pattern": "^[ab ]*$"}, ["a b", "aaaa"], ["ab", "abc"]),
}
"""Schemas of strings, and strings that they allow and do not."""
AS_TEXT = {name: form.as_text for name, form in FORMATS.items() if form.as_text}


@pytest.mark.parametrize("name", AS_TEXT)
@pytest.mark.parametrize("bound", BOUNDS)
def test_strings_that_are_written_as_they_are_have_bounds(name: str, bound: str) -> None:
    vocabulary = embedded()
    keywords, allowed_texts, others = BOUNDS[bound]
    schema = {"type": "object", "properties": {"text": {"type": "string", **keywords}}, "required": ["text"]}
    tools = [{"type": "function", "function": {"name": "say", "parameters": schema}}]
    template = ResponseTemplate.named(name)
    grammar = tool_grammar(template, tools, "required", parallel=False)
    assert grammar is not None
    matcher = llguidance_for(vocabulary).compile(grammar).matcher(frozenset(vocabulary.eos_token_ids))
    for text in (*allowed_texts, *others):
        jsonschema_says = jsonschema.Draft202012Validator(schema).is_valid({"text": text})
        assert jsonschema_says == (text in allowed_texts), text
        said = AS_TEXT[name].format(name="say", key="text", value=text)
        assert accepts(matcher, vocabulary, said) == jsonschema_says, said
        parser = ResponseParser(template, tools=tools)
        assert calls_of([*parser.feed(said), *parser.finish()]) == [("say", {"text": text})]
    end = AS_TEXT[name].partition("{value}")[2].strip()[:12]
    if not end.startswith('"'):
        assert not accepts(matcher, vocabulary, AS_TEXT[name].format(name="say", key="text", value=f"aa{end}")), (
            "the mark is no text"
        )


def test_special_tokens_are_tokens(vocabulary: Vocabulary) -> None:
    tokens = {"<|tool_call>": 7, "<tool_call|>": 8}
    template = ResponseTemplate.named("gemma_4")
    grammar = tool_grammar(template, TOOLS, "now", special_tokens=tokens)
    assert grammar is not None
    assert '<[7]> "call:" "now"' in grammar.text
    assert "<[8]>" in grammar.text


SPECIAL = {name: form.special for name, form in FORMATS.items() if form.special}
_MARKS = r"</?[^<>\s=]*[|:｜][^<>\s=]*>|</?think>|</s>|\[/?[A-Z_]+\]"


@pytest.mark.parametrize("name", SPECIAL)
def test_free_text_with_marks_that_are_special_tokens(name: str) -> None:
    reasoning, end = SPECIAL[name]
    template, call = ResponseTemplate.named(name), FORMATS[name].call
    tokenizer = embedded().tokenizer
    answer = "<|START_RESPONSE|>Hi.<|END_RESPONSE|>" if name == "cohere_command" else "Hi."
    marks = sorted({*re.findall(_MARKS, reasoning + call + answer + end), "<|unused|>"})
    tokenizer.add_special_tokens(marks)
    ids = {mark: int(tokenizer.token_to_id(mark) or 0) for mark in marks}
    vocabulary = Vocabulary(tokenizer.to_str(), tokenizer.get_vocab_size(), (ids[end],))
    grammar = tool_grammar(template, TOOLS, "auto", special_tokens=ids)
    assert grammar is not None
    matcher = llguidance_for(vocabulary).compile(grammar).matcher(frozenset(vocabulary.eos_token_ids))
    says = {
        "harmony": ["", f"{reasoning}<|channel|>final<|message|>Hi.", f"{reasoning}{call}", call,
                    f"<|channel|>commentary<|message|>I add.<|end|><|start|>assistant{call}"],
    }.get(name, ["", "Hi <b>", call, f"I add.\n{call}", f"{reasoning}{answer}", f"{reasoning}\n\n{call}", f"{call}Done."])  # fmt: skip
    for text in says:
        assert accepts(matcher, vocabulary, text), text
        parser = ResponseParser(template, tools=TOOLS)
        parts = [*parser.feed(text), *parser.finish()]
        assert [name for name, _ in calls_of(parts)] == ["add-2"] * (call in text)
        assert ("reasoning" in {part.kind for part in parts}) == (reasoning in text)
    wrongs = [call.replace("3", '"x"'), call.replace("add-2", "sub"), call[: len(call) // 2], "<|unused|>", f"{reasoning}<|unused|>"]  # fmt: skip
    wrongs += UNBOUND.get(name, ())
    wrongs += ['to=functions.now<|channel|>commentary json<|message|>{"x"}'] * (name == "harmony")
    for wrong in wrongs:
        assert not accepts(matcher, vocabulary, wrong), wrong
        assert not accepts(matcher, vocabulary, f"{reasoning}{wrong}"), wrong


def test_special_tokens_are_drawn() -> None:
    vocabulary = embedded()
    special = next(token for token in range(10) if token not in vocabulary.eos_token_ids)
    mark = str(vocabulary.tokenizer.id_to_token(special))
    field = {"open": mark, "content": "json", "transform": {"function": "{content}"}}
    template = ResponseTemplate.from_json({"start_anchor": "A", "fields": {"tool_calls": field}})
    grammar = tool_grammar(template, TOOLS, "now", special_tokens={mark: special})
    assert grammar is not None
    matcher = llguidance_for(vocabulary).compile(grammar).matcher(frozenset(vocabulary.eos_token_ids))
    row = new_row(vocabulary)
    matcher.fill(row)
    assert allowed(row) == [special]
    assert accepts(matcher, vocabulary, f'{mark}{{"name": "now", "arguments": {{}}}}')


DERIVED = {
    "json": (
        {"open": "<call>", "close": "</call>", "content": "json", "transform": {"function": "{content}"}},
        '<call>{"name": "add-2", "arguments": {"b": 3}}</call>',
    ),
    "json by name": (
        {
            "open_pattern": r"<call>\s*(?P<name>[\w-]+)\s*:",
            "close_pattern": r"\s*</call>",
            "content": "json",
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
        '<call>add-2:{"b": 3}</call>',
    ),
    "list": (
        {
            "open": "<calls>",
            "close": "</calls>",
            "content": "json",
            "transform_each": True,
            "transform": {"function": {"name": "{tool}", "arguments": "{input}"}},
        },
        '<calls>[{"tool": "add-2", "input": {"b": 3}}]</calls>',
    ),
    "list by key": (
        {
            "open": "<calls>",
            "close": "</calls>",
            "content": "json",
            "content_args": {"name_as_key": True},
            "transform_each": True,
        },
        '<calls>[{"add-2": {"b": 3}}]</calls>',
    ),
    "xml": (
        {
            "open_pattern": r"<call (?P<name>[^>]+)>",
            "close": "</call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<(?P<key>\w+)>\s*(?P<value>.*?)\s*</arg>"},
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
        "<call add-2><b>3</arg></call>",
    ),
}


@pytest.mark.parametrize("name", DERIVED)
def test_templates_that_do_not_say_how_calls_are_written(backend: Backend, vocabulary: Vocabulary, name: str) -> None:
    field, text = DERIVED[name]
    template = ResponseTemplate.from_json({"start_anchor": "A", "fields": {"tool_calls": field, "content": {}}})
    grammar = tool_grammar(template, TOOLS, "add-2")
    assert grammar is not None
    matcher = backend.compile(grammar).matcher(frozenset(vocabulary.eos_token_ids))
    assert accepts(matcher, vocabulary, text)
    assert not accepts(matcher, vocabulary, text.replace("3", "x"))
    parser = ResponseParser(template, tools=TOOLS)
    assert calls_of([*parser.feed(text), *parser.finish()]) == [("add-2", {"b": 3})]


def test_no_grammar() -> None:
    no_calls = ResponseTemplate.from_json({"start_anchor": "A", "fields": {"content": {}}})
    assert tool_grammar(no_calls, TOOLS, "required") is None
    bare = {"bare": True, "content": "json", "transform": {"function": "{content}"}}
    of_bare = ResponseTemplate.from_json({"start_anchor": "A", "fields": {"tool_calls": bare, "content": {}}})
    assert tool_grammar(of_bare, TOOLS, "required") is None


def test_what_is_refused() -> None:
    template = ResponseTemplate.named("hermes")
    with pytest.raises(ValueError, match="tools must hold at least one tool"):
        tool_grammar(template, [], "required")
    with pytest.raises(ValueError, match="choice must be auto, required or the name of a tool, got 'sub'"):
        tool_grammar(template, TOOLS, "sub")
    with pytest.raises(ValueError, match=r"tools\[0\] must have a function with a name"):
        tool_grammar(template, [{"type": "function", "function": {}}], "required")


def test_ends_of_reasoning() -> None:
    ends = {name: reasoning_ends(ResponseTemplate.named(name)) for name in NAMES}
    assert ends == {name: form.reasoning_ends for name, form in FORMATS.items()}
