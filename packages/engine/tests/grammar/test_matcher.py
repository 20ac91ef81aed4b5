# pyright: basic
# The bindings of `tokenizers` carry no usable annotations.
"""What a matcher does for one request: ends, drafts, copies, forced tokens and errors, with two vocabularies."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest

from grammars.libraries import llguidance_for
from grammars.schemas import case
from grammars.vocabularies import Vocabulary, embedded
from grammars.walks import allowed, new_row, walk
from pagewood.engine.api import Grammar
from pagewood.engine.grammar import Backend, Matcher, budget, mask_words, open_backend
from pagewood.engine.model_folder.folder import model_folder

REGEXES = [
    r"[a-z]{1,20}@[a-z]{2,10}\.(com|org)",
    r"(0|[1-9][0-9]{0,3})(\.[0-9]{1,2})?",
    r"a{3,5}b*",
    r"(yes|no|maybe so)[.!]?",
    r"/usr/(lib|bin)/[a-z0-9.-]{1,20}",
    '[^"\\\\]{4}"\\\\',
    r"(?:(?:ab)?c){2,4}d",
    "line\nline",
]


def start(backend: Backend, kind: Any, text: str, ends: frozenset[int]) -> Matcher:
    return backend.compile(Grammar(kind=kind, text=text)).matcher(ends)


def ids(vocabulary: Vocabulary, text: str) -> list[int]:
    return vocabulary.tokenizer.encode(text, add_special_tokens=False).ids


def ends_of(vocabulary: Vocabulary) -> frozenset[int]:
    return frozenset(vocabulary.eos_token_ids)


@pytest.mark.parametrize("regex", REGEXES)
def test_what_a_regex_allows_matches_it(backend: Backend, vocabulary: Vocabulary, regex: str) -> None:
    matcher = start(backend, "regex", regex, ends_of(vocabulary))
    for seed in range(10):
        said = walk(matcher.copy(), vocabulary, seed)
        assert said.is_complete
        assert re.fullmatch(regex, said.text), said.text


def test_what_a_choice_allows_is_a_member(backend: Backend, vocabulary: Vocabulary) -> None:
    choices = ["a", "ab", "yes", 'quo"te', "back\\slash", "new\nline", "\x7f\0", "naïve", "日本語", "🎉", "/x/", " "]
    matcher = start(backend, "choice", json.dumps(choices), ends_of(vocabulary))
    assert {walk(matcher.copy(), vocabulary, seed).text for seed in range(200)} == set(choices)
    for choice in choices:
        tokens = ids(vocabulary, choice)
        assert matcher.accepts([*tokens, vocabulary.eos_token_ids[0]]) == len(tokens) + 1
    assert matcher.accepts([*ids(vocabulary, "ye"), vocabulary.eos_token_ids[0]]) == len(ids(vocabulary, "ye"))


def test_any_json_object(backend: Backend, vocabulary: Vocabulary) -> None:
    matcher = start(backend, "json_schema", '{"type": "object"}', ends_of(vocabulary))
    for value in ({}, {"a": [1, None, {"b": "c"}]}, {"日本": -1.5e3}):
        tokens = ids(vocabulary, json.dumps(value, ensure_ascii=False))
        assert matcher.accepts(tokens) == len(tokens)
    assert matcher.accepts(ids(vocabulary, "[1]")) == 0
    for seed in range(20):
        said = walk(matcher.copy(), vocabulary, seed)
        assert not said.is_complete or isinstance(json.loads(said.text), dict)


def test_lark(backend: Backend, vocabulary: Vocabulary) -> None:
    sums = 'start: term ("+" term)*\nterm: NUMBER | "(" start ")"\nNUMBER: /[0-9]{1,3}/'
    matcher = start(backend, "lark", sums, ends_of(vocabulary))
    for seed in range(20):
        said = walk(matcher.copy(), vocabulary, seed, free_tokens=15)
        if said.is_complete:
            assert isinstance(eval(re.sub(r"\b0+(?=\d)", "", said.text)), int)
    assert matcher.accepts(ids(vocabulary, "(1+2")) == len(ids(vocabulary, "(1+2"))
    assert matcher.accepts(ids(vocabulary, "1-")) < len(ids(vocabulary, "1-"))


def test_white_space_is_bounded(vocabulary: Vocabulary) -> None:
    for most in (0, 1, 8):
        backend = llguidance_for(vocabulary, max_whitespace=most)
        matcher = start(backend, "json_schema", '{"type": "array"}', ends_of(vocabulary))
        for number in (0, 1, 2, 8, 9):
            tokens = ids(vocabulary, f"[{' ' * number}1]")
            assert (matcher.accepts(tokens) == len(tokens)) == (number <= most)


@pytest.fixture(autouse=True)
def time_for_many_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine must not end a grammar here, whose copies take more than its masks may; see `test_budget`."""
    monkeypatch.setattr(budget, "MAX_DEBT_S", 60.0)


