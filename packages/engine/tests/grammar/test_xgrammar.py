# pyright: basic
# jsonschema and the bindings of `tokenizers` are not typed.
"""xgrammar behind the same Protocol, and what it says about structural tags beside llguidance; skipped without it."""

from __future__ import annotations

import codecs
import json
import random
import re

import jsonschema
import numpy as np
import pytest

from grammars.libraries import llguidance_for
from grammars.schemas import case
from grammars.vocabularies import Vocabulary
from grammars.walks import allowed, new_row, walk
from pagewood.engine.api import Grammar
from pagewood.engine.grammar import Backend, GrammarCompiler, Matcher, mask_words, open_backend
from pagewood.engine.model_folder.folder import model_folder

pytest.importorskip("xgrammar")


@pytest.fixture(scope="module")
def xgrammar(vocabulary: Vocabulary) -> Backend:
    from pagewood.engine.grammar.xgrammar_backend import XGrammarBackend

    return XGrammarBackend(
        vocabulary.json,
        vocab_size=vocabulary.vocab_size,
        eos_token_ids=vocabulary.eos_token_ids,
        max_whitespace=8,
    )


def start(backend: Backend, vocabulary: Vocabulary, kind: str, text: str) -> Matcher:
    grammar = Grammar(kind=kind, text=text)  # pyright: ignore[reportArgumentType]
    return backend.compile(grammar).matcher(frozenset(vocabulary.eos_token_ids))


def ids(vocabulary: Vocabulary, text: str) -> list[int]:
    return vocabulary.tokenizer.encode(text, add_special_tokens=False).ids


def test_schemas(xgrammar: Backend, vocabulary: Vocabulary) -> None:
    num_complete = 0
    for seed in range(100):
        one = case(seed)
        text = json.dumps(one.schema)
        try:
            matcher = start(xgrammar, vocabulary, "json_schema", text)
        except ValueError as error:
            if "combinations that xgrammar keeps" not in str(error):
                raise
            continue
        said = walk(matcher.copy(), vocabulary, seed, max_tokens=200)
        assert matcher.accepts(said.tokens) == len(said.tokens)
        if said.is_complete:
            num_complete += 1
            assert jsonschema.Draft202012Validator(one.schema).is_valid(json.loads(said.text)), (one.schema, said.text)
    assert num_complete > 30


def test_regexes_and_choices(xgrammar: Backend, vocabulary: Vocabulary) -> None:
    matcher = start(xgrammar, vocabulary, "regex", r"[a-z]{2,9}@(com|org)[0-9]*")
    for seed in range(10):
        said = walk(matcher.copy(), vocabulary, seed, max_tokens=60)
        assert not said.is_complete or re.fullmatch(r"[a-z]{2,9}@(com|org)[0-9]*", said.text)
    choices = ["a", "ab", 'quo"te', "new\nline", "日本語"]
    matcher = start(xgrammar, vocabulary, "choice", json.dumps(choices))
    assert {walk(matcher.copy(), vocabulary, seed).text for seed in range(100)} == set(choices)


def test_ends_drafts_and_errors(xgrammar: Backend, vocabulary: Vocabulary) -> None:
    eos = vocabulary.eos_token_ids[0]
    a, b = ids(vocabulary, "a")[0], ids(vocabulary, "b")[0]
    matcher = start(xgrammar, vocabulary, "regex", "a[ab]b")
    rows = np.zeros((5, mask_words(vocabulary.vocab_size)), np.int32)
    row = new_row(vocabulary)
    matcher.fill(row)
    assert matcher.fill_ahead([a, b, b, eos], rows) == 4
    assert matcher.fill_ahead([a, eos], rows) == 2
    follower = matcher.copy()
    for j, token in enumerate([a, b, b]):
        follower.fill(row)
        if j < 2:
            np.testing.assert_array_equal(rows[j], row)
        assert follower.advance([token])
    assert follower.is_finished
    follower.fill(row)
    assert set(allowed(row)) == set(vocabulary.eos_token_ids)
    assert matcher.accepts([a, b, b, eos, eos]) == 4
    assert matcher.accepts([a, eos]) == 1
    assert not matcher.advance([b])
    assert matcher.error is not None
    free = xgrammar.compile(Grammar(kind="regex", text="ab?")).matcher(frozenset())
    assert not free.copy().advance([a, eos])
    assert free.advance([a])
    assert free.can_end
    assert not free.is_finished
    assert free.advance([b])
    assert free.is_finished


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"at_least_one": True},
        {"stop_after_first": True},
        {"at_least_one": True, "stop_after_first": True},
    ],
)
def test_both_agree_on_triggered_tags(
    xgrammar: Backend, backend: Backend, vocabulary: Vocabulary, value: dict[str, bool]
) -> None:
    call = {
        "type": "tag",
        "begin": "<f=a>",
        "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
        "end": "</f>",
    }
    tags = {"type": "triggered_tags", "triggers": ["<f"], "tags": [call], **value}
    text = json.dumps({"type": "structural_tag", "format": tags})
    ours, theirs = (start(library, vocabulary, "structural_tag", text) for library in (backend, xgrammar))
    one = "<f=a>5</f>"
    for said in (
        "",
        "ab",
        f"x{one}",
        one,
        f"{one}y",
        f"{one}{one}",
        f"{one}x{one}y",
        "<fx",
        "<f",
        "<",
        "<f=a>5",
        "<f=b>",
    ):
        tokens = [*ids(vocabulary, said), vocabulary.eos_token_ids[0]]
        accepted = theirs.accepts(tokens) == len(tokens)
        if said == "<f":
            continue  # xgrammar lets a text end inside a trigger
        assert (ours.accepts(tokens) == len(tokens)) == accepted, said


