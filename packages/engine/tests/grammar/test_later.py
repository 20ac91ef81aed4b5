# pyright: basic
# The bindings of `tokenizers` carry no usable annotations.
"""A grammar behind a mark: before it everything but the end is allowed, and behind it what the grammar allows."""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from grammars.vocabularies import Vocabulary, embedded
from grammars.walks import allowed, new_row
from pagewood.engine.api import Grammar, Refusal
from pagewood.engine.grammar import GrammarCompiler, Matcher, TokenTexts
from pagewood.engine.grammar.llguidance_backend import LLGuidanceBackend
from pagewood.engine.testing.echo_grammar import EchoMatcher, allowed_tokens, behind, read_mask
from pagewood.engine.text import Tokenizer

VOCAB_SIZE = 12


@given(
    marks=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=2),
    seed=st.integers(0, 99),
    choices=st.lists(st.integers(0, 999), max_size=30),
    num_ahead=st.integers(0, 5),
)
def test_masks_are_those_of_the_text_behind(
    marks: list[list[int]], seed: int, choices: list[int], num_ahead: int
) -> None:
    after = tuple("".join(f"<{token}>" for token in mark) for mark in marks)
    grammar, ends = Grammar(kind="regex", text=f"{seed} 12 999 0", after=after), frozenset((7,))
    matcher = behind(EchoMatcher(grammar, ends, VOCAB_SIZE), after, ends, VOCAB_SIZE)
    text: list[int] = []
    for choice in choices:
        choosable = allowed_tokens(grammar, text, ends, VOCAB_SIZE)
        matcher.fill(row := np.zeros(1, np.int32))
        assert read_mask(row, VOCAB_SIZE) == choosable
        token = choosable[choice % len(choosable)]
        if token in ends:
            break
        copy = matcher.copy()
        assert matcher.accepts([token]) == 1
        assert matcher.advance([token])
        copy.fill(again := np.zeros(1, np.int32))
        assert (again == row).all()
        text.append(token)
    drafts: list[int] = []
    for choice in range(num_ahead):
        choosable = allowed_tokens(grammar, text + drafts, ends, VOCAB_SIZE)
        drafts.append(choosable[(choice + seed) % len(choosable)])
        if drafts[-1] in ends:
            break
    num = matcher.fill_ahead(drafts, rows := np.zeros((num_ahead + 1, 1), np.int32))
    assert num >= len(drafts)
    for place in range(num):
        expected = allowed_tokens(grammar, text + drafts[:place], ends, VOCAB_SIZE)
        assert read_mask(rows[place], VOCAB_SIZE) == expected
    if matcher.forced():
        assert [matcher.forced()[0]] == allowed_tokens(grammar, text, ends, VOCAB_SIZE)


def test_a_grammar_that_fails_behind_a_drafted_mark_has_not_failed() -> None:
    grammar, ends = Grammar(kind="regex", text="3 12 0 0", after=("<5>",)), frozenset((7,))
    matcher = behind(EchoMatcher(grammar, ends, VOCAB_SIZE), grammar.after, ends, VOCAB_SIZE)
    rows = np.full((3, 1), -1, np.int32)
    assert matcher.fill_ahead([5, 2], rows) == 2
    assert read_mask(rows[0], VOCAB_SIZE) == allowed_tokens(grammar, [], ends, VOCAB_SIZE)
    assert rows[1:].ravel().tolist() == [0, -1]
    assert matcher.error is None
    assert matcher.advance([4, 5])
    matcher.fill(rows[0])
    assert matcher.error == "made to fail"


MARKS = {"text": ("</think>",), "special": ("<|close|>",), "two": ("</think>", "<|close|>\n")}
MERGED = (
    ">\n", ">{", "k>", "</", "</think", "</think>", "</think>{", "think>{a", "think>{{", "ink>{a}", "<</think>", "h>{a",
    ">{}", "{a", "a}", "a}b", "<</th", "close|>\n{", "\n{",
)  # fmt: skip
"""Tokens that hold ends of marks, in many divisions, and what follows them."""
SPECIAL = ("<|close|>", "<|other|>")


@functools.cache
def vocabulary() -> Vocabulary:
    reader = tokenizers.Tokenizer.from_str(embedded().json)
    reader.add_tokens([tokenizers.AddedToken(text, special=False, normalized=False) for text in MERGED])
    reader.add_special_tokens(list(SPECIAL))
    return Vocabulary(reader.to_str(), reader.get_vocab_size() + 3, (1,))


@functools.cache
def texts() -> TokenTexts:
    tokenizer = Tokenizer(vocabulary().tokenizer)
    of_token = tokenizer.bytes_of_tokens()
    return TokenTexts(
        texts=[of_token(token) for token in range(tokenizer.vocab_size)],
        vocab_size=vocabulary().vocab_size,
        special=frozenset(tokenizer.special_tokens.values()),
    )


