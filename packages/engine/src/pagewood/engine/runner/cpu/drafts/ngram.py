"""Drafts from a row's own text: what followed when its last tokens occurred before."""

from __future__ import annotations

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.runner.cpu.compiled.drafting.lookup import MAX_N, MIN_N, draft_ngrams


class NgramLookup:
    """Looks up the longest suffix of each row; satisfies `drafting.LookupDrafter`. It keeps no state."""

    __slots__ = ("_max_n", "_min_n", "_tokens")

    follows = False

    def __init__(self, tokens: Int32, *, min_n: int = MIN_N, max_n: int = MAX_N) -> None:
        """Compile the search.

        Args:
            tokens: `[rows, positions] int32`, the token table of the runner. It is read, and drafts are written to it.
            min_n: shortest suffix that counts as a match.
            max_n: longest suffix that is compared.

        Raises:
            ValueError: a length is out of range.
        """
        if not 1 <= min_n <= max_n:
            raise ValueError(f"min_n must be in [1, max_n], got {min_n} with max_n {max_n}")
        draft_ngrams.compile()
        self._tokens = tokens
        self._min_n = min_n
        self._max_n = max_n

    def begin(self, row: int, namespace: int, num_prompt: int) -> None:
        """Do nothing."""

    def advance(self, rows: Int32, ends: Int32) -> None:
        """Do nothing."""

    def draft(self, rows: Int32, ends: Int32, most: Int32, counts: Int32) -> None:
        """Write drafts after the known tokens of rows; see `drafting.LookupDrafter`."""
        draft_ngrams(self._tokens, rows, ends, most, self._min_n, self._max_n, counts)
