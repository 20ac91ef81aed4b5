"""Finds the first of several delimiters in a stream."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from pagewood.engine.text.response.expressions import Expression, Found, first_characters
from pagewood.engine.text.response.source import Reading, Source


class Hit(NamedTuple):
    """Which delimiter was found, and its match."""

    which: int
    found: Found


class Watch:
    """Some delimiters. The first in a text wins; of those that begin together, the longest, then the first given."""

    __slots__ = ("_delimiters", "_width", "search")

    def __init__(self, delimiters: Sequence[Expression]) -> None:
        self._delimiters = tuple(delimiters)
        self._width = max((one.width for one in delimiters), default=0) + 1
        firsts = [first_characters(one.node) for one in delimiters]
        if None in firsts:
            pattern = "(?s:.)"
        else:
            characters = sorted({char for first in firsts if first for char in first})
            pattern = f"[{''.join(map(re.escape, characters))}]" if characters else "(?!)"
        self.search = re.compile(pattern).search
        """Finds places where a delimiter may begin."""

    def look(self, text: str, at: int, *, ended: bool, is_cut: bool = False) -> tuple[int, Hit | None]:
        """Return the first delimiter from `at` on and its place; without one, the place where one may begin at the end.

        No delimiter begins at the end of a text that has `ended`, unless it `is_cut` and might have continued.
        """
        while (start := self.search(text, at)) is not None:
            at = start.start()
            window = text[at : at + self._width]
            likely = [(which, one) for which, one in enumerate(self._delimiters) if one.may_begin(window)]
            may_go_on = (
                (is_cut or not ended)
                and len(window) < self._width
                and any(one.may_continue(window) for _, one in likely)
            )
            if may_go_on and not ended:
                return at, None
            best: Hit | None = None
            for which, delimiter in likely:
                found = delimiter.match(window)
                if found is not None and (best is None or found.length > best.found.length):
                    best = Hit(which, found)
            if best is not None:
                if may_go_on:  # the text after it belongs to a longer delimiter
                    best = Hit(best.which, Found(len(window), best.found.groups))
                return at, best
            if may_go_on:
                return at, None
            at += 1
        return len(text), None

    def begins(self, text: str, at: int, *, ended: bool, is_cut: bool) -> bool | None:
        """Return whether a delimiter, or the end of the text, comes behind white space from `at` on; None: wait.

        A beginning of a delimiter at which the text was cut counts.
        """
        behind = at
        while behind < len(text) and text[behind].isspace():
            behind += 1
        window = text[at : behind + self._width]
        is_part = at + len(window) < len(text)
        start, hit = self.look(window, 0, ended=ended or is_part, is_cut=is_cut and not is_part)
        if start > behind - at:
            return False
        return True if hit is not None or ended else None


@lru_cache(maxsize=1024)
def watch_for(*delimiters: Expression) -> Watch:
    """Return a watch for some delimiters; requests with the same template share it."""
    return Watch(delimiters)


def until(source: Source, watch: Watch, show: Callable[[str], None]) -> Reading[Hit | None]:
    """Show the text before the first delimiter, and pass that; return None if the text ends before.

    The beginning of a delimiter at which the text was cut is not shown.
    """
    while True:
        start, hit = watch.look(source.text, source.at, ended=source.ended, is_cut=source.is_cut)
        if start > source.at:
            show(source.text[source.at : start])
        source.at = start if hit is None else start + hit.found.length
        if hit is not None:
            return hit
        if source.ended:
            source.at = len(source.text)
            return None
        if start == len(source.text):
            source.idle = watch.search, show
        yield


def comes(source: Source, watch: Watch) -> Reading[bool]:
    """Return whether a delimiter, or the end of the answer, comes next behind white space; pass nothing."""
    while True:
        found = watch.begins(source.text, source.at, ended=source.ended, is_cut=source.is_cut)
        if found is not None:
            return found
        yield
