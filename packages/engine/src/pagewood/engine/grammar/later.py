"""A grammar that begins behind certain tokens, such as those that end a section of reasoning."""

from __future__ import annotations

from collections.abc import Sequence

from pagewood.engine.grammar.mask import Mask
from pagewood.engine.grammar.matcher import Matcher


class LaterMatcher:
    """Allows every token until `after` has come, and then what another matcher allows; satisfies `Matcher`."""

    __slots__ = ("_after", "_inner", "_recent")

    def __init__(self, inner: Matcher, after: tuple[int, ...]) -> None:
        """Put `inner`, at the start of its grammar, behind the tokens `after`, which are at least one."""
        self._inner = inner
        self._after = after
        self._recent: tuple[int, ...] = ()
        """The latest tokens, as many as `after` has; equal to it once the grammar has begun."""  # written by: advance

    @property
    def _has_begun(self) -> bool:
        return self._recent == self._after

    def _num_before(self, tokens: Sequence[int]) -> int:
        """Return how many of some tokens come before the grammar begins."""
        recent = self._recent
        for num, token in enumerate(tokens):
            if recent == self._after:
                return num
            recent = (*recent, token)[-len(self._after) :]
        return len(tokens)

    def fill(self, row: Mask) -> None:
        """Write the tokens that may come next."""
        if self._has_begun:
            self._inner.fill(row)
        else:
            row[:] = -1

    def fill_ahead(self, drafts: Sequence[int], rows: Mask) -> int:
        """Write the masks along a chain of drafts; see `Matcher`."""
        num_before = self._num_before(drafts)
        rows[:num_before] = -1
        recent = (*self._recent, *drafts[:num_before])[-len(self._after) :]
        if recent == self._after:
            return num_before + self._inner.fill_ahead(drafts[num_before:], rows[num_before:])
        rows[num_before] = -1
        return num_before + 1

    def advance(self, tokens: Sequence[int]) -> bool:
        """Go on by `tokens`; False if one of them is not allowed, or the matcher fails."""
        num_before = self._num_before(tokens)
        if num_before:
            self._recent = (*self._recent, *tokens[:num_before])[-len(self._after) :]
        return self._inner.advance(tokens[num_before:])

    def accepts(self, tokens: Sequence[int]) -> int:
        """Return how many of `tokens` are allowed one after the other; the state is as before."""
        num_before = self._num_before(tokens)
        return num_before + (self._inner.accepts(tokens[num_before:]) if num_before < len(tokens) else 0)

    def forced(self) -> tuple[int, ...]:
        """Return the tokens that come next in any case."""
        return self._inner.forced() if self._has_begun else ()

    @property
    def is_finished(self) -> bool:
        """Whether nothing but the end can follow."""
        return self._has_begun and self._inner.is_finished

    @property
    def can_end(self) -> bool:
        """Whether the text may end: before the grammar it may."""
        return not self._has_begun or self._inner.can_end

    @property
    def error(self) -> str | None:
        """Why the matcher has failed; None: it has not."""
        return self._inner.error

    def copy(self) -> LaterMatcher:
        """Return a matcher in the same state, that goes on by itself."""
        copy = LaterMatcher(self._inner.copy(), self._after)
        copy._recent = self._recent
        return copy
