"""Values that a model writes, as JSON text, while they come: JSON itself, and dialects of it.

A key, a comma or a number is held back until it is known to be followed by a value, or to be complete. So the emitted
part of a broken-off value lacks only the ends of strings and brackets; these are not added.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, cast

from pagewood.engine.text.response.source import Reading, Source

Emit: TypeAlias = Callable[[str], None]

MAX_DEPTH = 64
"""Levels of brackets in a value."""
MAX_ATOM = 512
"""Characters of a number, a word or an unquoted key."""
_ATOM = re.compile(r"[-+.\w]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "NaN": "null", "Infinity": "null", "-Infinity": "null"}
_PYTHON_WORDS = {**_WORDS, "True": "true", "False": "false", "None": "null"}
_KEY = re.compile(r"[^\s:,()\[\]{}\"'<>|=]*")
_BARE = re.compile(r"[^,()\[\]{}\"'=\n]*")
_PLAIN = {'"': re.compile(r'[^"\\\x00-\x1f]*'), "'": re.compile(r"[^'\"\\\x00-\x1f]*")}
_JSON_ESCAPES = {char: f"\\{char}" for char in '"\\bfnrt'} | {"/": "/"}
_PYTHON_ESCAPES = {"'": "'", "a": "\\u0007", "v": "\\u000b", "0": "\\u0000", "\n": ""}
_CODE_LENGTHS = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile(r"[0-9A-Fa-f]+")
_CLOSERS = {"{": "}", "[": "]", "(": ")"}


@dataclass(frozen=True, slots=True)
class Dialect:
    """The differences of a dialect from JSON."""

    string_delims: tuple[tuple[str, str], ...] = ()
    """Pairs of marks around strings without escapes."""
    unquoted_keys: bool = False
    is_python: bool = False
    """Python's literals: 'strings', True, None, tuples; any other word is a string."""


JSON = Dialect()
PYTHON = Dialect(is_python=True)


def read_value(source: Source, emit: Emit, dialect: Dialect = JSON) -> Reading[bool]:
    """Read one value and emit it as JSON.

    If it is wrong or breaks off, the source stays at that place, and the emitted text is the beginning of a value.

    Returns:
        Whether the value is complete.
    """
    closers: list[str] = []  # in the text
    pending = ""  # emitted before the value, once it has begun
    while True:
        char = yield from source.peek()
        if char in _CLOSERS and char and (char != "(" or dialect.is_python) and len(closers) < MAX_DEPTH:
            source.at += 1
            emit(pending + ("{" if char == "{" else "["))
            closers.append(_CLOSERS[char])
            pending = yield from source.space()
            if (yield from source.peek()) != closers[-1]:
                key = yield from _key(source, dialect) if char == "{" else _no_key()
                if key is None:
                    return False
                pending += key
                continue
        else:
            is_complete = yield from _scalar(source, emit, pending, dialect)
            if not is_complete:
                return False
            pending = ""
        while True:  # behind a value
            if not closers:
                return True
            pending += yield from source.space()
            char = yield from source.peek()
            if char == ",":
                source.at += 1
                separator = "," + (yield from source.space())
                if (yield from source.peek()) != closers[-1]:
                    key = yield from _key(source, dialect) if closers[-1] == "}" else _no_key()
                    if key is None:
                        return False
                    pending += separator + key
                    break
                char = closers[-1]  # a comma after the last item
            if char != closers[-1]:
                return False
            source.at += 1
            emit(pending + ("}" if closers.pop() == "}" else "]"))
            pending = ""


def read_string(source: Source, emit: Emit, dialect: Dialect = JSON) -> Reading[bool]:
    """Read a string and emit it, quoted; return whether it is complete. Nothing is emitted if there is no string.

    A string that breaks off has no quote at its end.
    """
    delims = yield from _opening(source, dialect)
    if delims is None:
        return False
    emit('"')
    if delims[1] in _PLAIN:
        is_complete = yield from _quoted(source, emit, delims[1], dialect)
    else:
        is_complete = yield from _delimited(source, emit, delims[1])
    if is_complete:
        emit('"')
    return is_complete


def decoded(text: str) -> object:
    """Return the value of a JSON text that `read_value` has emitted."""
    return json.loads(text)


def escaped(text: str) -> str:
    """Return `text` as the inside of a JSON string."""
    return json_text(text)[1:-1]


