"""Stop expressions, compared with Python's `re` on the whole text, and the widths of expressions."""

from __future__ import annotations

import re
from re import _parser  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
from typing import NamedTuple

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from pagewood.engine.text import StopExpressions, TextStream, Tokenizer
from pagewood.engine.text.regex_width import Width, width_of
from scale import scaled


class Expression(NamedTuple):
    """One expression in two syntaxes."""

    ours: str
    python: str


def both(text: str) -> Expression:
    return Expression(text, text)


def joined(parts: list[Expression], between: str) -> Expression:
    return Expression(*(f"(?:{between.join(texts)})" for texts in zip(*parts, strict=True)))


CHARACTERS = [both(one) for one in ("a", "b", r"\n", "é", ".", "[ab]", "[^a]", r"\w", r"(?i:B)")]
ASSERTIONS = [
    *map(both, (r"\b", r"\B", "^", r"\A", "(?m:^)", "(?m:$)")),
    Expression("$", r"\Z"),
    Expression(r"\z", r"\Z"),
]
LIMITED = ["?", "{0,2}", "{2}", "{1,3}", "??", "{0,2}?"]


def expressions(repeats: list[str]) -> st.SearchStrategy[Expression]:
    return st.recursive(
        st.sampled_from([*CHARACTERS, *CHARACTERS, *ASSERTIONS]),
        lambda part: (
            st.lists(part, min_size=1, max_size=3).map(lambda parts: joined(parts, ""))
            | st.lists(part, min_size=1, max_size=3).map(lambda parts: joined(parts, "|"))
            | st.tuples(part, st.sampled_from(repeats)).map(
                lambda one: Expression(*(f"(?:{x}){one[1]}" for x in one[0]))
            )
        ),
        max_leaves=6,
    )


def oracle(text: str, parts: list[str]) -> tuple[str, str | None]:
    """Try every end in order, and at each end every start."""
    for end in range(1, len(text) + 1):
        for start in range(end):
            for part in parts:
                whole = rf"(?s:.{{{start}}})(?:{part})(?=(?s:.{{{len(text) - end}}})\Z)"
                if any(found.end() == end for found in [re.compile(whole, re.ASCII).match(text)] if found):
                    return text[:start], text[start:end]
    return text, None


@settings(max_examples=scaled(75), deadline=None)
@given(
    chunks=st.lists(st.text(alphabet="abB\né- ", max_size=4), max_size=6),
    some=st.lists(expressions(LIMITED), min_size=1, max_size=2),
    strings=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=3), max_size=2),
)
@example(chunks=["a", "b", " "], some=[both(r"ab\b"), both("b")], strings=[])
@example(chunks=["ab", "cd"], some=[both("abcd"), both("c")], strings=[])
@example(chunks=["ab"], some=[Expression("b$", r"b\Z")], strings=[])
@example(chunks=["xa", "a"], some=[both("^a")], strings=["aa"])
def test_against_oracle(chunks: list[str], some: list[Expression], strings: list[str]) -> None:
    """The streamed text is that before the first match in the whole text, however it is cut."""
    try:
        search = StopExpressions([one.ours for one in some], strings=strings)
    except ValueError as error:
        assert "empty text" in str(error)  # noqa: PT017
        assume(False)
        return
    before, found = oracle("".join(chunks), [*(one.python for one in some), *map(re.escape, strings)])
    shown = ""
    for chunk in chunks:
        shown += search.push(chunk)
        assert before.startswith(shown)  # no part of the match
        assert search.matched in (None, found)
    shown += search.flush()
    assert (shown, search.matched) == (before, found)
    assert search.push("more") == search.flush() == "" or found is None


@settings(max_examples=scaled(75), deadline=None)
@given(expressions([*LIMITED, "*", "+", "{2,}", "*?"]))
def test_widths_are_those_of_python(one: Expression) -> None:
    least, most = _parser.parse(one.python).getwidth()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    width = width_of(one.ours)
    assert (width.least, min(width.most, 2**32 - 1)) == (least, min(most, 2**32 - 1))  # pyright: ignore[reportUnknownArgumentType]


