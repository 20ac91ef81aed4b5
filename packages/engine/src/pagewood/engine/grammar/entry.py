"""Finds where a grammar begins after a mark, in the bytes of tokens; one token may hold the mark's end and more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.grammar.mask import Mask
from pagewood.engine.grammar.matcher import Matcher

_MAX_REST = 64
"""Most bytes of a token after the end of a mark; a token with more is not allowed there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTexts:
    """The bytes that each token adds to a text."""

    texts: Sequence[bytes]
    """Bytes by token id."""
    vocab_size: int
    """Number of logits, which may be more than there are texts."""
    special: frozenset[int] = frozenset()
    """Tokens that are no text for the model; they add nothing to the text unless they are part of a mark."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a text towards a mark."""

    begun: bytes = b""
    """The longest end of the text that is the beginning of a mark."""
    rest: bytes | None = None
    """Bytes after the mark; None: the mark has not come."""


class Marks:
    """The texts after which a grammar begins; the first one to come counts. Immutable; for one vocabulary.

    Invariant: no mark begins with another one.
    """

    __slots__ = ("_beginnings", "_marks", "_tokens", "crossing", "hidden", "vocab_size")

    def __init__(self, marks: Iterable[str], tokens: TokenTexts) -> None:
        """Look through the vocabulary for tokens in which a mark may end."""
        encoded = sorted({mark.encode() for mark in marks}, key=len)
        self._marks = [mark for mark in encoded if not any(mark.startswith(one) for one in encoded if one != mark)]
        beginnings = {mark[:end] for mark in self._marks for end in range(len(mark))}
        self._beginnings = sorted(beginnings, key=len, reverse=True)
        self._tokens = tokens
        self.vocab_size = tokens.vocab_size
        self.hidden = frozenset(
            token for token in tokens.special if not any(tokens.texts[token] in mark for mark in self._marks)
        )
        """Special tokens that are in no mark."""
        endings = tuple(mark[start:] for mark in self._marks for start in range(1, len(mark)))
        self.crossing = [
            (token, text)
            for token, text in enumerate(tokens.texts)
            if token not in self.hidden and (text.startswith(endings) or any(mark in text for mark in self._marks))
        ]
        """Tokens that may hold the end of a mark and bytes after it, with their bytes."""

    @property
    def beginnings(self) -> Sequence[bytes]:
        """Possible beginnings of marks, the longest first."""
        return self._beginnings

    def after(self, begun: bytes, token: int) -> Progress:
        """Return the progress of a text with progress `begun` after `token`."""
        texts = self._tokens.texts
        if token in self.hidden or not 0 <= token < len(texts):
            return Progress(begun)
        return self.follow(begun, texts[token])

    def follow(self, begun: bytes, piece: bytes) -> Progress:
        """Return the progress of a text with progress `begun` after `piece`."""
        text = begun + piece
        ends = [at + len(mark) for mark in self._marks if (at := text.find(mark)) >= 0]
        if ends:
            return Progress(rest=text[min(ends) :])
        return Progress(next(one for one in self._beginnings if text.endswith(one)))

    def spellings(self, rests: set[bytes]) -> dict[bytes, tuple[int, ...]]:
        """Return tokens that spell each of `rests`; rests that no tokens spell are left out."""
        parts = {
            rest[start:end] for rest in rests for start in range(len(rest)) for end in range(start + 1, len(rest) + 1)
        }
        tokens = {
            text: token
            for token, text in enumerate(self._tokens.texts)
            if text in parts and token not in self._tokens.special
        }
        found = {rest: _spelt(rest, tokens) for rest in rests}
        return {rest: spelling for rest, spelling in found.items() if spelling is not None}


def _spelt(rest: bytes, tokens: dict[bytes, int]) -> tuple[int, ...] | None:
    """Return the fewest of `tokens` that spell `rest`."""
    best: list[tuple[int, ...] | None] = [()]
    for end in range(1, len(rest) + 1):
        ways = (
            (*before, tokens[rest[start:end]])
            for start in range(end)
            if (before := best[start]) is not None and rest[start:end] in tokens
        )
        best.append(min(ways, key=len, default=None))
    return best[-1]


class Entry:
    """The tokens allowed before a grammar begins: all except those that continue after a mark with other text.

    Immutable. End tokens are handled elsewhere.
    """

    __slots__ = ("_cleared", "_marks", "_spellings")

    def __init__(self, marks: Marks, start: Matcher) -> None:
        """Compute the masks.

        Args:
            marks: after which the grammar begins.
            start: a matcher at the start of the grammar, without end tokens; its state is not changed.
        """
        crossings = {begun: list(_crossings(marks, begun)) for begun in marks.beginnings}
        rests = {rest for found in crossings.values() for _, rest in found if len(rest) <= _MAX_REST}
        spellings = marks.spellings(rests)
        allowed = {rest: tokens for rest, tokens in spellings.items() if start.accepts(tokens) == len(tokens)}
        self._marks = marks
        self._spellings = {b"": (), **allowed}
        self._cleared = {
            begun: _cleared([token for token, rest in found if rest not in allowed], begun, marks)
            for begun, found in crossings.items()
        }

    def write(self, row: Mask, begun: bytes) -> None:
        """Write the tokens that may come after a text with progress `begun`."""
        row[:] = -1
        words, kept = self._cleared[begun]
        row[words] &= kept

    def after(self, begun: bytes, token: int) -> tuple[bytes, tuple[int, ...] | None] | None:
        """Advance by a token from progress `begun`.

        Returns:
            The new progress, and the tokens by which the grammar must advance, if it begins; None: the token is not
            allowed.
        """
        if begun and token in self._marks.hidden:
            return None
        progress = self._marks.after(begun, token)
        if progress.rest is None:
            return progress.begun, None
        tokens = self._spellings.get(progress.rest)
        return None if tokens is None else (b"", tokens)


def _crossings(marks: Marks, begun: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the tokens that complete a mark after its beginning `begun`, and continue with some bytes."""
    for token, text in marks.crossing:
        if rest := marks.follow(begun, text).rest:
            yield token, rest


def _cleared(refused: Sequence[int], begun: bytes, marks: Marks) -> tuple[NDArray[np.int64], Mask]:
    """Return the words of a mask in which tokens may not come, and their bits.

    A special token in the middle of a mark would hide or break it, so none may come there.
    """
    words: dict[int, int] = {}
    for token in (*refused, *(marks.hidden if begun else ())):
        if token < marks.vocab_size:
            words[token // 32] = words.get(token // 32, 0xFFFFFFFF) & ~(1 << token % 32)
    return np.array(list(words), np.int64), np.array(list(words.values()), np.uint32).view(np.int32)
