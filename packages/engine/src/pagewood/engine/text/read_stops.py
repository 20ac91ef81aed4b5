"""Stop strings and expressions in the content of an answer whose text is otherwise unchanged."""

from __future__ import annotations

from collections.abc import Sequence

from pagewood.engine.text.response import Part, ResponseParser


class ReadStops:
    """Ends a text where its content ends; used like `Stops`, for text with reasoning and calls in it.

    Invariant: the text that `push` has returned contains no part of the match. Matches in reasoning, calls and marks do
    not count; `ResponseParser` describes how content is searched.

    Args:
        parser: of the answer, with stop strings or expressions.
    """

    __slots__ = ("_num_settled", "_num_shown", "_parser", "_text")

    def __init__(self, parser: ResponseParser) -> None:
        self._parser = parser
        self._text = ""  # written by: read_stops
        self._num_settled = 0
        """Characters that are already assigned to a section; no match begins in them."""  # written by: read_stops
        self._num_shown = 0  # written by: read_stops

    @property
    def matched(self) -> str | None:
        """The stop string that was found, or the match of an expression; None before that."""
        return self._parser.stopped_by

    def push(self, text: str) -> str:
        """Append `text` and return the text that may be shown now; empty after a match."""
        if self.matched is not None:
            return ""
        for character in text:  # one by one, so that little text follows a match
            self._text += character
            parts = self._parser.feed(character)
            if self.matched is not None:
                return self._shown(self._end(parts, self.matched))
            self._num_settled = len(self._text) - self._parser.num_held
        return self._shown(self._num_settled)

    def flush(self) -> str:
        """Return the text that was held back, up to a match; the text has ended."""
        if self.matched is not None:
            return ""
        parts = self._parser.finish(is_cut=True)  # text that is still open at the end is no content
        return self._shown(len(self._text) if self.matched is None else self._end(parts, self.matched))

    def _shown(self, end: int) -> str:
        """Return the text up to `end` that was not returned before."""
        start, self._num_shown = self._num_shown, max(self._num_shown, end)
        return self._text[start : self._num_shown]

    def _end(self, parts: Sequence[Part], matched: str) -> int:
        """Return where a match begins: after the content that was found together with it.

        Args:
            parts: found together with the match.
            matched: the match.
        """
        content = ""
        for part in parts:
            content = content + part.text if part.kind == "content" else ""
        for num_joining in range(len(content) + 1):  # the separator of two texts of content is not in the text
            before = content[num_joining:]
            at = self._text.find(before + matched, self._num_settled)
            if at >= 0:
                return at + len(before)
        return len(self._text)
