# pyright: basic
# The bindings of `tokenizers` carry no usable annotations.
"""Decodes ids to text, a few at a time: the joined parts equal the text of all ids decoded at once.

A part that was returned never changes. The usual method decodes a growing window of ids twice and compares the results.
It is inexact where an invalid byte changes the text before it, and slow where the text never settles. Here, each step
of the tokenizer's decoder is followed exactly (`decoder_steps`), at a constant cost per token. If a decoder has a step
that cannot be followed, all text appears at the end of the sequence.
"""

from __future__ import annotations

import codecs
import contextlib
from collections.abc import Callable, Sequence
from typing import Protocol

import tokenizers

from pagewood.engine.text.decoder_steps import Step, bytes_of_piece, step_makers
from pagewood.engine.text.panics import panics_as_errors
from pagewood.engine.text.vocabulary import Vocabulary


class IncrementalDecoder(Protocol):
    """Decodes the tokens of one sequence. Invariant: the returned text is a prefix of the whole decoded text."""

    def push(self, tokens: Sequence[int]) -> str:
        """Append `tokens` and return the text that is final now."""
        ...

    def flush(self) -> str:
        """Return the rest of the text; the sequence has ended."""
        ...


def incremental_decoder(
    tokenizer: tokenizers.Tokenizer, *, skip_special_tokens: bool, keep: frozenset[str] = frozenset()
) -> Callable[[], IncrementalDecoder]:
    """Return a function that makes decoders for this tokenizer; all of them share one vocabulary.

    Args:
        tokenizer: decodes.
        skip_special_tokens: whether special tokens give no text.
        keep: special tokens that still give text.
    """
    vocabulary = Vocabulary(tokenizer, skip_special_tokens=skip_special_tokens, keep=keep)
    if isinstance(tokenizer.decoder, tokenizers.decoders.ByteLevel):
        byte_vocabulary = ByteVocabulary(vocabulary)
        return lambda: ByteLevelDecoder(byte_vocabulary)
    makers = step_makers(tokenizer.decoder)
    if makers is None:
        return lambda: WholeDecoder(tokenizer, vocabulary)
    return lambda: SteppedDecoder(vocabulary, [make() for make in makers])


class ByteVocabulary:
    """The bytes that each byte-level token stands for, and its text if they are whole characters, filled on demand."""

    __slots__ = ("_bytes", "_vocabulary", "texts")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._bytes: dict[int, bytes] = {}  # written by: of
        self.texts: dict[int, str] = {}
        """Texts of requested tokens that consist of whole characters."""  # written by: of

    def of(self, token: int) -> bytes:
        """Return the bytes of `token`; none for a token that is skipped."""
        try:
            return self._bytes[token]
        except KeyError:
            pass
        self._bytes[token] = encoded = bytes_of_piece(self._vocabulary.piece(token) or "")
        with contextlib.suppress(UnicodeDecodeError):
            self.texts[token] = encoded.decode()
        return encoded


class ByteLevelDecoder:
    """Tokens are bytes; the text is their UTF-8 reading, with U+FFFD for each maximal invalid part."""

    __slots__ = ("_is_within", "_utf8", "_vocabulary")

    def __init__(self, vocabulary: ByteVocabulary) -> None:
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_within = False  # written by: push. Whether the bytes so far end within a character

    def push(self, tokens: Sequence[int]) -> str:
        """Return the characters that these bytes complete."""
        if len(tokens) == 1 and not self._is_within:
            text = self._vocabulary.texts.get(tokens[0])
            if text is not None:
                return text
        text = self._utf8.decode(b"".join([self._vocabulary.of(token) for token in tokens]))
        self._is_within = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        """Return U+FFFD for a character that was never completed."""
        return self._utf8.decode(b"", final=True)


class SteppedDecoder:
    """Passes the pieces of the tokens through the steps of a decoder."""

    __slots__ = ("_steps", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, steps: list[Step]) -> None:
        self._vocabulary = vocabulary
        self._steps = steps

    def push(self, tokens: Sequence[int]) -> str:
        """Return the text that no later token can change."""
        pieces = [piece for token in tokens if (piece := self._vocabulary.piece(token)) is not None]
        for step in self._steps:
            pieces = step.push(pieces)
        return "".join(pieces)

    def flush(self) -> str:
        """Return the text that the steps hold back."""
        pieces: list[str] = []
        for step in self._steps:
            pieces = step.push(pieces) + step.end()
        return "".join(pieces)


class WholeDecoder:
    """Decodes all tokens at the end of the sequence: exact for every decoder."""

    __slots__ = ("_tokenizer", "_tokens", "_vocabulary")

    def __init__(self, tokenizer: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._tokens: list[int] = []  # written by: push, flush

    def push(self, tokens: Sequence[int]) -> str:
        """Keep the tokens that are text."""
        self._tokens += [token for token in tokens if self._vocabulary.piece(token) is not None]
        return ""

    def flush(self) -> str:
        """Return the whole text."""
        tokens, self._tokens = self._tokens, []
        with panics_as_errors():
            return self._tokenizer.decode(tokens, skip_special_tokens=False)