@pytest.mark.parametrize(
    ("expression", "width"),
    [
        ("a{,3}", Width(5, 5, False)),  # RE2 takes it for text
        ("a{01}", Width(5, 5, False)),
        ("a{2}{", Width(3, 3, False)),
        (r"[]a]|[^]]{3}|[\]x]", Width(1, 3, False)),
        (r"[[:alpha:]]{2}|[[:^digit:]x[]", Width(1, 2, False)),
        (r"\pL\p{Greek}\x41\x{1F600}\.\_", Width(6, 6, False)),
        (r"[\pL\p{Greek}\x{5D}\\]{4}", Width(4, 4, False)),
        (r"(?P<one>a)(?<two>b|cde)?", Width(1, 4, False)),
        ("(?i)a(?s-m:.)(?-s)b", Width(3, 3, False)),
        (r"(?m)^User:|\bEnd$", Width(3, 5, True)),
        ("((a|bc){3}|)d{1,}?", Width(1, float("inf"), False)),
        ("(?:^*|a{0})*b", Width(1, 1, True)),
        ("é{3}", Width(3, 3, False)),
    ],
)
def test_widths_of_the_syntax_of_re2(expression: str, width: Width) -> None:
    assert width_of(expression) == width
    if width.least and width.most < 256:
        StopExpressions([expression])


@pytest.mark.parametrize(
    ("expression", "rule"),
    [
        ("", "of 1 to 512 characters, got 0"),
        ("a" * 513, "of 1 to 512 characters, got 513"),
        ("a*", r"must not match the empty text, got 'a\*'"),
        (r"\b", "must not match the empty text"),
        ("a+b", "must match at most 256 characters, .* which may match any number"),
        ("a{200}b{57}", "which may match 257 characters"),
        ("(", r"must hold expressions of RE2 .*: missing \)"),
        ("a)(b", "must hold expressions of RE2"),
        (r"(a)\1", "must hold expressions of RE2"),
        ("a(?=b)", "must hold expressions of RE2"),
        (r"\C", r"without \\C, \\Q and octal numbers"),
        (r"\Qa*\E", r"the escape \\Q is not supported"),
        (r"[\Qa]\E]", "stop_regex must hold expressions"),
        (r"\012", r"the escape \\0 is not supported"),
        (r"\pL{1,200}\d", "pattern too large"),
        ("\ud800", "must hold expressions of RE2"),
        ("(" * 250 + "a" + ")" * 250, None),
    ],
)
def test_expressions_that_cannot_be_used_are_refused(expression: str, rule: str | None) -> None:
    if rule is None:
        StopExpressions([expression])
        return
    with pytest.raises(ValueError, match=rule):
        StopExpressions([expression])


def test_what_is_too_large_together_is_refused() -> None:
    parts = [rf"{letter}\pL{{4}}" for letter in "abcd"]
    for part in parts:
        StopExpressions([part])
    with pytest.raises(ValueError, match="all together must be small enough"):
        StopExpressions(parts)


def test_an_empty_string_is_refused() -> None:
    with pytest.raises(ValueError, match="stop must hold no empty string"):
        StopExpressions(["a"], strings=[""])


def test_an_expression_that_makes_backtracking_slow_is_searched_in_linear_time() -> None:
    """Python's `re` would need longer than the age of the universe."""
    search = StopExpressions([r"(?:(?:(?:a?){15}){15}){1,1}b", "[ab]{0,128}a[ab]{100}c"])
    shown = "".join(search.push("a" * 5) for _ in range(400)) + search.flush()
    assert shown == "a" * 2000
    assert search.matched is None


def test_a_stream_stops_before_a_match(byte_level_tokenizer: Tokenizer) -> None:
    text = "Sum: 12\nUser: more"
    stream = TextStream(byte_level_tokenizer, stop=["more"], stop_regex=[r"\n[A-Z][a-z]{1,20}:"])
    shown = ""
    for token in byte_level_tokenizer.encode(text).tolist():
        shown += stream.push((token,))
    assert shown + stream.finish() == "Sum: 12"
    assert stream.stopped_by == "\nUser:"
