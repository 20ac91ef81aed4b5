"""EBNF grammars in the form of llama.cpp (GBNF) and xgrammar, translated to Lark. Standard library only.

    root ::= "yes" | "no" | number
    number ::= [1-9] [0-9]{0,3}   # a comment

A Lark grammar reads a text in two stages: terminals take as many characters as they can, and rules see terminals only.
EBNF has no such stages: `[a-z]* "end"` matches "enend". So each terminal of the translation is a single character. (The
translator that llguidance ships makes terminals of whole rules and texts, and then refuses what the EBNF allows.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

MAX_EBNF = 65_536
"""Characters of a grammar."""
MAX_DEPTH = 100
"""Levels of parentheses."""
MAX_REPEATS = 2_000
"""Largest number in `{m,n}`; llama.cpp has the same bound."""

_LEXEME = re.compile(
    r"""
      (?P<skip>\s+|\#[^\n]*)
    | (?P<defines>::=)
    | (?P<name>[A-Za-z0-9_-]+)
    | (?P<literal>"(?:\\.|[^"\\\n])*")
    | (?P<characters>\[(?:\\.|[^\]\\])*\])
    | (?P<any>\.)
    | (?P<repeat>[*+?]|\{\s*(?P<least>\d{1,9})\s*(?P<comma>,\s*(?P<most>\d{1,9})?\s*)?\})
    | (?P<open>\()
    | (?P<close>\))
    | (?P<or>\|)
    | (?P<wrong>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_CHARACTER = re.compile(
    r"\\(?:x(?P<x>[0-9A-Fa-f]{2})|u(?P<u>[0-9A-Fa-f]{4})|U(?P<U>[0-9A-Fa-f]{8})|(?P<other>.))|(?P<plain>.)", re.DOTALL
)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}
_DEFINITION = re.compile(r"^[ \t]*[A-Za-z0-9_-]+\s*::=", re.MULTILINE)


class _Lexeme(NamedTuple):
    kind: str
    text: str
    line: int


def is_ebnf(text: str) -> bool:
    """Return whether a line of `text` begins to define a rule with `::=`, which Lark does not know."""
    return _DEFINITION.search(text) is not None


def lark_of_ebnf(text: str) -> str:
    """Return a Lark grammar for the texts that the rule `root` of an EBNF grammar matches. Takes linear time.

    Raises:
        ValueError: the grammar is wrong, too long, or has no `root`.
    """
    if len(text) > MAX_EBNF:
        raise ValueError(f"EBNF grammar must have at most {MAX_EBNF} characters, got {len(text)}")
    lexemes = list(_lexemes(text))
    starts = [index for index, lexeme in enumerate(lexemes) if lexeme.kind == "defines"]
    names: dict[str, str] = {}
    for index in starts:
        if not index or lexemes[index - 1].kind != "name":
            raise _error("must have a name before ::=", lexemes[index])
        name = lexemes[index - 1].text
        if name in names:
            raise _error("must define each rule once", lexemes[index - 1])
        names[name] = f"r{len(names)}_{re.sub('[^a-z0-9_]', '_', name.lower())}"
    if lexemes and (not starts or starts[0] != 1):
        raise _error("must begin with name ::=", lexemes[0])
    if "root" not in names:
        raise ValueError("EBNF grammar must define the rule root")
    rules = [f"start: {names['root']}"]
    for name, start, end in zip(names.values(), starts, [*(one - 1 for one in starts[1:]), len(lexemes)], strict=True):
        rules.append(f"{name}: {_body(lexemes[start + 1 : end], names, lexemes[start])}")
    return "\n".join(rules)


def _lexemes(text: str) -> Iterator[_Lexeme]:
    line = 1
    for found in _LEXEME.finditer(text):
        kind = found.lastgroup if found.lastgroup not in ("least", "comma", "most") else "repeat"
        if kind == "wrong":
            raise _error("must have rules of EBNF", _Lexeme(kind, found[0], line))
        if kind == "repeat" and found["least"]:
            least, comma, most = int(found["least"]), found["comma"], found["most"]
            last = least if comma is None else least if most is None else int(most)
            if last > MAX_REPEATS or last < least:
                rule = f"must have repetitions {{m,n}} with m <= n <= {MAX_REPEATS}"
                raise _error(rule, _Lexeme(kind, found[0], line))
            shown = f"{{{least},}}" if comma is not None and most is None else f"{{{least},{last}}}"
            yield _Lexeme(kind, shown, line)
        elif kind != "skip" and kind is not None:
            yield _Lexeme(kind, found[0], line)
        line += found[0].count("\n")