def json_text(value: object) -> str:
    """Return the JSON text of a value; halves of surrogate pairs, which UTF-8 does not have, become "?"."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() else text.encode(errors="replace").decode()


def is_bare_key(key: str) -> bool:
    """Return whether a key can be written without quotes, in a dialect that has such keys."""
    return 0 < len(key) <= MAX_ATOM and _KEY.fullmatch(key) is not None


def _no_key() -> Reading[str | None]:
    return ""
    yield


def _opening(source: Source, dialect: Dialect) -> Reading[tuple[str, str] | None]:
    for opening, closing in dialect.string_delims:
        if (yield from source.follows(opening)):
            source.at += len(opening)
            return opening, closing
    char = yield from source.peek()
    if char == '"' or (char == "'" and dialect.is_python):
        source.at += 1
        return char, char
    return None


def _key(source: Source, dialect: Dialect) -> Reading[str | None]:
    """Read a key, its colon and the white space around it; return None if there is none."""
    fragments: list[str] = []
    is_complete = yield from read_string(source, fragments.append, dialect)
    if not fragments and dialect.unquoted_keys:
        name = yield from source.run(_KEY, MAX_ATOM)
        fragments, is_complete = [f'"{escaped(name)}"'], bool(name)
    if not is_complete:
        return None
    fragments.append((yield from source.space()))
    if (yield from source.peek()) != ":":
        return None
    source.at += 1
    fragments.append(":")
    fragments.append((yield from source.space()))
    return "".join(fragments)


def _scalar(source: Source, emit: Emit, pending: str, dialect: Dialect) -> Reading[bool]:
    """Read a string, a number or a word; `pending` is emitted before it."""
    begun = False

    def behind(text: str) -> None:
        nonlocal begun
        emit(text if begun else pending + text)
        begun = True

    is_complete = yield from read_string(source, behind, dialect)
    if begun:
        return is_complete
    is_marked = source.mark is not None
    if not is_marked:
        source.mark = source.at
    text = yield from source.run(_BARE if dialect.is_python else _ATOM, MAX_ATOM)
    start = source.at - len(text)
    if not is_marked:
        source.mark = None
    word = text.strip() if dialect.is_python else text
    words = _PYTHON_WORDS if dialect.is_python else _WORDS
    value = words.get(word) or (word if _NUMBER.fullmatch(word) else None)
    if value is None and dialect.is_python and word:
        value = f'"{escaped(word)}"'
    is_cut_off = source.ended and source.at == len(source.text)  # it might have continued
    if value is None or is_cut_off:
        source.at = start
        return False
    emit(pending + value)
    return True


def _delimited(source: Source, emit: Emit, closing: str) -> Reading[bool]:
    """Read the rest of a string without escapes."""
    while True:
        found = source.text.find(closing, source.at)
        if found >= 0:
            emit(escaped(source.text[source.at : found]))
            source.at = found + len(closing)
            return True
        end = len(source.text) - _overlap(source.text, source.at, closing)
        if end > source.at:
            emit(escaped(source.text[source.at : end]))
            source.at = end
        if source.ended:
            return False
        yield


def _overlap(text: str, start: int, literal: str) -> int:
    """Return how many characters at the end of `text[start:]` begin `literal`, without all of it."""
    for length in range(min(len(literal) - 1, len(text) - start), 0, -1):
        if text.endswith(literal[:length]):
            return length
    return 0


def _quoted(source: Source, emit: Emit, quote: str, dialect: Dialect) -> Reading[bool]:
    """Read the rest of a string in quotes."""
    plain = _PLAIN[quote]
    while True:
        char = yield from source.peek()
        if char == "":
            return False
        if char == quote:
            source.at += 1
            return True
        if char == "\\":
            if not (yield from _escape(source, emit, dialect)):
                return False
            continue
        match = cast("re.Match[str]", plain.match(source.text, source.at))
        if match.end() > source.at:
            text = match[0]
            emit(text if text.isascii() else text.encode(errors="replace").decode())
            source.at = match.end()
        else:  # a control character, or the other quote
            emit(escaped(char))
            source.at += 1


def _escape(source: Source, emit: Emit, dialect: Dialect) -> Reading[bool]:
    """Read an escape; return whether it is complete. A backslash without a valid escape stands for itself."""
    pair = yield from source.take(2)
    if len(pair) < 2:
        source.at = len(source.text)
        return False
    char = pair[1]
    is_code = char == "u" or (dialect.is_python and char in _CODE_LENGTHS)
    code = yield from _code(source) if is_code else _no_code()
    if code is not None:
        source.at += 2 + _CODE_LENGTHS[char]
        if 0xD800 <= code < 0xDC00:
            code = yield from _second_half(source, code)
        emit(escaped(chr(code) if code < 0x110000 else "\ufffd") if not 0xD800 <= code < 0xE000 else "\ufffd")
    elif is_code and source.ended and len(source.text) - source.at < 2 + _CODE_LENGTHS[char]:
        source.at = len(source.text)
        return False
    elif char in _JSON_ESCAPES:
        source.at += 2
        emit(_JSON_ESCAPES[char])
    elif dialect.is_python and char in _PYTHON_ESCAPES:
        source.at += 2
        emit(_PYTHON_ESCAPES[char])
    else:
        source.at += 1
        emit("\\\\")
    return True


def _no_code() -> Reading[int | None]:
    return None
    yield


def _code(source: Source) -> Reading[int | None]:
    """Return the number of the next escape without passing it; None if it has no number."""
    pair = yield from source.take(2)
    length = _CODE_LENGTHS.get(pair[1:], 0)
    while True:
        digits = source.text[source.at + 2 : source.at + 2 + length]
        if digits and not _HEX.fullmatch(digits):
            return None
        if len(digits) == length:
            return int(digits, 16)
        if source.ended:
            return None
        yield


def _second_half(source: Source, high: int) -> Reading[int]:
    """Return the character of which `high` is the first half; `high` itself if no second half follows."""
    if not (yield from source.follows("\\u")):
        return high
    low = yield from _code(source)
    if low is None or not 0xDC00 <= low < 0xE000:
        return high
    source.at += 6
    return 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00)


_STRING = re.compile(r'"(?:[^"\\]|\\.)*("?)', re.DOTALL)
_REST = re.compile(r'(?:[^"\\]|\\.)*("?)', re.DOTALL)


def has_open_string(text: str, *, is_open: bool) -> bool:
    """Return whether a string of JSON is open behind a part of a value, given whether one is open before it."""
    at = 0
    if is_open:
        rest = _REST.match(text)
        if rest is None or not rest[1]:
            return True
        at = rest.end()
    is_open = False
    for string in _STRING.finditer(text, at):
        is_open = not string[1]
    return is_open
