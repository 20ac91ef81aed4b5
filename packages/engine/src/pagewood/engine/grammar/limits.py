"""Checks before a grammar library is called: refuses inputs that would take minutes or gigabytes, or end the process.

llguidance has limits of its own on compiled grammars and on every mask, and they hold for almost all inputs. The limits
here are for the rest: its parsers and compilers recurse, and the cost of one unit of its fuel grows with the size of an
expression. `packages/engine/tests/grammar/test_hostile.py` has an input for each.
"""

from __future__ import annotations

import json
import re
from typing import Any, cast

MAX_TEXT = 262_144
"""Characters of a JSON schema, a list of choices or a structural tag."""
MAX_LARK = 65_536
"""Characters of a Lark grammar."""
MAX_EXPRESSION = 4_096
"""Characters of a regular expression, or of a Lark terminal with all that it refers to. One mask over an expression of
this size takes up to 0.1 s in the worst case, and four times that for twice the size."""
MAX_EXPRESSIONS = 65_536
"""Characters of all regular expressions of a grammar together."""
MAX_LITERAL = 16_384
"""Characters of one literal string; each takes about a kilobyte."""
MAX_NESTING = 100
"""Levels of brackets in JSON."""
MAX_CHOICES = 10_000

_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")


def check_size(name: str, text: str, most: int) -> None:
    """Raise ValueError if `text` is longer than `most` characters, or holds half of a surrogate pair."""
    if len(text) > most:
        raise ValueError(f"{name} must have at most {most} characters, got {len(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} must hold characters only, got the lone surrogate U+{ord(text[error.start]):04X} at {error.start}"
        ) from None


def read_json(name: str, text: str) -> Any:
    """Return the value of a JSON text of bounded size and nesting.

    Raises:
        ValueError: it is too long, nested too deeply, or not JSON.
    """
    check_size(name, text, MAX_TEXT)
    depth = 0
    for bracket in _BRACKET.finditer(_JSON_STRING.sub("", text)):
        depth += 1 if bracket[0] in "[{" else -1
        if depth > MAX_NESTING:
            raise ValueError(f"{name} must be nested at most {MAX_NESTING} levels deep")
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError(f"{name} must be nested at most {MAX_NESTING} levels deep") from None
    except ValueError as error:
        raise ValueError(f"{name} must be JSON: {error}") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def read_choices(text: str) -> list[str]:
    """Return the strings of a grammar of the kind "choice".

    Raises:
        ValueError: it is not a JSON array of distinct strings that are not empty, or there are too many.
    """
    value = read_json("choice", text)
    if not isinstance(value, list):
        raise ValueError(f"choice must be a JSON array of strings, got {type(value).__name__}")
    choices = cast("list[object]", value)
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise ValueError(f"choice must have 1 to {MAX_CHOICES} strings, got {len(choices)}")
    seen: set[str] = set()
    for index, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice:
            raise ValueError(f"choice[{index}] must be a string that is not empty, got {json.dumps(choice)[:100]}")
        if choice in seen:
            raise ValueError(f"choice must have distinct strings, got {json.dumps(choice)[:100]} twice")
        check_size(f"choice[{index}]", choice, MAX_LITERAL)
        seen.add(choice)
    return cast("list[str]", choices)


def check_expression(name: str, expression: str) -> None:
    """Raise ValueError if a regular expression is too long."""
    check_size(name, expression, MAX_EXPRESSION)
