# pyright: basic
# The bindings of `tokenizers` carry no usable annotations.
"""The steps of a tokenizer's decoder, each in a form that takes a sequence piece by piece.

A decoder of the `tokenizers` library maps a list of pieces to a list of pieces, in one or more steps, and the text is
the result joined. Most steps depend on a piece, its place (first, last or another), and at most its neighbours, so they
can be followed exactly while the list grows. `Fuse` and `ByteLevel` join all pieces to one; the steps after them see
one text, which arrives in parts.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Callable
from typing import Any, Protocol

import tokenizers

from pagewood.engine.text.panics import panics_as_errors

REPLACEMENT = "\ufffd"
MAX_MEMORIZED = 1 << 16
"""Pieces whose mapping one step memorizes."""

_BYTE_PIECE = re.compile(r"<0x(\+[0-9A-Fa-f]|[0-9A-Fa-f]{2})>")


class Step(Protocol):
    """One step for one sequence. Invariant: its output so far is a prefix of its result for the whole list.

    After a step that joins all pieces, the pieces are the parts of one text.
    """

    def push(self, pieces: list[str]) -> list[str]:
        """Append `pieces` and return the resulting pieces that are final now."""
        ...

    def end(self) -> list[str]:
        """Return the remaining pieces; the sequence has ended."""
        ...


def step_makers(decoder: Any) -> list[Callable[[], Step]] | None:
    """Return functions that make the steps of `decoder` for a new sequence; None if a step cannot be followed.

    Args:
        decoder: decoder of a `tokenizers.Tokenizer`; None joins the pieces with spaces.
    """
    if decoder is None:
        return [_Spaced]
    try:
        specs = _flat(json.loads(decoder.__getstate__()))
    except Exception:  # a decoder written in Python has no description
        return None
    makers: list[Callable[[], Step]] = []
    is_joined = False
    for spec in specs:
        if spec["type"] == "Fuse":
            is_joined = True
            continue
        maker = _on_text(spec) if is_joined else _on_pieces(spec)
        if maker is None:
            return None
        makers.append(maker)
        is_joined = is_joined or spec["type"] == "ByteLevel"
    return makers


def step_types(decoder: Any) -> set[str]:
    """Return the types of the steps of `decoder`, such as "ByteLevel"; none if it has no description."""
    if decoder is None:
        return set()
    try:
        return {step["type"] for step in _flat(json.loads(decoder.__getstate__()))}
    except Exception:  # a decoder written in Python has no description
        return set()


def byte_of_piece(piece: str) -> int | None:
    """Return the byte that a piece such as `<0xE2>` stands for; None for other pieces."""
    byte = _BYTE_PIECE.fullmatch(piece) if piece.startswith("<0x") else None
    return None if byte is None else int(byte[1], 16)


def _flat(spec: dict[str, Any]) -> list[dict[str, Any]]:
    if spec["type"] != "Sequence":
        return [spec]
    return [step for inner in spec["decoders"] for step in _flat(inner)]


def _on_pieces(spec: dict[str, Any]) -> Callable[[], Step] | None:
    """Return a function that makes this step for separate pieces."""
    match spec["type"]:
        case "Replace" | "Strip":
            mapping = _piece_map(spec)
            return lambda: _Mapped(mapping, mapping)
        case "Metaspace" | "WordPiece":
            # Both map the first piece differently. An empty first piece adds nothing to the text.
            first, rest = _piece_map(spec), _piece_map(spec, before=[""])
            return lambda: _Mapped(first, rest)
        case "BPEDecoder":
            last, other = _piece_map(spec), _piece_map(spec, after=[""])
            return lambda: _LastMapped(last=last, other=other)
        case "CTC":
            mapping = _piece_map(spec)
            return lambda: _Collapsed(mapping)
        case "ByteFallback":
            return _ByteRuns
        case "ByteLevel":
            return _Utf8
        case _:
            return None


def _on_text(spec: dict[str, Any]) -> Callable[[], Step] | None:
    """Return a function that makes this step for joined pieces."""
    match spec:
        case {"type": "Strip", "content": content, "start": start, "stop": stop}:
            return lambda: _StrippedText(content, start=start, stop=stop)
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content} if pattern:
            return lambda: _ReplacedText(pattern, content)
        case {"type": "Metaspace"}:  # works on each character
            mapping = _piece_map(spec)
            return lambda: _Mapped(mapping, mapping)
        case _:
            return None


def _piece_map(spec: dict[str, Any], *, before: list[str] | None = None, after: list[str] | None = None) -> Any:
    """Return the function that maps a piece as the library's decoder maps it between `before` and `after`."""
    description = {
        "version": "1.0",
        "added_tokens": [],
        "decoder": spec,
        "model": {"type": "WordLevel", "vocab": {}, "unk_token": ""},
    }
    decoder: Any = tokenizers.Tokenizer.from_str(json.dumps(description)).decoder

    @functools.lru_cache(maxsize=MAX_MEMORIZED)
    def mapped(piece: str) -> str:
        with panics_as_errors():
            return decoder.decode([*(before or ()), piece, *(after or ())])

    return mapped


class _Spaced:
    """Puts a space before each piece except the first."""

    __slots__ = ("_has_begun",)

    def __init__(self) -> None:
        self._has_begun = False  # written by: push

    def push(self, pieces: list[str]) -> list[str]:
        if not pieces:
            return []
        spaced = [" " + piece for piece in pieces]
        if not self._has_begun:
            self._has_begun = True
            spaced[0] = pieces[0]
        return spaced

    def end(self) -> list[str]:
        return []


