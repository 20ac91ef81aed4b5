"""Matches modules with the patterns of a quantisation configuration."""

# pyright: basic
# re2 has no types.

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

import re2

Matches = Callable[[str], bool]


def module_pattern(text: str, source: str, *, with_class: bool = False) -> Matches:
    """Return a test whether a pattern means a module: `re:` and an expression for its beginning, or a name.

    Expressions are RE2's, which take linear time in the length of the name.

    Args:
        text: the pattern.
        source: of the configuration, for errors.
        with_class: whether `Linear` means all linear modules.

    Raises:
        ValueError: the expression is not valid.
    """
    if text.startswith("re:"):
        options = re2.Options()
        options.log_errors = False  # not ours
        try:
            expression = re2.compile(text[3:], options)
        except (re2.error, UnicodeEncodeError) as error:
            raise ValueError(f"{source}: {text[:80]!r} must be an expression of RE2: {error}") from error
        return lambda name: expression.match(name) is not None
    if with_class and text == "Linear":
        return lambda name: True
    return lambda name: name == text


def within(text: str) -> Matches:
    """Return a test whether a pattern means a module or one around it: `mlp.gate` means `a.mlp.gate.b`.

    `*` stands for any characters.
    """
    wanted = f".{text.strip('.')}."
    if any(character in wanted for character in "*?["):
        return lambda name: fnmatchcase(name, text) or fnmatchcase(f".{name}.", f"*{wanted}*")
    return lambda name: wanted in f".{name}."
