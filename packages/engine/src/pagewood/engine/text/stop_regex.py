"""Finds regular expressions in streamed text, across the parts of the text, without showing any part of a match.

RE2 searches in linear time for any expression, so no client can hang the process.
"""

# pyright: basic
# re2 has no types.

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple, TypeAlias

import re2

from pagewood.engine.text.regex_width import Width, width_of
from pagewood.engine.text.stop import StopStrings

MAX_MATCH = 256
"""Longest match that an expression may have, in characters; that much text is held back."""
MAX_LENGTH = 512
"""Longest expression, in characters."""
# Bytes of memory of a compiled expression. RE2 gives up early on one that exceeds the first. So no expression takes
# more than milliseconds to compile, or to search if RE2 cannot keep the states of its automaton.
_MOST_COMPILED_BYTES = 1 << 17
_SEARCH_BYTES = 1 << 20
_NUM_REMEMBERED = 32
"""Compiled expressions of the latest requests, which the answers to one request share."""
# What can come after a match: RE2 only looks whether it is a letter, another character, or the end of line or text.
_AFTER = ("x", "-", "\n", "")


class StopExpressions:
    """Searches a text for the first match of several regular expressions or strings.

    The first match is the one that ends first; of several that end together, the one that starts first. So the result
    does not depend on how the text is divided. Invariant: the text that `push` has returned contains no part of the
    match. A match that depends on the character after it is found when that character is known.

    Raises:
        ValueError: an expression is not one of RE2, or its matches may be empty or too long; or all of them together
            are too large. A string is empty.
    """

    __slots__ = ("_before", "_held", "_looks_around", "_num_held", "_pattern", "matched")

    def __init__(self, expressions: Sequence[str], *, strings: Sequence[str] = ()) -> None:
        """Search for `expressions`, in the syntax of RE2, and for `strings`."""
        if not all(strings):
            raise ValueError(f"stop must hold no empty string, got {list(strings)}")
        self._pattern, self._looks_around, longest = _compiled(tuple(expressions), tuple(strings))
        # An incomplete match has at least one character less than the longest, unless it waits for the next character.
        self._num_held = longest if self._looks_around else longest - 1
        self._before = ""  # written by: push, flush. Last character that was shown
        self._held = ""  # written by: push, flush
        self.matched: str | None = None  # written by: _end
        """The text of the match; None before there is one."""

    @property
    def num_held(self) -> int:
        """Characters that are held back, because they may belong to a match."""
        return len(self._held)

    def push(self, text: str) -> str:
        """Append `text` and return the text that may be shown now; empty after a match."""
        if self.matched is not None or not text:
            return ""
        window = self._before + self._held + text
        start, known = len(self._before), len(window) - self._looks_around
        match = self._match(window, known)
        if match is not None:
            ends = range(start, known)
            end = start + bisect_left(ends, True, key=lambda end: self._match(window, end) is not None)
            match = self._match(window, end)
        elif self._looks_around:
            match = self._match_at_the_end(window)
        if match is not None:
            return self._end(window, match)
        num_shown = max(len(window) - self._num_held, start)
        shown, self._held = window[start:num_shown], window[num_shown:]
        self._before = window[num_shown - 1 : num_shown] if num_shown else ""
        return shown

    def flush(self) -> str:
        """Return the text that was held back, up to a match; the text has ended, and a new text may begin."""
        window, start = self._before + self._held, len(self._before)
        match = None if self.matched is not None else self._match(window, len(window))
        if match is not None:
            return self._end(window, match)
        self._before = self._held = ""
        return window[start:]

    def _match(self, window: str, end: int) -> tuple[int, int] | None:
        """Return the first match that ends at `end` or before, as start and end."""
        found = self._pattern.search(window, len(self._before), end)
        return None if found is None else found.span()

    def _match_at_the_end(self, window: str) -> tuple[int, int] | None:
        """Return the match that ends with the window, if it does not depend on the next character."""
        first = None
        for after in _AFTER:
            match = self._match(window + after, len(window))
            if match is None or (first is not None and match != first):
                return None
            first = match
        return first

    def _end(self, window: str, match: tuple[int, int]) -> str:
        """End the text before a match; return the remaining text to show."""
        self.matched = window[match[0] : match[1]]
        self._held = ""
        return window[len(self._before) : match[0]]


Stops: TypeAlias = StopStrings | StopExpressions
"""A search for the end of a text."""


def stops_of(strings: Sequence[str], expressions: Sequence[str]) -> Stops:
    """Return a search for stop strings and stop expressions.

    Raises:
        ValueError: a string is empty, or an expression cannot be found in a stream (see `StopExpressions`).
    """
    return StopExpressions(expressions, strings=strings) if expressions else StopStrings(strings)


class _Compiled(NamedTuple):
    """The shared part of searches for the same expressions and strings."""

    pattern: Any
    looks_around: bool
    longest: int
    """Longest match, in characters."""


@lru_cache(maxsize=_NUM_REMEMBERED)
def _compiled(expressions: tuple[str, ...], strings: tuple[str, ...]) -> _Compiled:
    widths = [_checked_width(one) for one in expressions]
    together = "|".join([*(f"(?:{one})" for one in expressions), *(re2.escape(one) for one in strings)])
    _check(together, "all together must be small enough for RE2")
    longest = max(*(int(width.most) for width in widths), *map(len, strings), 0)
    looks_around = any(width.looks_around for width in widths)
    return _Compiled(re2.compile(together, _options(_SEARCH_BYTES)), looks_around, longest)


def _checked_width(expression: str) -> Width:
    """Return the width of an expression whose matches can be found in a stream.

    Raises:
        ValueError: it is not one of RE2, or its matches may be empty or too long.
    """
    if not 0 < len(expression) <= MAX_LENGTH:
        raise ValueError(f"stop_regex must hold expressions of 1 to {MAX_LENGTH} characters, got {len(expression)}")
    _check(expression, "must hold expressions of RE2 (https://github.com/google/re2/wiki/Syntax)")
    try:
        width = width_of(expression)
    except ValueError as error:
        raise ValueError(f"stop_regex must hold expressions without \\C, \\Q and octal numbers: {error}") from error
    if width.least < 1:
        raise ValueError(f"stop_regex must not match the empty text, got {expression!r}")
    if width.most > MAX_MATCH:
        most = "any number of characters" if width.most == inf else f"{int(width.most)} characters"
        raise ValueError(
            f"stop_regex must match at most {MAX_MATCH} characters, which a stream can hold back, "
            f"got {expression!r}, which may match {most}; write x{{0,50}} for x*"
        )
    return width


def _check(expression: str, rule: str) -> None:
    try:
        re2.compile(expression, _options(_MOST_COMPILED_BYTES))
    except (re2.error, UnicodeEncodeError) as error:
        reason = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else str(error)
        raise ValueError(f"stop_regex {rule}, got {expression[:100]!r}: {reason}") from error


def _options(max_bytes: int) -> Any:
    options = re2.Options()
    for name, value in (("log_errors", False), ("max_mem", max_bytes), ("never_capture", True)):
        setattr(options, name, value)
    return options
