"""Well-formed UTF-8 over tokens: which tokens may follow at each place inside a character."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagewood.engine.grammar.mask import Mask, mask_words

_NEXT: tuple[tuple[tuple[int, int, int], ...], ...] = (
    (
        *((0x00, 0x7F, 0), (0xC2, 0xDF, 1), (0xE0, 0xE0, 4), (0xE1, 0xEC, 2), (0xED, 0xED, 5), (0xEE, 0xEF, 2)),
        *((0xF0, 0xF0, 6), (0xF1, 0xF3, 3), (0xF4, 0xF4, 7)),
    ),
    ((0x80, 0xBF, 0),),
    ((0x80, 0xBF, 1),),
    ((0x80, 0xBF, 2),),
    ((0xA0, 0xBF, 1),),
    ((0x80, 0x9F, 1),),
    ((0x90, 0xBF, 2),),
    ((0x80, 0x8F, 2),),
)
"""First byte, last byte and the place after it, for each place; 0 is between characters.

Source: table 3-7 of the Unicode Standard, well-formed UTF-8 byte sequences."""
_TABLE = [{byte: to for first, last, to in row for byte in range(first, last + 1)} for row in _NEXT]


class Utf8:
    """The tokens of a vocabulary that keep a text well-formed. Immutable."""

    __slots__ = ("_allowed", "_pieces")

    def __init__(self, pieces: Sequence[bytes], *, vocab_size: int) -> None:
        """Take the bytes of each token; ids without any are left to the grammar."""
        self._pieces = [bytes(piece) for piece in pieces]
        bits = np.ones((len(_TABLE), 32 * mask_words(vocab_size)), np.bool_)
        for token, piece in enumerate(self._pieces):
            if piece.isascii():
                bits[1:, token] = not piece
            else:
                bits[:, token] = [self.after(place, token) is not None for place in range(len(_TABLE))]
        self._allowed = np.packbits(bits, axis=1, bitorder="little").view(np.int32)

    def after(self, place: int, token: int) -> int | None:
        """Return the place after a token; None if its bytes cannot follow."""
        for byte in self._pieces[token] if token < len(self._pieces) else b"":
            to = _TABLE[place].get(byte)
            if to is None:
                return None
            place = to
        return place

    def restrict(self, row: Mask, place: int) -> None:
        """Clear the tokens in a mask that cannot follow."""
        row &= self._allowed[place]