def test_a_mask_is_what_can_be_advanced_by(backend: Backend, vocabulary: Vocabulary) -> None:
    """A token is in the mask if and only if a copy can go on by it; forced spellings apart."""
    draws = random.Random(0)
    for seed in (1, 2, 3, 4, 6):
        matcher = start(backend, "json_schema", json.dumps(case(seed).schema), ends_of(vocabulary))
        row = new_row(vocabulary)
        for _ in range(12):
            matcher.fill(row)
            choices = set(allowed(row))
            sample = draws.sample(range(vocabulary.vocab_size), 60) + list(choices)[:20]
            for token in sample:
                can_advance = matcher.copy().advance([token])
                assert matcher.accepts([token]) == can_advance
                if not matcher.forced():
                    assert can_advance == (token in choices)
                elif token in choices:
                    assert can_advance
            texts = sorted(choices - ends_of(vocabulary))
            if not texts:
                break
            assert matcher.advance([draws.choice(texts)])


def test_masks_along_drafts_are_those_after_advancing(backend: Backend, vocabulary: Vocabulary) -> None:
    for seed in range(40):
        draws = random.Random(seed)
        matcher = start(backend, "json_schema", json.dumps(case(seed).schema), ends_of(vocabulary))
        said = walk(matcher.copy(), vocabulary, seed, max_tokens=40)
        cut = draws.randint(0, len(said.tokens))
        assert matcher.advance(said.tokens[:cut])
        drafts = said.tokens[cut : cut + 6] + ([vocabulary.eos_token_ids[0]] if said.is_complete else [])
        rows = np.full((len(drafts) + 3, mask_words(vocabulary.vocab_size)), -1, np.int32)
        before = new_row(vocabulary)
        matcher.fill(before)
        num_rows = matcher.fill_ahead(drafts, rows)
        follower = matcher.copy()
        row = new_row(vocabulary)
        for j in range(num_rows):
            follower.fill(row)
            np.testing.assert_array_equal(rows[j], row)
            if j + 1 < num_rows:
                assert follower.advance([drafts[j]])
        is_end = num_rows <= len(drafts) and drafts[num_rows - 1] in vocabulary.eos_token_ids
        assert num_rows == len(drafts) + 1 or is_end  # all drafts of a walk are allowed
        assert (rows[num_rows:] == -1).all()
        matcher.fill(row)
        np.testing.assert_array_equal(row, before)


