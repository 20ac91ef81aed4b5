"""The text that a parser reads, piece by piece."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeAlias, TypeVar

_T = TypeVar("_T")
Reading: TypeAlias = Generator[None, None, _T]
"""A parser that yields when it needs more text. Its results must not depend on how the text is cut into pieces."""

_SPACE = re.compile(r"\s*")


class Source:
    """The text that has arrived and is not parsed yet.

    Invariant: `text[at:]` comes next; if `mark` is set, `text[mark:]` is kept, so that it can be parsed again.
    """

    __slots__ = ("at", "ended", "idle", "is_cut", "mark", "text")

    def __init__(self) -> None:
        self.text = ""  # written by: Source
        self.at = 0  # written by: Source, calls, values, watch, parser
        self.ended = False  # written by: parser
        self.is_cut = False  # written by: parser
        """Whether the text has ended, but was not ended by the model."""
        self.mark: int | None = None  # written by: Source, calls, values, parser
        self.idle: tuple[Callable[[str], object], Callable[[str], None]] | None = None  # written by: Source, watch
        """While nothing is held back: the search for a possible delimiter, and the receiver of text without one."""

    def append(self, text: str) -> None:
        """Append text; drop the parsed text."""
        self.idle = None
        keep = self.at if self.mark is None else self.mark
        self.text = self.text[keep:] + text
        self.at -= keep
        if self.mark is not None:
            self.mark = 0

    def peek(self) -> Reading[str]:
        """Return the next character; empty at the end."""
        while self.at >= len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at]

    def take(self, number: int) -> Reading[str]:
        """Return the next characters without passing them; fewer at the end."""
        while len(self.text) - self.at < number and not self.ended:
            yield
        return self.text[self.at : self.at + number]

    def space(self) -> Reading[str]:
        """Pass white space and return it."""
        passed = ""
        while True:
            start = self.at
            self.at = _end(_SPACE.match(self.text, start), start)
            passed += self.text[start : self.at]
            if self.at < len(self.text) or self.ended:
                return passed
            yield

    def run(self, pattern: re.Pattern[str], most: int) -> Reading[str]:
        """Pass the longest run of characters of a class (`[..]*`), at most `most` of them, and return it."""
        passed = ""
        while True:
            start = self.at
            self.at = _end(pattern.match(self.text, start, start + most - len(passed)), start)
            passed += self.text[start : self.at]
            if self.at < len(self.text) or self.ended or len(passed) >= most:
                return passed
            yield

    def follows(self, literal: str) -> Reading[bool]:
        """Return whether `literal` comes next, without passing it."""
        while True:
            there = self.text[self.at : self.at + len(literal)]
            if there == literal:
                return True
            if self.ended or not literal.startswith(there):
                return False
            yield


def _end(match: re.Match[str] | None, otherwise: int) -> int:
    return otherwise if match is None else match.end()
