"""The text of a custom tool's call. The model calls it like a function with one argument, whose value is the text."""

from __future__ import annotations

import json
import re

PARAMETER = "input"
"""The argument."""
_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_STRING = re.compile(r'(?:[^"\\]+|\\u[0-9a-fA-F]{4}|\\["\\/bfnrt])*')
_OPEN_PAIR = re.compile(r"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})$")


def as_arguments(text: str) -> str:
    """Return the arguments of a call with `text`, as JSON."""
    return json.dumps({PARAMETER: text}, ensure_ascii=False)


class CustomInput:
    """Reads the text from arguments that come in pieces.

    Invariant: the text depends on the arguments, and not on where they were cut.
    """

    __slots__ = ("_is_begun", "_is_ended", "_rest", "_texts")

    def __init__(self) -> None:
        self._rest = ""  # written by: take, end. Of the arguments, what was not read yet
        self._texts: list[str] = []  # written by: take, end
        self._is_begun = False  # written by: take
        self._is_ended = False  # written by: take, end

    @classmethod
    def of(cls, arguments: str, *, is_whole: bool = True) -> str:
        """Return the text in arguments; if they are incomplete, its beginning."""
        reader = cls()
        reader.take(arguments)
        if is_whole:
            reader.end()
        return reader.text

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    def take(self, piece: str) -> str:
        """Return the text that a piece of the arguments adds."""
        if self._is_ended:
            return ""
        self._rest += piece
        if not self._is_begun:
            begin = _BEGIN.match(self._rest)
            if begin is None:
                return ""
            self._rest = self._rest[begin.end() :]
            self._is_begun = True
        found = _STRING.match(self._rest)
        assert found is not None  # it matches nothing, too
        raw = found[0]
        self._is_ended = self._rest[len(raw) : len(raw) + 1] == '"'
        if not self._is_ended:  # the other half of a pair may follow
            half = _OPEN_PAIR.search(raw)
            raw = raw if half is None else raw[: half.start(1)]
        self._rest = self._rest[len(raw) :]
        return self._add(_decoded(raw))

    def end(self) -> str:
        """Return the text that the end adds: without the expected argument, the arguments themselves are the text."""
        if self._is_begun or self._is_ended:
            return ""
        self._is_ended = True
        return self._add(self._rest)

    def _add(self, text: str) -> str:
        if text:
            self._texts.append(text)
        return text


def _decoded(raw: str) -> str:
    """Return the text of the inside of a JSON string; halves of pairs of surrogates are replaced."""
    text: str = json.loads(f'"{raw}"', strict=False)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
