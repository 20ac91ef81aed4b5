"""The processor time that the matchers of one grammar may take, because the step of all requests waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PER_MASK_S = 0.01
"""Time of a mask that costs nothing."""
MAX_DEBT_S = 0.5
"""Most time beyond that, at once or over many masks. It pays for masks that meet states of a lexer for the first
time."""


class GrammarBudget:
    """Time that a grammar has taken beyond the allowance of its masks. Safe to use from all threads.

    All matchers of a grammar share it, so that many requests for one slow grammar together take no more time than one.
    Once it is
    spent, it stays spent: the grammar is refused as long as it is remembered.
    """

    __slots__ = ("_debt_s", "_lock", "clock", "is_spent")

    def __init__(self, *, clock: Callable[[], float] = time.thread_time) -> None:
        """Start without a debt."""
        self.clock = clock
        """Returns seconds of work of the present thread."""
        self._debt_s = 0.0  # written by: add
        self._lock = threading.Lock()
        self.is_spent = False  # written by: add
        """Whether the matchers of the grammar must end."""

    def add(self, seconds: float) -> None:
        """Add to the debt; less than 0 s pays a part of it back."""
        with self._lock:
            self._debt_s = max(0.0, self._debt_s + seconds)
            self.is_spent = self.is_spent or self._debt_s > MAX_DEBT_S


TOO_SLOW = f"it took {MAX_DEBT_S:g} s more than its masks may take; simplify the grammar where it is ambiguous"
"""Why the matchers of a grammar without a budget fail."""


def check_budget(budget: GrammarBudget) -> None:
    """Raise ValueError if a grammar must not be used again."""
    if budget.is_spent:
        raise ValueError(f"the grammar is too slow: {TOO_SLOW}")
