"""The possible lengths of a regular expression's matches, read from its text.

RE2 compiles expressions, but does not report how long their matches can be. So an expression that RE2 accepts is read
again here, by the rules of RE2's syntax. Syntax that this module does not know is refused.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

_REPEAT = re.compile(r"\{(0|[1-9]\d*)(?:(,)(0|[1-9]\d*)?)?\}", re.ASCII)
_GROUP = re.compile(r"\?(?:P?<\w+>|[imsU]*(?:-[imsU]*)?:?)")
_ESCAPE = re.compile(r"[dDsSwWafnrtv]|[pP](?:\{[^}]*\}|.)|x(?:\{[0-9A-Fa-f]+\}|[0-9A-Fa-f]{2})|[^0-9A-Za-z]", re.DOTALL)
_ASSERTIONS = "bBAz"


class Width(NamedTuple):
    """The lengths that a match can have, in characters, and its dependence on its neighbours."""

    least: int
    most: float
    """Infinity: there is no limit."""
    looks_around: bool
    """Whether a match depends on the characters before or after it (`^ $ \\b \\B \\A \\z`)."""


@dataclass(slots=True)
class _Group:
    """The part of a group that was read. Invariant: the last item is in neither sum, because it may be repeated."""

    least: int = 0  # written by: _Group
    most: float = 0  # written by: _Group
    least_branch: float = math.inf  # written by: _Group. Of the alternatives before
    most_branch: float = 0  # written by: _Group
    item: tuple[int, float] = (0, 0)  # written by: _Group

    def add(self, least: int, most: float) -> None:
        """Append an item."""
        self.least, self.most = self.least + self.item[0], self.most + self.item[1]
        self.item = least, most

    def repeat(self, low: int, high: float) -> None:
        """Repeat the last item `low` to `high` times."""
        least, most = self.item
        self.item = least * low, most * high if most and high else 0

    def alternate(self) -> None:
        """Begin another alternative."""
        self.add(0, 0)
        self.least_branch, self.most_branch = min(self.least_branch, self.least), max(self.most_branch, self.most)
        self.least, self.most = 0, 0

    def widths(self) -> tuple[int, float]:
        """Return the least and the largest width of the ended group."""
        self.alternate()
        return int(self.least_branch), self.most_branch


def width_of(expression: str) -> Width:
    """Return the possible widths of the matches of an expression that RE2 has accepted.

    Raises:
        ValueError: the expression has an escape that is not known here.
    """
    groups, looks_around, at = [_Group()], False, 0
    while at < len(expression):
        character = expression[at]
        group = groups[-1]
        repeat = _REPEAT.match(expression, at)
        at += 1
        if character == "\\":
            escape = _ESCAPE.match(expression, at)
            if escape is None and expression[at] not in _ASSERTIONS:
                raise ValueError(f"the escape \\{expression[at]} is not supported")
            looks_around |= escape is None
            group.add(*((1, 1) if escape else (0, 0)))
            at = escape.end() if escape else at + 1
        elif character == "[":
            at = _end_of_class(expression, at)
            group.add(1, 1)
        elif character == "(":
            opening = _GROUP.match(expression, at)
            at = opening.end() if opening else at
            if opening and expression[at - 1] not in ":>":
                at += 1  # flags for the rest of the group have no content
            else:
                groups.append(_Group())
        elif character == ")":
            groups.pop()
            groups[-1].add(*group.widths())
        elif character == "|":
            group.alternate()
        elif character in "*+?":
            group.repeat(character == "+", 1 if character == "?" else math.inf)
            at += expression[at : at + 1] == "?"
        elif repeat:
            low, comma, high = repeat.groups()
            group.repeat(int(low), int(high) if high else math.inf if comma else int(low))
            at = repeat.end()
            at += expression[at : at + 1] == "?"
        elif character in "^$":
            looks_around = True
            group.add(0, 0)
        else:
            group.add(1, 1)
    return Width(*groups[0].widths(), looks_around)


def _end_of_class(expression: str, at: int) -> int:
    """Return the place after the class of characters whose content begins at `at`."""
    at += expression[at] == "^"
    is_first = True
    while expression[at] != "]" or is_first:
        is_first = False
        name_end = expression.find(":]", at + 2) if expression.startswith("[:", at) else -1
        if name_end >= 0:
            at = name_end + 2
        elif expression[at] == "\\":
            if expression[at + 1] in "QE":
                raise ValueError(f"the escape \\{expression[at + 1]} is not supported")
            at += 2
        else:
            at += 1
    return at + 1
