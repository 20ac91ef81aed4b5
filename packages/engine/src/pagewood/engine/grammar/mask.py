"""Masks over a vocabulary, and the bits in them that end a request."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Mask: TypeAlias = NDArray[np.int32]
"""One bit for each token: bit `i % 32` of word `i // 32` is set if token i is allowed."""


def mask_words(vocab_size: int) -> int:
    """Return the number of int32 words of one mask."""
    return (vocab_size + 31) // 32


def check_row(row: Mask, num_words: int) -> None:
    """Raise ValueError if `row` is not one mask, since a library would write elsewhere."""
    if row.dtype != np.int32 or row.shape != (num_words,) or not row.flags.c_contiguous:
        raise ValueError(f"row must be contiguous int32 of shape ({num_words},), got {row.dtype} of shape {row.shape}")


class EndTokens:
    """The tokens that end a request, as bits of a mask. Immutable."""

    __slots__ = ("_words", "tokens")

    def __init__(self, tokens: frozenset[int], *, others: frozenset[int], vocab_size: int) -> None:
        """Prepare the bits.

        Args:
            tokens: end the request.
            others: tokens that end a sequence for the library, but not this request; never allowed.
            vocab_size: number of logits.

        Raises:
            ValueError: an end token is not in the vocabulary.
        """
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise ValueError(f"end_tokens must be in [0, {vocab_size}), got {token}")
        self.tokens = tokens
        places = {word: place for place, word in enumerate(sorted({token // 32 for token in tokens | others}))}
        kept = np.full(len(places), 0xFFFFFFFF, np.uint32)
        allowed = np.zeros(len(places), np.uint32)
        for token in tokens | others:
            kept[places[token // 32]] &= np.uint32(0xFFFFFFFF ^ (1 << token % 32))
        for token in tokens:
            allowed[places[token // 32]] |= np.uint32(1 << token % 32)
        self._words = list(zip(places, kept.view(np.int32), allowed.view(np.int32), strict=True))

    def write(self, row: Mask, *, can_end: bool) -> None:
        """Set the end tokens in `row` if `can_end`, otherwise clear them; clear the others."""
        for word, kept, allowed in self._words:  # they are few; arrays of indices would take longer
            others = row[word] & kept
            row[word] = others | allowed if can_end else others
