"""Bounds on Lark grammars, see `limits`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

from pagewood.engine.grammar.limits import MAX_EXPRESSION, MAX_EXPRESSIONS, MAX_LARK, check_size
from pagewood.engine.grammar.schema_limits import check_schema

MAX_PARENTHESES = 5_000
"""Conditions of rules (`%if`) are parsed by recursion."""

_LEXEME = re.compile(
    r"""
      (?P<skip>[ \t]+|(?:\#|//)[^\n]*)
    | (?P<string>"(?:\\.|[^"\\\n])*"i?)
    | (?P<regex>/(?:\\.|[^/\\])+/[imslux]*)
    | (?P<special><[^<>\s]+>)
    | (?P<name>[!?]*[A-Za-z_][A-Za-z0-9_\-]*)
    | (?P<json>%json|%regex|%llguidance)
    | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_UNSUPPORTED = ("max_tokens", "temperature", "stop")
"""Attributes of rules: the first two need a sampler, the last one takes tokens back."""
_decoder = json.JSONDecoder()


@dataclass(slots=True)
class _Definition:
    """A rule or a terminal: the characters of its own expressions, and the terminals that it refers to."""

    is_terminal: bool
    size: int = 0  # written by: _definitions
    references: list[str] = field(default_factory=list[str])  # written by: _definitions


def check_lark(text: str) -> None:
    """Raise ValueError if a Lark grammar cannot be compiled in bounded time, or has an attribute that is ignored.

    Wrong syntax is left to the library.
    """
    check_size("lark grammar", text, MAX_LARK)
    if text.count("(") > MAX_PARENTHESES:
        raise ValueError(f"lark grammar must have at most {MAX_PARENTHESES} parentheses, got {text.count('(')}")
    definitions = _definitions(text)
    sizes: dict[str, int] = {}
    for name, definition in definitions.items():
        size = _expanded(name, definitions, sizes)
        if definition.is_terminal and size > MAX_EXPRESSION:
            raise ValueError(
                f"lark terminal {name} must have at most {MAX_EXPRESSION} characters with all that it refers to, "
                f"got {size}"
            )
    total = sum(sizes[name] for name in definitions)
    if total > MAX_EXPRESSIONS:
        raise ValueError(f"lark grammar must have at most {MAX_EXPRESSIONS} characters, all references expanded")


def _definitions(text: str) -> dict[str, _Definition]:
    """Return all rules and terminals by name; one that is defined twice has both bodies."""
    definitions: dict[str, _Definition] = {}
    current = _Definition(is_terminal=False)
    lexemes = list(_lexemes(text))
    depth = 0
    for index, (kind, value) in enumerate(lexemes):
        following = lexemes[index + 1][1] if index + 1 < len(lexemes) else ""
        match kind:
            case "name" if depth == 0 and following in (":", "[", "{", "."):
                if _begins_definition(lexemes, index):
                    name = value.lstrip("!?")
                    current = definitions.setdefault(name, _Definition(is_terminal=name.lstrip("_")[:1].isupper()))
                else:
                    current.references.append(value)
            case "name" if depth and value in _UNSUPPORTED and following == "=":
                raise ValueError(f"lark grammar must not have the attribute {value}, which has no effect here")
            case "name":
                current.references.append(value)
            case "string" | "regex" | "json":
                current.size += len(value)
            case "other" if value in "[]":
                depth = max(0, depth + (1 if value == "[" else -1))
            case _:
                pass
    return definitions


def _begins_definition(lexemes: list[tuple[str, str]], index: int) -> bool:
    """Say whether a colon follows the name at `index`, perhaps after attributes, parameters or a priority."""
    if index and lexemes[index - 1][1] != "\n":
        return False
    closing: str | None = None
    for _, value in lexemes[index + 1 : index + 200]:
        if value == ":" and closing is None:
            return True
        if closing is None and value in ("[", "{"):
            closing = "]" if value == "[" else "}"
            continue
        if value == closing:
            closing = None
        elif value == "\n":
            return False
    return False


def _lexemes(text: str) -> Iterator[tuple[str, str]]:
    """Yield kinds and texts of lexemes, without white space; JSON after a keyword is one of them, and is checked."""
    position = 0
    while position < len(text):
        found = cast("re.Match[str]", _LEXEME.match(text, position))
        position = found.end()
        kind = cast("str", found.lastgroup)
        if kind == "json":
            start = position + len(text[position:]) - len(text[position:].lstrip())
            position = _after_json(found[0], text, start)
            yield "json", text[start:position] if found[0] == "%regex" else ""
        elif kind != "skip":
            yield kind, found[0]


def _after_json(keyword: str, text: str, start: int) -> int:
    try:
        value, end = _decoder.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"lark grammar must have JSON after {keyword}: {error}") from None
    if keyword == "%json":
        check_schema(value, allows_options=True)
    return end


def _expanded(name: str, definitions: dict[str, _Definition], sizes: dict[str, int]) -> int:
    """Return the size of a definition with all terminals that it refers to, without recursion; cycles count once."""
    waiting = [name]
    open_: set[str] = set()
    while waiting:
        top = waiting[-1]
        if top in sizes:
            waiting.pop()
            continue
        definition = definitions[top]
        terminals = [name for name in definition.references if name in definitions and definitions[name].is_terminal]
        missing = [name for name in dict.fromkeys(terminals) if name not in sizes and name not in open_]
        if missing and top not in open_:
            open_.add(top)
            waiting += missing
            continue
        sizes[top] = definition.size + sum(sizes.get(name, 0) for name in terminals)
        open_.discard(top)
        waiting.pop()
    return sizes[name]