@functools.cache
def compiled(backend: str, marks: tuple[str, ...]) -> Matcher:
    """Return a matcher of `{`, letters a, `}` behind some marks."""
    kind: Any = LLGuidanceBackend
    if backend == "xgrammar":
        from pagewood.engine.grammar.xgrammar_backend import XGrammarBackend as kind
    found = kind(vocabulary().json, vocab_size=vocabulary().vocab_size, eos_token_ids=(1,), max_whitespace=0)
    compiler = GrammarCompiler(lambda: found, token_texts=texts, deadline_s=60.0)
    pending = compiler.compile(Grammar(kind="regex", text=r"\{a*\}", after=marks), end_tokens=frozenset((1,)))
    assert pending.wait()
    compiler.close()
    matcher = pending.result()
    assert not isinstance(matcher, Refusal), matcher
    return matcher


def expected(marks: tuple[str, ...], tokens: list[int]) -> set[int]:
    """Return the tokens that may follow, by the text alone."""
    read, special = texts().texts, texts().special
    seen = [token for token in special if any(read[token] in mark.encode() for mark in marks)]

    def text_of(some: list[int]) -> bytes:
        return b"".join(b"" if token in special and token not in seen else read[token] for token in some)

    def cut(text: bytes) -> bytes | None:
        found = [(text.find(mark.encode()) + len(mark)) for mark in marks if mark.encode() in text]
        return text[min(found) :] if found else None

    before = text_of(tokens)
    if cut(before) is None:
        partly = any(before.endswith(mark.encode()[:end]) for mark in marks for end in range(1, len(mark)))
        found = set(range(vocabulary().vocab_size)) - {1}
        for token in list(found):
            rest = cut(before + text_of([token])) if token < len(read) else None
            is_hidden = token in special and token not in seen
            if (rest and not re.fullmatch(rb"\{a*\}?", rest)) or (is_hidden and partly):
                found.remove(token)
        return found
    behind_mark = cut(before)
    assert behind_mark is not None
    if b"}" in behind_mark:
        return {1}
    return {
        token
        for token, text in enumerate(read)
        if token not in special and text and re.fullmatch(rb"\{a*\}?", behind_mark + text)
    }


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@settings(max_examples=60, deadline=None)
@given(data=st.data(), kind=st.sampled_from(sorted(MARKS)))
def test_a_mark_ends_in_any_division_into_tokens(backend: str, data: st.DataObject, kind: str) -> None:
    if backend == "xgrammar":
        pytest.importorskip("xgrammar")
    marks = MARKS[kind]
    matcher = compiled(backend, marks).copy()
    likely = [token for token, text in enumerate(texts().texts) if any(char in text for char in b"<>{}a/think|")]
    tokens: list[int] = []
    row = new_row(vocabulary())
    for _ in range(data.draw(st.integers(0, 12))):
        choices = expected(marks, tokens)
        matcher.fill(row)
        assert set(allowed(row)) & set(range(vocabulary().vocab_size)) == choices
        assert matcher.can_end == (choices == {1})
        tempting = [token for token in likely if token in choices] or sorted(choices)
        token = data.draw(st.sampled_from(tempting))
        for refused in data.draw(st.lists(st.sampled_from(likely), max_size=3)):
            assert matcher.accepts([refused]) == (refused in choices)
        if token == 1:
            break
        assert matcher.accepts([token]) == 1
        assert matcher.advance([token]), matcher.error
        tokens.append(token)
    drafts = data.draw(st.lists(st.sampled_from(likely), max_size=5))
    rows = np.zeros((len(drafts) + 1, len(row)), np.int32)
    num = matcher.fill_ahead(drafts, rows)
    for place in range(num):
        assert set(allowed(rows[place])) & set(range(vocabulary().vocab_size)) == expected(
            marks, tokens + drafts[:place]
        )
    assert num == len(drafts) + 1 or drafts[num - 1] not in expected(marks, tokens + drafts[: num - 1])


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_an_end_before_the_mark_is_not_allowed(backend: str) -> None:
    if backend == "xgrammar":
        pytest.importorskip("xgrammar")
    matcher = compiled(backend, MARKS["text"]).copy()
    assert matcher.accepts([1]) == 0
    assert not matcher.can_end
    assert not matcher.advance([1])
    assert matcher.error == "token 1 comes before the text behind which the grammar begins"
    matcher.fill(row := new_row(vocabulary()))
    assert allowed(row) == []


def test_too_many_texts_before_are_refused() -> None:
    with pytest.raises(ValueError, match=r"grammar\.after must hold at most 64 texts of 1 to 256 characters"):
        Grammar(kind="regex", text="a", after=("a",) * 65)
    with pytest.raises(ValueError, match=r"got \(''"):
        Grammar(kind="regex", text="a", after=("",))


def test_a_compiler_without_the_texts_of_tokens_refuses_marks() -> None:
    backend = LLGuidanceBackend(
        vocabulary().json, vocab_size=vocabulary().vocab_size, eos_token_ids=(1,), max_whitespace=0
    )
    compiler = GrammarCompiler(lambda: backend)
    pending = compiler.compile(Grammar(kind="regex", text="a", after=("b",)), end_tokens=frozenset())
    assert pending.wait()
    assert "grammar.after must be empty" in getattr(pending.result(), "message", "")
    compiler.close()