def test_drafts_stop_at_the_first_that_is_not_allowed(backend: Backend, vocabulary: Vocabulary) -> None:
    matcher = start(backend, "regex", "[0-9]{8}", ends_of(vocabulary))
    digit, letter = ids(vocabulary, "7")[0], ids(vocabulary, "x")[0]
    rows = np.zeros((5, mask_words(vocabulary.vocab_size)), np.int32)
    assert matcher.fill_ahead([digit, digit, letter, digit], rows) == 3
    assert matcher.fill_ahead([], rows) == 1
    assert matcher.fill_ahead([vocabulary.eos_token_ids[0]], rows) == 1
    assert matcher.fill_ahead([vocabulary.vocab_size + 5, digit], rows) == 1
    assert matcher.accepts([digit, digit, letter]) == 2
    assert matcher.error is None
    with pytest.raises(ValueError, match="rows must be more than the 5 drafts, got 5"):
        matcher.fill_ahead([digit] * 5, rows)


def test_copies_are_independent(backend: Backend, vocabulary: Vocabulary) -> None:
    matcher = start(backend, "regex", "(ab|cd)*", ends_of(vocabulary))
    copy = matcher.copy()
    assert copy.advance(ids(vocabulary, "a"))
    rows = [new_row(vocabulary) for _ in range(3)]
    matcher.fill(rows[0])
    copy.fill(rows[1])
    start(backend, "regex", "(ab|cd)*", ends_of(vocabulary)).fill(rows[2])
    np.testing.assert_array_equal(rows[0], rows[2])
    assert not np.array_equal(rows[0], rows[1])
    assert not copy.advance(ids(vocabulary, "z"))
    assert copy.error is not None
    assert matcher.error is None
    assert matcher.copy().advance(ids(vocabulary, "c"))


def test_forced_tokens_are_those_of_the_masks(backend: Backend, vocabulary: Vocabulary) -> None:
    schema = {"type": "object", "properties": {"temperature_celsius": {"type": "integer"}}, "required": None}
    schema["required"] = ["temperature_celsius"]
    compact = llguidance_for(vocabulary, max_whitespace=0)
    matcher = start(compact, "json_schema", json.dumps(schema), ends_of(vocabulary))
    forced = matcher.forced()
    assert vocabulary.tokenizer.decode(list(forced)).startswith('{"temperature_cels')
    row = new_row(vocabulary)
    for token in forced:
        matcher.fill(row)
        assert allowed(row) == [token]
        assert matcher.advance([token])
    assert matcher.forced() == ()
    for seed in range(30):  # at any point of a walk
        matcher = start(backend, "json_schema", json.dumps(case(seed).schema), ends_of(vocabulary))
        said = walk(matcher.copy(), vocabulary, seed, max_tokens=60)
        for token in said.tokens:
            forced = matcher.forced()
            matcher.fill(row)
            if forced:
                assert allowed(row) == [forced[0]]
            assert matcher.advance([token])


def test_end_tokens_are_allowed_where_the_text_is_complete(backend: Backend, vocabulary: Vocabulary) -> None:
    eos = vocabulary.eos_token_ids[0]
    matcher = start(backend, "regex", "ab?", ends_of(vocabulary))
    row = new_row(vocabulary)
    assert not matcher.can_end
    assert matcher.accepts([eos]) == 0
    assert not matcher.copy().advance([eos])
    assert matcher.advance(ids(vocabulary, "a"))
    assert matcher.can_end
    assert not matcher.is_finished
    matcher.fill(row)
    assert set(allowed(row)) == {*ends_of(vocabulary), *ids(vocabulary, "b")}
    ended = matcher.copy()
    assert ended.advance([eos])
    assert ended.is_finished
    assert ended.can_end
    assert ended.forced() == ()
    assert ended.accepts([eos]) == 0
    ended.fill(row)
    assert set(allowed(row)) == ends_of(vocabulary)
    assert not ended.advance([eos])
    assert ended.error == f"token {eos} follows the end"
    assert matcher.accepts([*ids(vocabulary, "b"), eos, eos]) == 2
    assert matcher.advance(ids(vocabulary, "b"))
    assert matcher.is_finished
    matcher.fill(row)
    assert set(allowed(row)) == ends_of(vocabulary)


