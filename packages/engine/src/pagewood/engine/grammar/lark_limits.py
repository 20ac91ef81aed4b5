"""Bounds on Lark grammars, see `limits`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from pagewood.engine.grammar.limits import MAX_EXPRESSION, MAX_EXPRESSIONS, MAX_LARK, MAX_LITERAL, check_size
from pagewood.engine.grammar.places import remark_before
from pagewood.engine.grammar.schema_limits import check_schema

MAX_PARENTHESES = 5_000
"""Conditions of rules (`%if`) are parsed by recursion."""
MAX_DEPTH = 200
"""Levels of references. They are compiled by recursion, and an error at the end of a chain is passed up with the whole
call stack if RUST_BACKTRACE is set: 2,000 levels took a minute."""
MAX_NARROWED = 500
"""Intersections and complements that are checked for matching any text, which takes about 1 ms each."""

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
    """A rule or a terminal: the characters of its own expressions, and the names that it refers to."""

    is_terminal: bool
    is_expression: bool
    """Whether it becomes one expression: a terminal, or a rule with attributes, such as lazy."""
    start: int
    """Position of its text in the grammar."""
    end: int  # written by: _definitions
    is_narrowed: bool = False  # written by: _definitions
    """Whether it has an intersection or a complement of its own."""
    size: int = 0  # written by: _definitions
    references: list[str] = field(default_factory=list[str])  # written by: _definitions


def check_lark(text: str, *, allows_text: Callable[[str], bool]) -> None:
    """Raise ValueError if a Lark grammar cannot be compiled in bounded time, or has an attribute that the library
    ignores, or an expression that matches no text, in which a model could not continue.

    Wrong syntax is left to the library.

    Args:
        text: the grammar.
        allows_text: returns whether a grammar matches a text; also True for a wrong grammar.
    """
    check_size("lark grammar", text, MAX_LARK)
    if (number := text.count("(")) > MAX_PARENTHESES:
        raise ValueError(f"lark grammar must have at most {MAX_PARENTHESES} parentheses, got {number}")
    definitions = _definitions(text)
    sizes = _expanded_sizes(definitions)
    for name, definition in definitions.items():
        if definition.is_expression and sizes[name] > MAX_EXPRESSION:
            raise ValueError(
                f"lark {name} must have at most {MAX_EXPRESSION} characters with all terminals that it refers to, "
                f"got {sizes[name]}"
            )
    if (total := sum(sizes.values())) > MAX_EXPRESSIONS:
        raise ValueError(
            f"lark grammar must have at most {MAX_EXPRESSIONS} characters with its terminals expanded, got {total}"
        )
    references = {name: definition.references for name, definition in definitions.items()}
    for name in _narrowed(definitions)[:MAX_NARROWED]:
        parts = [definitions[inner] for inner in _reached([name], references)]
        if not allows_text("\n".join([f"start: {name}", *(text[part.start : part.end] for part in parts)])):
            places = (remark_before(text, part.start) for part in parts)
            place = next(filter(None, places), f"lark {name} ")
            raise ValueError(f"{place}must allow a text, got an expression that allows none")


def with_schemas(text: str, rewrite: Callable[[object], str]) -> str:
    """Return a checked Lark grammar with another body for each JSON schema after %json."""
    parts: list[str] = []
    position = num_copied = 0
    while position < len(text):
        found = cast("re.Match[str]", _LEXEME.match(text, position))
        position = found.end()
        if found.lastgroup == "json":
            start = _start_of_json(text, position)
            value, position = _decoder.raw_decode(text, start)
            if found[0] == "%json":
                try:
                    body = rewrite(value)
                except ValueError as error:
                    raise ValueError(f"{remark_before(text, start)}{error}") from None
                parts += [text[num_copied : found.start()], body]
                num_copied = position
    return "".join([*parts, text[num_copied:]])


def _definitions(text: str) -> dict[str, _Definition]:
    """Return all rules and terminals by name; a name that is defined twice has both bodies."""
    definitions: dict[str, _Definition] = {}
    current = _Definition(is_terminal=False, is_expression=False, start=0, end=0)
    lexemes = list(_lexemes(text))
    depth = 0
    for index, (kind, value, position) in enumerate(lexemes):
        following = lexemes[index + 1][1] if index + 1 < len(lexemes) else ""
        match kind:
            case "name" if depth == 0 and following in (":", "[", "{", "."):
                if _begins_definition(lexemes, index):
                    name = value.lstrip("!?")
                    is_terminal = name.lstrip("_")[:1].isupper()
                    new = _Definition(
                        is_terminal=is_terminal,
                        is_expression=is_terminal or following == "[",
                        start=position,
                        end=len(text),
                    )
                    current.end = min(current.end, position)
                    current = definitions.setdefault(name, new)
                else:
                    current.references.append(value)
            case "name" if depth and value in _UNSUPPORTED and following == "=":
                raise ValueError(f"lark grammar must not have the attribute {value}, which has no effect here")
            case "name":
                current.references.append(value)
            case "string" | "regex" | "json":
                check_size(f"lark {kind}", value, MAX_EXPRESSION if kind == "regex" else MAX_LITERAL)
                current.size += len(value)
            case "other" if value in "[]":
                depth = max(0, depth + (1 if value == "[" else -1))
            case "other" if value in "&~":
                current.is_narrowed = True
            case _:
                pass
    return definitions


def _narrowed(definitions: dict[str, _Definition]) -> list[str]:
    """Return the names of the expressions that may match no text and that rules use directly."""
    users: dict[str, list[str]] = {name: [] for name in definitions}
    used: set[str] = set()
    for name, definition in definitions.items():
        for inner in definition.references:
            if inner in definitions:
                users[inner].append(name)
                if not definition.is_expression:
                    used.add(inner)
    narrowed = _reached([name for name, found in definitions.items() if found.is_narrowed], users)
    return [name for name in narrowed if name in used and definitions[name].is_expression]


def _reached(names: Sequence[str], links: Mapping[str, Sequence[str]]) -> list[str]:
    """Return some names and all names reachable from them."""
    found = dict.fromkeys(names)
    pending = list(names)
    while pending:
        new = [name for name in links[pending.pop()] if name in links and name not in found]
        found.update(dict.fromkeys(new))
        pending += new
    return list(found)


def _begins_definition(lexemes: list[tuple[str, str, int]], index: int) -> bool:
    """Return whether a colon follows the name at `index`, perhaps after attributes, parameters or a priority."""
    if index and lexemes[index - 1][1] != "\n":
        return False
    closing: str | None = None
    for _, value, _ in lexemes[index + 1 : index + 200]:
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


def _lexemes(text: str) -> Iterator[tuple[str, str, int]]:
    """Yield kinds, texts and positions of lexemes, without white space.

    JSON after a keyword is one of them, and is checked.
    """
    position = 0
    while position < len(text):
        found = cast("re.Match[str]", _LEXEME.match(text, position))
        position = found.end()
        kind = cast("str", found.lastgroup)
        if kind == "json":
            start = _start_of_json(text, position)
            position = _after_json(found[0], text, start)
            yield "json", text[start:position] if found[0] == "%regex" else "", found.start()
        elif kind != "skip":
            yield kind, found[0], found.start()


def _start_of_json(text: str, position: int) -> int:
    return position + len(text[position:]) - len(text[position:].lstrip())


def _after_json(keyword: str, text: str, start: int) -> int:
    try:
        value, end = _decoder.raw_decode(text, start)
    except RecursionError:
        raise ValueError(f"lark grammar must have JSON after {keyword} that is not nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"lark grammar must have JSON after {keyword}: {error}") from None
    if keyword == "%json":
        try:
            check_schema(value, allows_options=True)
        except ValueError as error:
            raise ValueError(f"{remark_before(text, start)}{error}") from None
    return end


def _expanded_sizes(definitions: dict[str, _Definition]) -> dict[str, int]:
    """Return the size of each definition with all terminals that it refers to; in a circle, each counts once.

    Raises:
        ValueError: a definition refers to another, that one to a third, and so on for too many levels.
    """
    sizes: dict[str, int] = {}
    open_: dict[str, Iterator[str]] = {}  # the path from a definition to the present one
    for first in definitions:
        if first not in sizes:
            open_[first] = iter(definitions[first].references)
        while open_:
            name, references = next(reversed(open_.items()))
            inner = next((inner for inner in references if inner in definitions and inner not in sizes), None)
            if inner is None:
                del open_[name]
                definition = definitions[name]
                terminals = (inner for inner in definition.references if inner in sizes)
                sizes[name] = definition.size + sum(
                    sizes[inner] for inner in terminals if definitions[inner].is_terminal
                )
            elif inner not in open_:
                open_[inner] = iter(definitions[inner].references)
                if len(open_) > MAX_DEPTH:
                    raise ValueError(f"lark grammar must refer at most {MAX_DEPTH} levels deep, from {first}")
    return sizes
