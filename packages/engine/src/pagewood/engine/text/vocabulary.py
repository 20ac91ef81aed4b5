# pyright: basic
# The bindings of `tokenizers` carry no usable annotations.
"""Maps a token id to its piece, the string that a decoder starts from."""

from __future__ import annotations

import tokenizers


class Vocabulary:
    """The pieces of a tokenizer by id, filled on demand.

    Invariant: `piece(i)` is the string that `tokenizers.Tokenizer.decode` passes to its decoder for `i`; None if it
    skips `i`.
    """

    __slots__ = ("_pieces", "_special", "_tokenizer")

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, *, skip_special_tokens: bool, keep: frozenset[str] = frozenset()
    ) -> None:
        """Take the library's tokenizer; special tokens in `keep` are not skipped."""
        self._tokenizer = tokenizer
        self._special: frozenset[str] = frozenset(
            token.content
            for token in tokenizer.get_added_tokens_decoder().values()
            if token.special and skip_special_tokens and token.content not in keep
        )
        self._pieces: dict[int, str | None] = {}  # written by: piece

    def piece(self, token: int) -> str | None:
        """Return the piece of `token`; None if the token is unknown, or special and skipped."""
        try:
            return self._pieces[token]
        except KeyError:
            pass
        piece = self._tokenizer.id_to_token(token)
        self._pieces[token] = piece = None if piece in self._special else piece
        return piece