def test_a_request_without_end_tokens_is_finished_by_its_grammar(backend: Backend, vocabulary: Vocabulary) -> None:
    eos = vocabulary.eos_token_ids[0]
    matcher = start(backend, "regex", "ab?", frozenset())
    row = new_row(vocabulary)
    assert matcher.advance(ids(vocabulary, "a"))
    matcher.fill(row)
    assert allowed(row) == ids(vocabulary, "b")
    assert matcher.accepts([eos]) == 0
    assert not matcher.copy().advance([eos])
    assert matcher.advance(ids(vocabulary, "b"))
    assert matcher.is_finished
    matcher.fill(row)
    assert not row.any()
    assert matcher.error is None


def test_stop_tokens_that_are_text_end_only_a_complete_text(backend: Backend, vocabulary: Vocabulary) -> None:
    letter = ids(vocabulary, "b")[0]
    matcher = start(backend, "regex", "a[bc]c", frozenset({letter}))
    row = new_row(vocabulary)
    assert matcher.advance(ids(vocabulary, "a"))
    matcher.fill(row)
    assert letter not in allowed(row)
    assert not matcher.copy().advance([letter])
    assert matcher.advance(ids(vocabulary, "c"))
    assert matcher.advance(ids(vocabulary, "c"))
    matcher.fill(row)
    assert allowed(row) == [letter]
    blocked = start(backend, "regex", "ab", frozenset({letter}))
    assert blocked.advance(ids(vocabulary, "a"))
    blocked.fill(row)
    assert blocked.error == "every token that may come next is an end token"
    assert not row.any()


AMBIGUOUS = "".join(
    [
        'start: ("a" "c")* ("b" many)?\nX: "x"\nY: "y"\nmany: ',
        " | ".join(f"r{i}" for i in range(1_200)),
        *[f"\nr{i}: X Y*" for i in range(1_200)],
    ]
)
"""Behind `bx`, llguidance has more items than it may have."""


@pytest.mark.parametrize("said", ["", "acac"])
@pytest.mark.parametrize(
    ("kind", "text", "drafted", "ends"),
    [("lark", AMBIGUOUS, "acbx", ""), ("regex", "(ac)*bd", "acb", "d")],
    ids=["limit of the library", "only ends may follow"],
)
def test_what_fails_behind_a_draft_is_no_error_of_the_text(
    backend: Backend, vocabulary: Vocabulary, kind: str, text: str, drafted: str, ends: str, said: str
) -> None:
    """The row there is empty and the last, and the matcher goes on like one that has seen no drafts."""
    drafts = [token for letter in drafted for token in ids(vocabulary, letter)]
    matcher, other = [start(backend, kind, text, frozenset(ids(vocabulary, ends))) for _ in range(2)]
    assert matcher.advance([token for letter in said for token in ids(vocabulary, letter)])
    assert other.advance([token for letter in said for token in ids(vocabulary, letter)])
    rows = np.full((len(drafts) + 2, mask_words(vocabulary.vocab_size)), -1, np.int32)
    row = new_row(vocabulary)
    for _ in range(2):
        assert matcher.fill_ahead([*drafts, drafts[0]], rows) == len(drafts) + 1
        assert [bool(row.any()) for row in rows] == [True] * len(drafts) + [False, True]
        assert matcher.error is None
        follower = other.copy()
        for place, draft in enumerate(drafts):
            follower.fill(row)
            np.testing.assert_array_equal(rows[place], row)
            follower.advance([draft])
        follower.fill(row)
        assert follower.error is not None
    assert matcher.advance(drafts[:2])
    assert matcher.accepts(drafts[:2]) == 2
    assert not matcher.is_finished
    matcher.advance(drafts)
    matcher.fill(row)
    assert matcher.error is not None


