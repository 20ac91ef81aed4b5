"""Which modules a configuration of quantisation means."""

# pyright: basic
# re2 has no types.

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

import re2

Matches = Callable[[str], bool]


def module_pattern(text: str, source: str, *, with_class: bool = False) -> Matches:
    """Return what decides whether a module is meant: `re:` and an expression for its beginning, or a name.

    Expressions are RE2's, which take a time that is linear in the name.

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
    """Return what decides whether a module or one that it is a part of is meant: `mlp.gate` means `a.mlp.gate.b`.

    `*` stands for any characters.
    """
    wanted = f".{text.strip('.')}."
    if any(character in wanted for character in "*?["):
        return lambda name: fnmatchcase(name, text) or fnmatchcase(f".{name}.", f"*{wanted}*")
    return lambda name: wanted in f".{name}."
