"""EBNF in the form of llama.cpp means the same after its translation to Lark.

The oracle knows no grammar library: it makes all short texts of a random grammar from its parts.
"""

from __future__ import annotations

import itertools
import random
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewood.engine import ebnf
from pagewood.engine.api import Grammar
from pagewood.engine.ebnf import MAX_EBNF, is_ebnf, lark_of_ebnf
from pagewood.engine.grammar import Backend, open_backend
from pagewood.engine.model_folder.folder import model_folder
from pagewood.engine.text import Tokenizer

EOS = 1
LONGEST = 5
Texts = frozenset[str]


@cache
def backend() -> Backend:
    return open_backend("llguidance", model_folder(None), vocab_size=512, eos_token_ids=(EOS,))


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(model_folder(None))


def accepted(grammar: str, texts: list[str]) -> list[str]:
    """Return those of `texts` that an EBNF grammar allows."""
    prototype = backend().compile(Grammar.lark(lark_of_ebnf(grammar)))
    start = prototype.matcher(frozenset({EOS}))
    found: list[str] = []
    for text in texts:
        tokens = [*tokenizer().encode(text).tolist(), EOS]
        if start.copy().accepts(tokens) == len(tokens):
            found.append(text)
    return found


def joined(left: Texts, right: Texts) -> Texts:
    return frozenset(a + b for a in left for b in right if len(a) + len(b) <= LONGEST)


def repeated(texts: Texts, least: int, most: int) -> Texts:
    found, power = set[str](), frozenset({""})
    for count in range(most + 1):
        if count >= least:
            found |= power
        power = joined(power, texts)
    return frozenset(found)


def part(r: random.Random, depth: int, rules: dict[str, Texts]) -> tuple[str, Texts]:
    """Return a part of a rule and its texts, up to the longest."""
    match r.randrange(4 if depth == 0 else 8):
        case 0:
            text = "".join(r.choices("ab", k=r.randrange(4)))
            return f'"{text}"', frozenset({text})
        case 1:
            return r.choice([("[a]", frozenset("a")), ("[a-b]", frozenset("ab")), ("[^a]", frozenset("b"))])
        case 2 if rules:
            return r.choice(sorted(rules.items()))
        case 2 | 3:
            return r.choice([('"\\x61"', frozenset("a")), ('"\\u0062"', frozenset("b")), ("[\\x61b]", frozenset("ab"))])
        case 4 | 5:
            inner, texts = part(r, depth - 1, rules)
            sign, least, most = r.choice([("*", 0, 5), ("+", 1, 5), ("?", 0, 1), ("{2}", 2, 2), ("{1,2}", 1, 2)])
            return f"({inner}){sign}", repeated(texts, least, max(most, least))
        case 6:
            (one, a), (two, b) = part(r, depth - 1, rules), part(r, depth - 1, rules)
            return f"{one}{r.choice([' ', '  '])}{two}", joined(a, b)
        case _:
            (one, a), (two, b) = part(r, depth - 1, rules), part(r, depth - 1, rules)
            return f"({one} |{r.choice([' ', chr(10)])}{two})", a | b


def check(r: random.Random) -> None:
    rules: dict[str, Texts] = {}
    lines: list[str] = []
    for name in (*r.sample(["x", "Upper-Case", "upper_case", "start", "9th"], r.randrange(4)), "root"):
        body, texts = part(r, 3, dict(rules))
        lines.append(f"{name} ::= {body}{r.choice(['', ' # a comment ::='])}")
        rules[name] = texts
    r.shuffle(lines)
    grammar = "\n".join(lines)
    texts = ["".join(text) for length in range(LONGEST + 1) for text in itertools.product("ab", repeat=length)]
    expected = sorted(text for text in texts if text in rules["root"])
    if expected:
        assert sorted(accepted(grammar, texts)) == expected, grammar


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False))
def test_random_grammars_mean_the_same(r: random.Random) -> None:
    check(r)


def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A literal as one terminal, as llguidance's own translator has it."""
    grammar, texts = 'root ::= [ab]* "ab"', ["ab", "aab", "abab"]
    assert accepted(grammar, texts) == texts
    monkeypatch.setattr(ebnf, "_literal", _as_it_is)
    assert accepted(grammar, texts) != texts


def _as_it_is(lexeme: Any) -> str:
    return lexeme.text


@pytest.mark.parametrize(
    ("grammar", "allowed", "others"),
    [
        ('root ::= "(" root ")" root | ""', ["", "()", "(())()"], ["(", "())"]),
        ('root ::= root "a" | .', ["x", "\n", "🎉aa"], ["", "xb"]),
        (
            'root ::= [^"\\\\\\]-] "\\"\\\\\\n\\t\\U0001f389"',
            ['x"\\\n\t🎉', 'é"\\\n\t🎉'],
            ['-"\\\n\t🎉', ']"\\\n\t🎉'],
        ),
        ('root::=a{2}|b{1,}|\na::="x"\nb ::= [&&y[~]', ["", "xx", "y&[", "~"], ["x", "xxx", "y]"]),
        ("root ::= [0-9-]+", ["1-2", "-"], ["a"]),
    ],
)
def test_recursion_escapes_and_classes(grammar: str, allowed: list[str], others: list[str]) -> None:
    assert accepted(grammar, allowed + others) == allowed


@pytest.mark.parametrize(
    ("grammar", "rule"),
    [
        ("", "must define the rule root"),
        ('a ::= "x"', "must define the rule root"),
        ('x root ::= "x"', "must begin with name ::=, got x in line 1"),
        ('root ::= "x"\n::= "y"', "must have a name before ::="),
        ('root ::= "x"\nroot ::= "y"', "must define each rule once, got root in line 2"),
        ("root ::= a", "must define every rule that it uses, got a in line 1"),
        ("root ::= (\n", "must close all parentheses"),
        ('root ::= "x")', "must open each parenthesis"),
        ("root ::= *", "must have something to repeat"),
        ('root ::= "x"**', "must have something to repeat"),
        ('root ::= "x"{3,2}', "must have repetitions"),
        ('root ::= "x"{2001}', "must have repetitions"),
        ("root ::= [b-a]", "must have ranges of characters in ascending order"),
        ("root ::= []", "must have classes of at least one character"),
        ('root ::= "\\q"', "must have the escapes"),
        ('root ::= "\\ud800"', "must have escapes of characters"),
        ('root ::= "x', 'must have rules of EBNF, got " in line 1'),
        ("root ::= (= x)", "must have rules of EBNF, got = in line 1"),
        ("root ::= " + "(" * 101 + '"x"' + ")" * 101, "must have parentheses at most 100 levels deep"),
        ("#" * (MAX_EBNF + 1), "must have at most 65536 characters, got 65537"),
    ],
)
def test_a_wrong_grammar_names_the_rule_and_the_line(grammar: str, rule: str) -> None:
    with pytest.raises(ValueError, match="EBNF grammar") as error:
        lark_of_ebnf(grammar)
    assert rule in str(error.value)


def test_lark_is_not_ebnf() -> None:
    assert is_ebnf('# ::=\nroot ::= "x"')
    assert is_ebnf("  some-rule::=x")
    assert not is_ebnf('start: "a ::= b"\n// x ::= y')