def test_errors_are_final(backend: Backend, vocabulary: Vocabulary) -> None:
    digit, letter = ids(vocabulary, "7")[0], ids(vocabulary, "x")[0]
    row = new_row(vocabulary)
    for tokens in ([letter], [digit, letter], [-1], [vocabulary.vocab_size], [2**40]):
        matcher = start(backend, "regex", "[0-9]+", ends_of(vocabulary))
        assert not matcher.advance(tokens)
        assert matcher.error
        assert len(matcher.error) < 1000
        matcher.fill(row)
        assert not row.any()
        assert not matcher.advance([digit])
        assert matcher.accepts([digit]) == 0
        assert matcher.forced() == ()
        assert not matcher.is_finished
        assert not matcher.can_end
        assert matcher.copy().error == matcher.error
    matcher = start(backend, "regex", "[0-9]+", ends_of(vocabulary))
    assert matcher.advance([])
    assert matcher.accepts([]) == 0
    assert matcher.accepts([2**40]) == 0
    assert matcher.error is None


def test_a_lexer_at_its_limit_fails_its_matchers_and_spoils_the_prototype() -> None:
    vocabulary = embedded()
    prototype = llguidance_for(vocabulary).compile(Grammar(kind="regex", text="x" + "a?" * 1_300 + "a" * 1_300))
    matcher = prototype.matcher(ends_of(vocabulary))
    other = prototype.matcher(ends_of(vocabulary))
    harmless = llguidance_for(vocabulary).compile(Grammar(kind="regex", text="a"))
    assert not harmless.matcher(ends_of(vocabulary)).advance(ids(vocabulary, "z"))
    assert not harmless.is_spoiled
    assert not prototype.is_spoiled
    assert not matcher.advance(ids(vocabulary, "x"))
    assert matcher.error is not None
    assert "lexer error: too many expressions constructed" in matcher.error
    assert prototype.is_spoiled
    row = new_row(vocabulary)
    other.fill(row)
    assert other.error is not None
    assert not row.any()


def test_a_row_of_another_shape_is_refused(backend: Backend, vocabulary: Vocabulary) -> None:
    matcher = start(backend, "regex", "a", ends_of(vocabulary))
    words = mask_words(vocabulary.vocab_size)
    for row in (np.zeros(words + 1, np.int32), np.zeros(words, np.int64), np.zeros((2 * words), np.int32)[::2]):
        with pytest.raises(ValueError, match=f"row must be contiguous int32 of shape \\({words},\\)"):
            matcher.fill(row)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="end_tokens must be in"):
        start(backend, "regex", "a", frozenset({vocabulary.vocab_size}))


def test_open_backend(tmp_path: Any) -> None:
    folder = model_folder(None)
    assert start(open_backend("llguidance", folder, vocab_size=512, eos_token_ids=(1,)), "regex", "a", frozenset({1}))
    no_end = open_backend("llguidance", folder, vocab_size=600, eos_token_ids=())
    row = np.zeros(mask_words(600), np.int32)
    start(no_end, "regex", "(?s:.)*", frozenset()).fill(row)
    assert min(allowed(row)) > 0  # special tokens are not text
    assert max(allowed(row)) < 512  # nor are ids that the tokenizer does not have
    with pytest.raises(ValueError, match="eos_token_ids must be in"):
        open_backend("llguidance", folder, vocab_size=512, eos_token_ids=(512,))
    with pytest.raises(ValueError, match="backend must be llguidance or xgrammar, got 'outlines'"):
        open_backend("outlines", folder, vocab_size=512, eos_token_ids=(1,))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"must hold a tokenizer\.json"):
        open_backend("llguidance", tmp_path, vocab_size=512, eos_token_ids=(1,))
    with pytest.raises(ValueError, match="max_whitespace must be >= 0, got -1"):
        open_backend("llguidance", folder, vocab_size=512, eos_token_ids=(1,), max_whitespace=-1)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="tokenizer must be one that llguidance takes"):
        open_backend("llguidance", tmp_path, vocab_size=512, eos_token_ids=(1,))


def test_the_embedded_vocabulary_is_that_of_the_embedded_model() -> None:
    assert embedded().tokenizer.get_vocab_size() == 512
