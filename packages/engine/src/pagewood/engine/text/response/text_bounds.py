"""The bounds in a schema on a string that is written without quotes, as regular expressions of a grammar."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

TEXT = "/(?s:.*)/"
_UNESCAPED_SLASH = re.compile(r"((?<!\\)(?:\\\\)*)/")
_ENDS_WITH_ANCHOR = re.compile(r"(?<!\\)(?:\\\\)*\$\Z")


def text_bounds(schema: Mapping[str, Any]) -> list[str]:
    """Return the expressions in Lark's slashes that a text must all match, from `pattern` and its length.

    Other keywords of strings, such as `format`, restrict only a text in quotes.
    """
    found: list[str] = []
    low, high, pattern = schema.get("minLength"), schema.get("maxLength"), schema.get("pattern")
    if isinstance(low, int) or isinstance(high, int):
        found.append(rf"/(?s:.{{{int(low or 0)},{'' if high is None else int(high)}}})/")
    if isinstance(pattern, str):
        alternatives = "|".join(map(_whole, _alternatives(pattern)))
        escaped = _UNESCAPED_SLASH.sub(r"\1\/", alternatives).replace("\n", r"\n")
        found.append(f"/{escaped}/")
    return found


def _whole(alternative: str) -> str:
    """Return an expression that matches the texts in which `alternative`, which has no `|` of its own, is found."""
    behind = _ENDS_WITH_ANCHOR.search(alternative)
    body = alternative[:-1] if behind else alternative
    before = "" if body.startswith("^") else "(?s:.*)"
    return f"{before}(?:{body.removeprefix('^')}){'' if behind else '(?s:.*)'}"


def _alternatives(pattern: str) -> list[str]:
    """Return the alternatives of an expression, divided at each `|` outside of groups and classes."""
    found, depth, in_class, at = [""], 0, False, 0
    while at < len(pattern):
        char = pattern[at : at + 2] if pattern[at] == "\\" else pattern[at]
        at += len(char)
        if in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and depth == 0:
            found.append("")
            continue
        found[-1] += char
    return found
