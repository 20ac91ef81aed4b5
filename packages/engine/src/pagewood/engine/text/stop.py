"""Finds stop strings in streamed text, across the parts of the text, without showing any part of a match."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache

_NUM_REMEMBERED = 128
"""Tables of the latest stop strings, which the answers to one request share."""


@lru_cache(maxsize=_NUM_REMEMBERED)
def _failures(pattern: str) -> array[int]:
    """Return for each n in [0, len(pattern)] the longest proper suffix of pattern[:n] that begins the pattern."""
    failures = array("i", (0, 0))
    length = 0
    for character in pattern[1:]:
        while length and character != pattern[length]:
            length = failures[length]
        length += character == pattern[length]
        failures.append(length)
    return failures


class StopStrings:
    """Searches a text for the first of several strings.

    The first match is the one that ends first; of several that end together, the one that starts first. So the result
    does not depend on how the text is divided. Invariant: the text that `push` has returned contains no part of the
    match, and no part of the longest suffix that could become a match.

    Source: Knuth, Morris, Pratt, "Fast pattern matching in strings" (1977): amortized constant cost per character and
    stop string.

    Raises:
        ValueError: a stop string is empty.
    """

    __slots__ = ("_failures", "_held", "_lengths", "_stops", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError(f"stop must hold no empty string, got {list(stops)}")
        # Longest first: of the matches that end together, the longest starts first.
        self._stops = sorted(stops, key=len, reverse=True)
        self._failures = [_failures(stop) for stop in self._stops]
        self._lengths = [0] * len(
            self._stops
        )  # written by: _advance, flush. How much of each stop string the text ends with
        self._held = ""  # written by: push, flush
        self.matched: str | None = None  # written by: push
        """The stop string that was found; None before that."""

    @property
    def num_held(self) -> int:
        """Characters that are held back, because they may belong to a match."""
        return len(self._held)

    def push(self, text: str) -> str:
        """Append `text` and return the text that may be shown now; empty after a match."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        for position, character in enumerate(text):
            self.matched = self._advance(character)
            if self.matched is not None:
                shown = self._held + text[: position + 1]
                self._held = ""
                return shown[: len(shown) - len(self.matched)]
        shown = self._held + text
        num_shown = len(shown) - max(self._lengths)
        self._held = shown[num_shown:]
        return shown[:num_shown]

    def flush(self) -> str:
        """Return the text that was held back; the text has ended without a match, and a new text may begin."""
        held, self._held = self._held, ""
        self._lengths = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> str | None:
        """Append one character and return the stop string that it completes, if any."""
        found = None
        for i, stop in enumerate(self._stops):
            length = self._lengths[i]
            while length and stop[length] != character:
                length = self._failures[i][length]
            length += stop[length] == character
            self._lengths[i] = length
            if length == len(stop):
                found = found or stop
        return found