def test_what_is_refused(xgrammar: Backend, vocabulary: Vocabulary) -> None:
    for kind, text, message in (
        ("lark", 'start: "a"', "got lark"),
        ("json_schema", '{"not": {}}', "combinations that xgrammar keeps, got not without type at #"),
        ("json_schema", '{"$ref": "#/$defs/x"}', "Cannot find field"),
        ("json_schema", "{", "must be JSON"),
        ("regex", "(a", "parenthesis"),
        ("regex", "(" * 1000 + "a" + ")" * 1000, "at most 200 brackets"),
        ("choice", "[]", "1 to 10000 strings"),
        ("structural_tag", '{"type": "structural_tag"}', "[Ss]tructural"),
    ):
        with pytest.raises(ValueError, match=message):
            start(xgrammar, vocabulary, kind, text)


@pytest.mark.parametrize(
    ("schema", "what"),
    [
        ({"allOf": [{"type": "string"}, {"enum": ["a"]}]}, "allOf of 2 schemas"),
        ({"type": "string", "enum": ["a", 1]}, "enum beside type"),
        ({"type": "string", "pattern": '^"$'}, "pattern"),
        ({"type": "string", "pattern": "a"}, "pattern"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"minimum": 5}, "minimum without type"),
        ({"type": ["integer", "null"], "minimum": 5}, "minimum beside several types"),
        ({"type": "number", "minimum": 5}, "minimum beside type number"),
        ({"type": "integer", "minimum": -(2**63)}, "minimum of -9223372036854775808"),
        ({"enum": ["a", [2**63]]}, "enum of 9223372036854775808"),
        ({"$ref": "#/$defs/x", "type": "string", "$defs": {"x": True}}, r"\$ref beside type"),
        ({"properties": {"a": {"type": "null"}}, "type": "object", "additionalProperties": True}, "beside properties"),
        ({"items": {"properties": {}}, "type": "array"}, "properties without type at #/items"),
    ],
)
def test_combinations_that_the_library_does_not_keep_are_refused(
    xgrammar: Backend, vocabulary: Vocabulary, schema: object, what: str
) -> None:
    with pytest.raises(ValueError, match=f"combinations that xgrammar keeps, got .*{what}"):
        start(xgrammar, vocabulary, "json_schema", json.dumps(schema))


@pytest.mark.parametrize(
    ("kind", "text"),
    [("json_schema", '{"type": "string"}'), ("json_schema", "{}"), ("regex", "[^a]{1,9}"), ("regex", ".{3}[é日🎉]*")],
)
def test_no_text_is_broken_utf_8(xgrammar: Backend, vocabulary: Vocabulary, kind: str, text: str) -> None:
    """Only tokens with bytes beyond ASCII are drawn where there are any, so that characters begin and end often."""
    pieces = llguidance_for(vocabulary)._tokenizer
    row = new_row(vocabulary)
    draws = random.Random(0)
    bytes_of = [pieces.decode_bytes([token]) for token in range(vocabulary.vocab_size)]
    beyond = {token for token, piece in enumerate(bytes_of) if not piece.isascii()}
    num_complete = num_beyond = 0
    for _ in range(20):
        matcher = start(xgrammar, vocabulary, kind, text)
        said = b""
        for step in range(60):
            matcher.fill(row)
            assert matcher.error is None
            choices = allowed(row)
            assert choices
            choices = [token for token in choices if token not in vocabulary.eos_token_ids]
            if matcher.can_end and (not choices or step > 30 or draws.random() < 0.2):
                num_complete += 1
                said.decode()
                break
            token = draws.choice([token for token in choices if token in beyond and step < 30] or choices)
            num_beyond += token in beyond
            assert matcher.advance([token])
            said += bytes_of[token]
            assert codecs.getincrementaldecoder("utf-8")().decode(said) is not None
    assert num_complete > 3
    assert num_beyond > 20


def test_it_is_chosen_by_name() -> None:
    folder = model_folder(None)
    compiler = GrammarCompiler(lambda: open_backend("xgrammar", folder, vocab_size=512, eos_token_ids=(1,)))
    pending = compiler.compile(Grammar(kind="choice", text='["yes", "no"]'), end_tokens=frozenset({1}))
    assert pending.wait()
    assert not hasattr(pending.result(), "code"), pending.result()
    compiler.close()
