# pyright: basic
# The bindings of `tokenizers` carry no usable annotations.
"""The bytes of single tokens, also of those that are parts of a character."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tokenizers

from pagewood.engine.text.decoder_steps import Step, byte_of_piece, bytes_of_piece, step_makers, step_types
from pagewood.engine.text.panics import panics_as_errors
from pagewood.engine.text.vocabulary import Vocabulary

_BEFORE, _AFTER = "\ue000", "\ue001"
"""Pieces of private characters, which no step changes, so that a token is seen in the middle of a text."""


class TokenBytes:
    """The bytes that each token adds in the middle of a text, filled on demand.

    Special tokens have the bytes of their content, or none if they are skipped. An unknown token has none.

    Invariant: the joined bytes of tokens are the UTF-8 text of the tokens, except for invalid UTF-8 and for changes of
    a decoder at the beginning or end of a text or of a run of byte pieces, such as a stripped space. A token without
    text between two byte pieces ends their run: the parts of a character on its two sides are joined here, and invalid
    for the decoder.
    """

    __slots__ = ("_bytes", "_has_byte_pieces", "_is_byte_level", "_makers", "_tail", "_tokenizer", "_vocabulary")

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, skip_special_tokens: bool) -> None:
        decoder: Any = tokenizer.decoder
        types = step_types(decoder)
        self._tokenizer = tokenizer
        self._vocabulary = Vocabulary(tokenizer, skip_special_tokens=skip_special_tokens)
        self._is_byte_level = "ByteLevel" in types
        self._has_byte_pieces = "ByteFallback" in types
        self._makers = step_makers(decoder)
        self._tail = "" if self._makers is None else _text(self._makers, [_BEFORE, _AFTER]).removeprefix(_BEFORE)
        self._bytes: dict[int, bytes] = {}  # written by: of

    def of(self, token: int) -> bytes:
        """Return the bytes of `token`."""
        try:
            return self._bytes[token]
        except KeyError:
            pass
        self._bytes[token] = encoded = self._of(token)
        return encoded

    def _of(self, token: int) -> bytes:
        piece = self._vocabulary.piece(token)
        if piece is None:
            return b""
        if self._is_byte_level:
            return bytes_of_piece(piece)
        byte = byte_of_piece(piece) if self._has_byte_pieces else None
        if byte is not None and byte >= 0x80:  # other pieces are characters, which later steps may change
            return bytes([byte])
        if self._makers is None:
            with panics_as_errors():
                return self._tokenizer.decode([token], skip_special_tokens=False).encode()
        text = _text(self._makers, [_BEFORE, piece, _AFTER])
        return text.removeprefix(_BEFORE).removesuffix(self._tail).encode()


def _text(makers: list[Callable[[], Step]], pieces: list[str]) -> str:
    steps = [make() for make in makers]
    for step in steps:
        pieces = step.push(pieces) + step.end()
    return "".join(pieces)
