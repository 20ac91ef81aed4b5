"""The interface of a grammar library: the state of one request in a grammar, and the compiled grammar behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pagewood.engine.api import Grammar
from pagewood.engine.grammar.mask import Mask


class Matcher(Protocol):
    """The state of one request in its grammar.

    Invariant: the tokens so far are the start of a text of the grammar, or `error` is set. An error is final. One
    thread at a time may use a matcher; other threads may use its copies.

    End tokens (given when the matcher was made) are allowed exactly where the grammar can end, regardless of their
    text.
    """

    def fill(self, row: Mask) -> None:
        """Write the tokens that may come next into `row`; check `error` afterwards.

        If the grammar can end, the end tokens are among them; if it is finished, there are no others, and without end
        tokens the row is empty. After an error the row is empty.

        Args:
            row: [mask_words(vocab_size)] int32, contiguous.
        """
        ...

    def fill_ahead(self, drafts: Sequence[int], rows: Mask) -> int:
        """Write the masks along a chain of drafts: row j holds the tokens that may follow the first j drafts.

        The state is unchanged, unless there is an `error`, which then concerns the text before the drafts. A failure
        after a draft is no error; its row is empty and the last.

        Args:
            drafts: token ids that may come next, in order.
            rows: [at least 1 + len(drafts), mask_words(vocab_size)] int32, contiguous.

        Returns:
            Number of rows written: one more than the allowed drafts before the first that is not. An end token is the
            last draft that counts, and no row follows it.
        """
        ...

    def advance(self, tokens: Sequence[int]) -> bool:
        """Go on by `tokens`; False if one of them is not allowed, or the matcher fails. `error` then says why."""
        ...

    def accepts(self, tokens: Sequence[int]) -> int:
        """Return how many of `tokens` are allowed one after the other; the state is as before.

        The text of a `forced` token may also be spelt with other tokens. These are allowed here too, although masks
        have only the forced token.
        """
        ...

    def forced(self) -> tuple[int, ...]:
        """Return the tokens that must come next, as far as they are known; the state is unchanged."""
        ...

    @property
    def is_finished(self) -> bool:
        """Whether nothing but the end can follow, or the end has come."""
        ...

    @property
    def can_end(self) -> bool:
        """Whether the text is complete, though it may go on."""
        ...

    @property
    def error(self) -> str | None:
        """Why the matcher has failed; None: it has not."""
        ...

    @property
    def slow_ms(self) -> int:
        """Milliseconds of work that a recent token has taken; 0 for nearly all grammars."""
        ...

    def copy(self) -> Matcher:
        """Return an independent matcher in the same state."""
        ...


class Prototype(Protocol):
    """A compiled grammar. Safe to use from all threads."""

    @property
    def is_spoiled(self) -> bool:
        """Whether a matcher has failed in a way that affects its copies; a new prototype must then be compiled."""
        ...

    def matcher(self, end_tokens: frozenset[int]) -> Matcher:
        """Return a matcher at the start of the grammar.

        Args:
            end_tokens: tokens that end the request; empty for a request that no token ends.
        """
        ...


class Backend(Protocol):
    """A grammar library with a model's vocabulary. Safe to use from all threads."""

    def compile(self, grammar: Grammar) -> Prototype:
        """Compile `grammar`; this may take seconds.

        Raises:
            ValueError: the grammar is wrong, too large, or of a kind or with a keyword that is not supported.
        """
        ...
