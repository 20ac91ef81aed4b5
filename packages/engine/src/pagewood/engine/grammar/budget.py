"""How much processor time the matchers of one grammar may take: the step of all other requests waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

PER_MASK_S = 0.01
"""Time of a mask that costs nothing."""
MAX_DEBT_S = 0.5
"""Most time beyond that, at once or over many masks. It pays for masks that meet states of a lexer first."""


class GrammarBudget:
    """Time that a grammar has taken beyond what its masks may take. Safe to use from all threads.

    All matchers of a grammar share it, so that many requests for one slow grammar take no more than one. Once it is
    spent, it stays spent: the grammar is refused as long as it is remembered.
    """

    __slots__ = ("_clock", "_debt_s", "_lock", "is_spent")

    def __init__(self, *, clock: Callable[[], float] = time.thread_time) -> None:
        """Start without a debt; `clock` returns seconds of work of the present thread."""
        self._clock = clock
        self._debt_s = 0.0  # written by: _add
        self._lock = threading.Lock()
        self.is_spent = False  # written by: _add
        """Whether the matchers of the grammar must end."""

    @contextmanager
    def mask(self) -> Generator[None]:
        """Count the time of a mask, for which `PER_MASK_S` is allowed."""
        began_s = self._clock()
        try:
            yield
        finally:
            self._add(self._clock() - began_s - PER_MASK_S)

    @contextmanager
    def other(self) -> Generator[None]:
        """Count the time of anything else; it is paid for by the masks that come with it."""
        began_s = self._clock()
        try:
            yield
        finally:
            self._add(self._clock() - began_s)

    def _add(self, seconds: float) -> None:
        with self._lock:
            self._debt_s = max(0.0, self._debt_s + seconds)
            self.is_spent = self.is_spent or self._debt_s > MAX_DEBT_S


TOO_SLOW = f"it took {MAX_DEBT_S:g} s more than its masks may take; simplify the grammar where it is ambiguous"
"""Why the matchers of a grammar without a budget fail."""


def check_budget(budget: GrammarBudget) -> None:
    """Raise ValueError if a grammar must not be used again."""
    if budget.is_spent:
        raise ValueError(f"the grammar is too slow: {TOO_SLOW}")
