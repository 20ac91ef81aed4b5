"""A grammar that begins after a mark, such as the end of a section of reasoning."""

from __future__ import annotations

from collections.abc import Sequence

from pagewood.engine.grammar.entry import Entry, Marks
from pagewood.engine.grammar.mask import EndTokens, Mask
from pagewood.engine.grammar.matcher import Matcher, Prototype


class LaterPrototype:
    """A compiled grammar after the first of some marks; satisfies `Prototype`. Safe to use from all threads."""

    __slots__ = ("_entry", "_inner", "_vocab_size")

    def __init__(self, inner: Prototype, marks: Marks) -> None:
        """Put `inner` after `marks`; this computes the masks before it."""
        self._inner = inner
        self._entry = Entry(marks, inner.matcher(frozenset()))
        self._vocab_size = marks.vocab_size

    @property
    def is_spoiled(self) -> bool:
        """Whether a matcher has failed in a way that affects its copies."""
        return self._inner.is_spoiled

    def matcher(self, end_tokens: frozenset[int]) -> LaterMatcher:
        """Return a matcher before the grammar.

        Raises:
            ValueError: an end token is not in the vocabulary.
        """
        ends = EndTokens(end_tokens, others=frozenset(), vocab_size=self._vocab_size)
        return LaterMatcher(self._inner.matcher(end_tokens), self._entry, ends)


class LaterMatcher:
    """Allows the tokens of an entry until a mark has come, and then those of another matcher; satisfies `Matcher`.

    Invariant: before the mark has come, no end token is allowed, and the other matcher is at the start of its grammar.
    """

    __slots__ = ("_begun", "_ends", "_entry", "_error", "_inner")

    def __init__(self, inner: Matcher, entry: Entry, ends: EndTokens) -> None:
        """Put `inner`, at the start of its grammar, after `entry`."""
        self._inner = inner
        self._entry = entry
        self._ends = ends
        self._begun: bytes | None = b""  # written by: advance
        """Progress towards a mark; None once the grammar has begun."""
        self._error: str | None = None  # written by: advance

    def fill(self, row: Mask) -> None:
        """Write the tokens that may come next."""
        if self._error is not None:
            row[:] = 0
        elif self._begun is None:
            self._inner.fill(row)
        else:
            self._entry.write(row, self._begun)
            self._ends.write(row, can_end=False)

    def fill_ahead(self, drafts: Sequence[int], rows: Mask) -> int:
        """Write the masks along a chain of drafts; see `Matcher`."""
        if self._begun is None:
            return self._inner.fill_ahead(drafts, rows)
        begun = self._begun
        for num, draft in enumerate(drafts):
            self._entry.write(rows[num], begun)
            self._ends.write(rows[num], can_end=False)
            found = self._after(begun, draft)
            if found is None:
                return num + 1
            begun, inside = found
            if inside is not None:
                inner = self._inner.copy()  # if it fails after a draft, this matcher has not failed
                if inside:  # after a mark that ends within a token
                    inner.advance(inside)
                return num + 1 + inner.fill_ahead(drafts[num + 1 :], rows[num + 1 :])
        self._entry.write(rows[len(drafts)], begun)
        self._ends.write(rows[len(drafts)], can_end=False)
        return len(drafts) + 1

    def advance(self, tokens: Sequence[int]) -> bool:
        """Go on by `tokens`; False if one of them is not allowed, or the matcher fails."""
        for num, token in enumerate(tokens):
            if self._error is not None:
                return False
            if self._begun is None:
                return self._inner.advance(tokens[num:])
            found = self._after(self._begun, token)
            if found is None:
                self._error = f"token {token} comes before the text behind which the grammar begins"
                return False
            self._begun, inside = found
            if inside is not None:
                self._begun = None
                if inside and not self._inner.advance(inside):
                    return False
        return self.error is None

    def accepts(self, tokens: Sequence[int]) -> int:
        """Return how many of `tokens` are allowed one after the other; the state is as before."""
        if self._error is not None:
            return 0
        if self._begun is None:
            return self._inner.accepts(tokens)
        begun = self._begun
        for num, token in enumerate(tokens):
            found = self._after(begun, token)
            if found is None:
                return num
            begun, inside = found
            if inside is not None:
                behind = self._inner.accepts([*inside, *tokens[num + 1 :]]) if num + 1 < len(tokens) else len(inside)
                return num + 1 + max(0, behind - len(inside))
        return len(tokens)

    def forced(self) -> tuple[int, ...]:
        """Return the tokens that must come next."""
        return self._inner.forced() if self._begun is None and self._error is None else ()

    @property
    def is_finished(self) -> bool:
        """Whether nothing but the end can follow."""
        return self._begun is None and self._inner.is_finished

    @property
    def can_end(self) -> bool:
        """Whether the text may end: not before the grammar has begun."""
        return self._begun is None and self._inner.can_end

    @property
    def error(self) -> str | None:
        """Why the matcher has failed; None: it has not."""
        return self._error or self._inner.error

    @property
    def slow_ms(self) -> int:
        """Milliseconds that a recent token of the grammar has taken."""
        return self._inner.slow_ms

    def copy(self) -> LaterMatcher:
        """Return an independent matcher in the same state."""
        copy = LaterMatcher(self._inner.copy(), self._entry, self._ends)
        copy._begun, copy._error = self._begun, self._error
        return copy

    def _after(self, begun: bytes, token: int) -> tuple[bytes, tuple[int, ...] | None] | None:
        return None if token in self._ends.tokens else self._entry.after(begun, token)
