"""The log probabilities of one request's tokens as messages: with the bytes of tokens and their places in the text."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from pagewood.engine.api import TokenLogprob
from pagewood.engine.text import Tokenizer
from pagewood.server.messages import wire

_NO_LOGPROB = 0.0
"""Log probability of the first token of a prompt; its rank 0 shows that it has none."""


class TokenEntries:
    """Makes the entries of consecutive tokens.

    Invariant: the offset of an entry is the length of the text of the tokens before it, without the character that
    the token continues, if it does.

    Args:
        tokenizer: decodes the request.
        start: characters before the first token.
    """

    __slots__ = ("_bytes_of", "_has_begun", "_is_within", "_offset", "_shown_of", "_tokenizer", "_utf8")

    def __init__(self, tokenizer: Tokenizer, *, start: int) -> None:
        self._tokenizer = tokenizer
        self._bytes_of = tokenizer.bytes_of_tokens()
        self._shown_of = tokenizer.bytes_of_tokens(skip_special_tokens=True)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = start  # written by: _place
        self._has_begun = False  # written by: _place
        self._is_within = False  # written by: _place. Whether the bytes so far end within a character

    def of(self, logprobs: Iterable[TokenLogprob]) -> tuple[wire.TokenEntry, ...]:
        """Return the entries of the next tokens."""
        return tuple([self._of(one) for one in logprobs])

    def skip(self, tokens: Iterable[int]) -> None:
        """Pass over tokens whose entries exist already."""
        for token in tokens:
            self._place(token)

    def first_of_prompt(self, token: int) -> wire.TokenEntry:
        """Return the entry of the first token of a prompt, which has no log probability."""
        return wire.TokenEntry(wire.ScoredToken(token, self._bytes_of(token), _NO_LOGPROB), 0, self._place(token), ())

    def _of(self, one: TokenLogprob) -> wire.TokenEntry:
        chosen, logprob, rank, top, kept = one
        scored, bytes_of = wire.ScoredToken, self._bytes_of
        return wire.TokenEntry(
            scored(chosen, bytes_of(chosen), logprob),
            rank,
            self._place(chosen),
            tuple([scored(token, bytes_of(token), logprob) for token, logprob in top]),
            kept,
        )

    def _place(self, token: int) -> int:
        """Return the place of a token in the text, and move on to the next."""
        data = self._shown_of(token)
        if self._has_begun and not self._is_within and data.isascii():
            offset = self._offset
            self._offset += len(data)
            return offset
        pending = self._utf8.getstate()[0]
        offset = self._offset + (bool(pending) and not _continues(pending, data))
        if not data:
            return offset
        if not self._has_begun:
            self._has_begun = True
            first = self._tokenizer.decode([token])  # a decoder may strip a space there
            if "\ufffd" not in first:
                self._offset += len(first)
                return offset
        self._offset += len(self._utf8.decode(data))
        self._is_within = bool(self._utf8.getstate()[0])
        return offset


def _continues(pending: bytes, data: bytes) -> bool:
    """Return whether `data` continues the character that `pending` begins."""
    try:
        (pending + data[:1]).decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return True
