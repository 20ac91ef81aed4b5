"""A `Matcher` over the state of any grammar library, with the same end tokens, errors and chains of drafts for all."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Protocol

from pagewood.engine.grammar.budget import PER_MASK_S, TOO_SLOW, GrammarBudget
from pagewood.engine.grammar.mask import EndTokens, Mask, check_row, mask_words

_KEPT = 0.9
"""Factor by which the work of older tokens counts less, in the measure of a matcher's slowness."""


class LibraryState(Protocol):
    """The state of a grammar in a library, which knows no end tokens. A `failure` is final, except for `restart`."""

    def fill(self, row: Mask) -> None:
        """Write the tokens that may come next; bits of tokens that end a sequence are ignored."""
        ...

    def consume(self, tokens: list[int]) -> bool:
        """Go on by tokens of the vocabulary; False, with a `failure`, if one of them is not allowed."""
        ...

    def num_allowed(self, tokens: list[int]) -> int:
        """Return how many tokens of the vocabulary are allowed one after the other; the state is as before."""
        ...

    def roll_back(self, num_tokens: int) -> None:
        """Return to the state before the last tokens."""
        ...

    def restart(self) -> None:
        """Return to the start of the grammar, and forget a failure that concerns only this matcher."""
        ...

    def forced(self) -> tuple[int, ...]:
        """Return tokens that must come next; the state is unchanged."""
        ...

    @property
    def can_end(self) -> bool:
        """Whether the text is complete."""
        ...

    @property
    def is_stopped(self) -> bool:
        """Whether the text is complete and nothing can follow."""
        ...

    @property
    def failure(self) -> str | None:
        """Why the library has failed, or which token was not allowed."""
        ...

    def copy(self) -> LibraryState:
        """Return an equal state."""
        ...