class _Mapped:
    """Maps each piece on its own, the first one differently."""

    __slots__ = ("_first", "_has_begun", "_rest")

    def __init__(self, first: Callable[[str], str], rest: Callable[[str], str]) -> None:
        self._first = first
        self._rest = rest
        self._has_begun = False  # written by: push

    def push(self, pieces: list[str]) -> list[str]:
        if not pieces:
            return []
        if self._has_begun:
            return [self._rest(piece) for piece in pieces]
        self._has_begun = True
        return [self._first(pieces[0]), *[self._rest(piece) for piece in pieces[1:]]]

    def end(self) -> list[str]:
        return []


class _LastMapped:
    """Maps each piece on its own, the last one differently; so it holds one piece back."""

    __slots__ = ("_held", "_last", "_other")

    def __init__(self, *, last: Callable[[str], str], other: Callable[[str], str]) -> None:
        self._last = last
        self._other = other
        self._held: list[str] = []  # written by: push

    def push(self, pieces: list[str]) -> list[str]:
        known = self._held + pieces
        self._held = known[-1:]
        return [self._other(piece) for piece in known[:-1]]

    def end(self) -> list[str]:
        return [self._last(piece) for piece in self._held]


class _Collapsed:
    """Collapses runs of equal pieces to one, maps it, and drops empty results."""

    __slots__ = ("_mapping", "_previous")

    def __init__(self, mapping: Callable[[str], str]) -> None:
        self._mapping = mapping
        self._previous: str | None = None  # written by: push

    def push(self, pieces: list[str]) -> list[str]:
        mapped: list[str] = []
        for piece in pieces:
            if piece != self._previous:
                self._previous = piece
                mapped.append(self._mapping(piece))
        return [piece for piece in mapped if piece]

    def end(self) -> list[str]:
        return []


class _ByteRuns:
    """Decodes pieces such as `<0xE2>` as bytes.

    A run of byte pieces becomes text if the whole run is valid UTF-8, and one U+FFFD per byte if not. So a run is held
    back until it ends.
    """

    __slots__ = ("_run",)

    def __init__(self) -> None:
        self._run = bytearray()  # written by: push, end

    def push(self, pieces: list[str]) -> list[str]:
        ready: list[str] = []
        for piece in pieces:
            byte = byte_of_piece(piece)
            if byte is not None:
                self._run.append(byte)
            else:
                if self._run:
                    ready += self.end()
                ready.append(piece)
        return ready

    def end(self) -> list[str]:
        if not self._run:
            return []
        try:
            text = [self._run.decode()]
        except UnicodeDecodeError:
            text = [REPLACEMENT] * len(self._run)
        self._run.clear()
        return text


class _Utf8:
    """Decodes byte-level pieces as UTF-8, with U+FFFD for each maximal invalid part, and joins them."""

    __slots__ = ("_utf8",)

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, pieces: list[str]) -> list[str]:
        return [self._utf8.decode(b"".join([bytes_of_piece(piece) for piece in pieces]))]

    def end(self) -> list[str]:
        return [self._utf8.decode(b"", final=True)]


class _StrippedText:
    """Strips the character `content` up to `start` times from the start of the text, and `stop` times from the end."""

    __slots__ = ("_content", "_held", "_num_start", "_stop")

    def __init__(self, content: str, *, start: int, stop: int) -> None:
        self._content = content
        self._num_start = start  # written by: push. How many more to strip from the start
        self._stop = stop
        self._held = ""  # written by: push. Stripped if the text ends here

    def push(self, pieces: list[str]) -> list[str]:
        text = self._held + "".join(pieces)
        while text and self._num_start:
            if not text.startswith(self._content):
                self._num_start = 0
                break
            text = text[1:]
            self._num_start -= 1
        num_held = 0
        while num_held < min(self._stop, len(text)) and text[-1 - num_held] == self._content:
            num_held += 1
        end = len(text) - num_held
        self._held = text[end:]
        return [text[:end]]

    def end(self) -> list[str]:
        return []


class _ReplacedText:
    """Replaces every `pattern` in the text; holds back what may be the beginning of a match."""

    __slots__ = ("_content", "_held", "_pattern")

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern = pattern
        self._content = content
        self._held = ""  # written by: push

    def push(self, pieces: list[str]) -> list[str]:
        *before, rest = (self._held + "".join(pieces)).split(self._pattern)
        num_held = min(len(rest), len(self._pattern) - 1)
        while num_held and not self._pattern.startswith(rest[len(rest) - num_held :]):
            num_held -= 1
        end = len(rest) - num_held
        self._held = rest[end:]
        return [self._content.join([*before, rest[:end]])]

    def end(self) -> list[str]:
        return [self._held]


def _byte_of_character() -> dict[str, int]:
    """Return the byte that each character of a byte-level piece stands for.

    Printable Latin-1 stands for itself; the other bytes, in ascending order, are the characters from U+0100 on.

    Source: GPT-2's encoder (Radford et al., 2019).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()


def bytes_of_piece(piece: str) -> bytes:
    """Return the bytes of a byte-level piece; a piece with a character outside the code is taken as UTF-8."""
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in piece])
    except KeyError:
        return piece.encode()
