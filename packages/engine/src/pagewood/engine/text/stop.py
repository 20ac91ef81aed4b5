"""Stop strings in streamed text: found across any boundary, and never handed out, not even in part."""

from __future__ import annotations

from collections.abc import Sequence


def _failures(pattern: str) -> list[int]:
    """Return for each n in [0, len(pattern)] the longest proper suffix of pattern[:n] that begins the pattern."""
    failures = [0, 0]
    length = 0
    for character in pattern[1:]:
        while length and character != pattern[length]:
            length = failures[length]
        length += character == pattern[length]
        failures.append(length)
    return failures


class StopStrings:
    """Watches a text for the first of several strings.

    The first match is the one that ends first, and among those the one that starts first; so the outcome does not
    depend on how the text was cut into pieces. Invariant: what `push` returned holds no part of the match, and nothing
    of the longest suffix that could still become one.

    Source: Knuth, Morris, Pratt, "Fast pattern matching in strings" (1977): constant cost per character and string.

    Raises:
        ValueError: a stop string is empty.
    """

    __slots__ = ("_failures", "_held", "_lengths", "_matched", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError(f"stop must hold no empty string, got {list(stops)}")
        # Longest first: among matches that end together, the longest starts first.
        self._stops = sorted(stops, key=len, reverse=True)
        self._failures = [_failures(stop) for stop in self._stops]
        self._lengths = [0] * len(self._stops)  # written by: _advance. How much of each stop ends the text so far
        self._held = ""  # written by: push, flush
        self._matched: str | None = None  # written by: push

    @property
    def matched(self) -> str | None:
        """The stop string that was found."""
        return self._matched

    def push(self, text: str) -> str:
        """Return what may be shown once `text` is known; after a match, always nothing."""
        if self._matched is not None:
            return ""
        if not self._stops:
            return text
        for position, character in enumerate(text):
            self._matched = self._advance(character)
            if self._matched is not None:
                shown = self._held + text[: position + 1]
                self._held = ""
                return shown[: len(shown) - len(self._matched)]
        shown = self._held + text
        num_shown = len(shown) - max(self._lengths)
        self._held = shown[num_shown:]
        return shown[:num_shown]

    def flush(self) -> str:
        """Return what was held back; the text is at its end and no stop string was completed."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Extend every partial match by one character and return the stop string that this completes, if any."""
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