def _body(lexemes: Sequence[_Lexeme], names: dict[str, str], before: _Lexeme) -> str:
    """Return a Lark body for the lexemes of a rule, which come after `before`."""
    parts: list[str] = []
    depth = 0
    last = before.kind
    for lexeme in lexemes:
        is_empty = last in ("defines", "open", "or")
        match lexeme.kind:
            case "name":
                if lexeme.text not in names:
                    raise _error("must define every rule that it uses", lexeme)
                part = names[lexeme.text]
            case "literal":
                part = _literal(lexeme)
            case "characters":
                part = _characters(lexeme)
            case "any":
                part = "/(?s:.)/"
            case "repeat":
                if is_empty or last == "repeat":
                    raise _error("must have something to repeat before each repetition", lexeme)
                part = lexeme.text
            case "open":
                depth += 1
                if depth > MAX_DEPTH:
                    raise _error(f"must have parentheses at most {MAX_DEPTH} levels deep", lexeme)
                part = "("
            case _:
                depth -= lexeme.kind == "close"
                if depth < 0:
                    raise _error("must open each parenthesis that it closes", lexeme)
                part = f'"" {lexeme.text}' if is_empty else lexeme.text
        parts.append(part if lexeme.kind == "repeat" else f" {part}")
        last = lexeme.kind
    if depth:
        raise _error("must close all parentheses in the rule that begins", before)
    if last in ("defines", "or"):
        parts.append(' ""')
    return "".join(parts).strip()


def _literal(lexeme: _Lexeme) -> str:
    values = [_value(lexeme, found) for found in _CHARACTER.finditer(lexeme.text, 1, len(lexeme.text) - 1)]
    characters = [json.dumps(one) if " " <= one <= "~" else f"/{_escape(one)}/" for one in values]
    return f"({' '.join(characters)})" if len(characters) > 1 else "".join(characters) or '""'


def _characters(lexeme: _Lexeme) -> str:
    """Return a regular expression for one character of a class."""
    inner = lexeme.text[1:-1]
    is_negated = inner.startswith("^")
    items: list[str] = []
    found = list(_CHARACTER.finditer(inner, int(is_negated)))
    values = [_value(lexeme, one) for one in found]
    index = 0
    while index < len(values):
        low = high = values[index]
        if index + 2 < len(values) and found[index + 1][0] == "-":
            high = values[index + 2]
            index += 2
        if low > high:
            raise _error("must have ranges of characters in ascending order", lexeme)
        items.append(_escape(low) if low == high else f"{_escape(low)}-{_escape(high)}")
        index += 1
    if not items:
        raise _error("must have classes of at least one character", lexeme)
    return f"/[{'^' if is_negated else ''}{''.join(items)}]/"


def _value(lexeme: _Lexeme, found: re.Match[str]) -> str:
    """Return the character that is meant by a character or an escape."""
    digits = found["x"] or found["u"] or found["U"]
    if digits is None:
        escaped = found["other"]
        if escaped is not None and escaped.isalnum() and escaped not in _CONTROLS:
            raise _error("must have the escapes n, r, t, x41, u0041 or U00000041", lexeme)
        return found["plain"] if escaped is None else _CONTROLS.get(escaped, escaped)
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise _error("must have escapes of characters", lexeme)
    return chr(code)


def _escape(character: str) -> str:
    return f"\\x{{{ord(character):x}}}"


def _error(rule: str, lexeme: _Lexeme) -> ValueError:
    shown = lexeme.text if len(lexeme.text) <= 40 else f"{lexeme.text[:40]}..."
    return ValueError(f"EBNF grammar {rule}, got {shown} in line {lexeme.line}")