class RequestMatcher:
    """The state of one request in a grammar; see `Matcher`."""

    __slots__ = ("_budget", "_ends", "_error", "_has_ended", "_lately_s", "_spent_s", "_state", "_text", "_vocab_size")

    def __init__(self, state: LibraryState, *, ends: EndTokens, vocab_size: int, budget: GrammarBudget) -> None:
        self._budget = budget
        self._state = state
        self._ends = ends
        self._vocab_size = vocab_size
        self._error: str | None = None  # written by: RequestMatcher
        self._has_ended = False  # written by: RequestMatcher
        self._text: list[int] = []
        """The tokens so far, without the end token."""  # written by: RequestMatcher
        self._spent_s = 0.0
        """Work since the last call of `advance`."""  # written by: RequestMatcher
        self._lately_s = 0.0
        """Work of the slowest token before it, reduced by a tenth for each later token."""
        # written by: RequestMatcher

    def fill(self, row: Mask) -> None:
        """Write the tokens that may come next into `row`.

        Raises:
            ValueError: `row` is not one mask.
        """
        check_row(row, mask_words(self._vocab_size))
        if self._failed() or self._has_ended:
            row[:] = 0
            self._ends.write(row, can_end=self._has_ended)
            return
        with self._work(allowed_s=PER_MASK_S):
            self._state.fill(row)
        if self._failed():
            row[:] = 0
            return
        can_end = self._state.can_end
        self._ends.write(row, can_end=can_end)
        if not row.any():
            self._has_ended = can_end  # without end tokens, this is the only sign of an unforeseen end
            if not can_end:
                self._error = "every token that may come next is an end token"

    def fill_ahead(self, drafts: Sequence[int], rows: Mask) -> int:
        """Write the masks along a chain of drafts, and return how many; see `Matcher`.

        Raises:
            ValueError: `rows` are not more than the drafts, or not masks.
        """
        if len(rows) <= len(drafts):
            raise ValueError(f"rows must be more than the {len(drafts)} drafts, got {len(rows)}")
        num_consumed = 0
        had_ended = self._has_ended
        self.fill(rows[0])
        for draft in drafts:
            if self._error is not None or draft in self._ends.tokens or not 0 <= draft < self._vocab_size:
                break
            if not int(rows[num_consumed][draft // 32]) >> draft % 32 & 1:
                break
            if not self._consume([draft]):
                rows[num_consumed + 1] = 0
                self._go_back(num_consumed)
                return num_consumed + 2
            num_consumed += 1
            self.fill(rows[num_consumed])
        if num_consumed:
            self._has_ended = had_ended
            self._go_back(num_consumed)
        return num_consumed + 1

    def advance(self, tokens: Sequence[int]) -> bool:
        """Go on by `tokens`; False if one of them is not allowed, or the library fails."""
        self._lately_s = max(self._spent_s, self._lately_s * _KEPT)
        self._spent_s = 0.0
        if self._failed():
            return False
        tokens = [int(token) for token in tokens]
        num_before = self._num_before_end(tokens)
        before, after = tokens[:num_before], tokens[num_before:]
        if self._has_ended and tokens:
            self._error = f"token {tokens[0]} follows the end"
        elif after and after[0] not in self._ends.tokens:
            self._error = f"token must be in [0, {self._vocab_size}), got {after[0]}"
        elif before and not self._consume(before):
            self._failed()
        elif after and not self._state.can_end:
            self._error = f"token {after[0]} ends the text before it is complete"
        elif len(after) > 1:
            self._error = f"token {after[1]} follows the end"
        else:
            self._has_ended |= bool(after)
        if self._error is not None:
            return False
        self._text += before
        return True

    def accepts(self, tokens: Sequence[int]) -> int:
        """Return how many of `tokens` are allowed one after the other; the state is as before."""
        if self._failed() or self._has_ended:
            return 0
        num_before = self._num_before_end(tokens)
        before = [int(token) for token in tokens[:num_before]]
        with self._work():
            num_allowed = self._state.num_allowed(before) if before else 0
        if self._failed() or num_allowed < len(before) or num_allowed == len(tokens):
            return num_allowed
        if tokens[num_allowed] not in self._ends.tokens:
            return num_allowed
        if not before:
            return int(self._state.can_end)
        ahead = self._state.copy()
        return num_allowed + (ahead.consume(before) and ahead.can_end)

    def forced(self) -> tuple[int, ...]:
        """Return the tokens that must come next, as far as they are known."""
        if self._error is not None or self.is_finished:
            return ()
        with self._work():
            forced = self._state.forced()
        return forced[: self._num_before_end(forced)]

    @property
    def is_finished(self) -> bool:
        """Whether nothing but the end can follow, or the end has come."""
        return self._error is None and (self._has_ended or self._state.is_stopped)

    @property
    def can_end(self) -> bool:
        """Whether the text is complete, though it may go on."""
        return self._error is None and (self._has_ended or self._state.can_end)

    @property
    def error(self) -> str | None:
        """Why the matcher has failed; None: it has not."""
        return self._error

    @property
    def slow_ms(self) -> int:
        """Milliseconds of work that the slowest of the last tokens took, rounded down; older ones count less."""
        return int(1000 * self._lately_s)

    def copy(self) -> RequestMatcher:
        """Return an independent matcher in the same state."""
        copy = RequestMatcher(self._state.copy(), ends=self._ends, vocab_size=self._vocab_size, budget=self._budget)
        copy._error = self._error
        copy._has_ended = self._has_ended
        copy._text = list(self._text)
        return copy

    def _num_before_end(self, tokens: Sequence[int]) -> int:
        """Return the number of tokens before the first that ends the request or is not in the vocabulary."""
        ends, vocab_size = self._ends.tokens, self._vocab_size
        for index, token in enumerate(tokens):
            if token in ends or not 0 <= token < vocab_size:
                return index
        return len(tokens)

    @contextmanager
    def _work(self, *, allowed_s: float = 0.0) -> Generator[None]:
        """Count the time of a mask or of other work; the allowance of its masks is subtracted."""
        clock = self._budget.clock
        began_s = clock()
        try:
            yield
        finally:
            seconds = clock() - began_s
            self._spent_s += seconds
            self._budget.add(seconds - allowed_s)

    def _go_back(self, num_drafts: int) -> None:
        """Return to the state before some consumed drafts; a failure after them does not concern this text."""
        self._error = None
        with self._work():
            if self._state.failure is None:
                self._state.roll_back(num_drafts)
            else:  # libraries cannot roll back after a failure
                self._state.restart()
                if self._text:
                    self._state.consume(self._text)
        self._failed()

    def _consume(self, tokens: list[int]) -> bool:
        with self._work():
            return self._state.consume(tokens)

    def _failed(self) -> bool:
        """Take over a failure of the library or the end of the budget, and return whether there is one."""
        if self._error is None:
            self._error = TOO_SLOW if self._budget.is_spent else self._state.failure
        return self._error is not None
