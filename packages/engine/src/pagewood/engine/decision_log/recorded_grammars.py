"""A compiler of grammars whose results and whose matchers' answers are recorded, and one that repeats them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagewood.engine.api import Grammar, Refusal
from pagewood.engine.core.masks.constrain import Compiler, Compiling
from pagewood.engine.decision_log.recorded_work import LoggedWork, RecordedWork, Recording, ReplayedWork
from pagewood.engine.grammar.mask import Mask
from pagewood.engine.grammar.matcher import Matcher

Answers = Mapping[tuple[int, int, str], Any]
"""Unusual answers of matchers, by grammar, tokens before and method."""


class RecordedCompiler:
    """A compiler whose results are kept, and the unusual answers of their matchers."""

    def __init__(self, inner: Compiler, recording: Recording) -> None:
        self._inner = inner
        self._recording = recording

    def compile(self, grammar: Grammar, *, end_tokens: frozenset[int], priority: int = 0) -> Compiling:
        """Begin to compile a grammar."""
        inner = self._inner.compile(grammar, end_tokens=end_tokens, priority=priority)
        return _RecordedCompiling(inner, self._recording)

    def close(self) -> None:
        """Close the compiler."""
        self._inner.close()


class _RecordedCompiling(RecordedWork[Matcher]):
    def __init__(self, inner: Compiling, recording: Recording) -> None:
        super().__init__(inner, recording, lambda matcher: {})
        self.prefer = inner.prefer

    def result(self) -> Matcher | Refusal:
        found = super().result()
        return found if isinstance(found, Refusal) else _RecordedMatcher(found, self.number, self._recording)


class _RecordedMatcher:
    """A matcher whose answers are kept if they are not the usual ones. They depend only on its text.

    Results of `fill` are kept by the next `advance`, because helper threads fill masks.
    """

    def __init__(self, inner: Matcher, number: int, recording: Recording) -> None:
        self._inner = inner
        self._number = number
        self._recording = recording
        self._place = 0
        """Tokens so far."""  # written by: advance
        self._finished_at = -1  # written by: is_finished
        self.fill, self.fill_ahead, self.accepts, self.copy = inner.fill, inner.fill_ahead, inner.accepts, inner.copy

    def advance(self, tokens: Sequence[int]) -> bool:
        is_allowed = self._inner.advance(tokens)
        self._place += len(tokens)
        if not is_allowed:
            self._answered("advance", is_allowed)
        if self._inner.error is not None:
            self._answered("error", True)
        return is_allowed

    def forced(self) -> tuple[int, ...]:
        forced = self._inner.forced()
        if forced:
            self._answered("forced", list(forced))
        return forced

    @property
    def is_finished(self) -> bool:
        is_finished = self._inner.is_finished
        if is_finished and self._finished_at != self._place:
            self._finished_at = self._place
            self._answered("is_finished", True)
        return is_finished

    @property
    def can_end(self) -> bool:
        return self._inner.can_end

    @property
    def error(self) -> str | None:
        return self._inner.error

    @property
    def slow_ms(self) -> int:
        slow_ms = self._inner.slow_ms
        if slow_ms:
            self._answered("slow_ms", slow_ms)
        return slow_ms

    def _answered(self, method: str, answer: Any) -> None:
        self._recording.turn.matchers.append((self._number, self._place, method, answer))


class ReplayedCompiler:
    """Compiles grammars as in a log.

    Args:
        logged: the work of the log.
        answers: of its matchers.
    """

    def __init__(self, logged: LoggedWork, answers: Answers) -> None:
        self._logged = logged
        self._answers = answers

    def compile(self, grammar: Grammar, *, end_tokens: frozenset[int], priority: int = 0) -> Compiling:
        """Return a grammar that becomes ready at the logged time."""
        return _ReplayedCompiling(self._logged, self._answers)

    def close(self) -> None:
        """Do nothing."""


class _ReplayedCompiling(ReplayedWork[Matcher]):
    def __init__(self, logged: LoggedWork, answers: Answers) -> None:
        super().__init__(logged, lambda values: _ReplayedMatcher(self.number, answers))

    def prefer(self, priority: int) -> None:
        """Do nothing: the time of its end is in the log."""


class _ReplayedMatcher:
    """Answers as in the log; satisfies `grammar.matcher.Matcher`."""

    def __init__(self, number: int, answers: Answers) -> None:
        self._number = number
        self._answers = answers
        self._place = 0  # written by: advance

    def fill(self, row: Mask) -> None:
        """Do nothing."""

    def fill_ahead(self, drafts: Sequence[int], rows: Mask) -> int:
        """Do nothing."""
        return 1 + len(drafts)

    def advance(self, tokens: Sequence[int]) -> bool:
        """Go on."""
        self._place += len(tokens)
        return self._said("advance", True)

    def accepts(self, tokens: Sequence[int]) -> int:
        """Accept all."""
        return len(tokens)

    def forced(self) -> tuple[int, ...]:
        """Return the tokens that were forced."""
        return tuple(self._said("forced", ()))

    @property
    def is_finished(self) -> bool:
        """Whether it was finished."""
        return self._said("is_finished", False)

    @property
    def can_end(self) -> bool:
        """Nothing depends on it."""
        return False

    @property
    def error(self) -> str | None:
        """Why it failed, if it did."""
        return "as in the log" if self._said("error", False) else None

    @property
    def slow_ms(self) -> int:
        """How slow it was."""
        return self._said("slow_ms", 0)

    def copy(self) -> _ReplayedMatcher:
        """Return another matcher in the same state."""
        copy = _ReplayedMatcher(self._number, self._answers)
        copy._place = self._place
        return copy

    def _said(self, method: str, usual: Any) -> Any:
        return self._answers.get((self._number, self._place, method), usual)
