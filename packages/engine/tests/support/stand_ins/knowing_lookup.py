"""A lookup drafter that knows the texts, and errs at random."""

# pyright: basic
# numpy's scalars have no types.

from __future__ import annotations

import numpy as np

from pagewood.engine.core.messages.arrays import Int32


class KnowingLookup:
    """Drafts what it knows of each row's text; each token is wrong with some probability, and drafts may be shorter."""

    def __init__(self, tokens: Int32, texts: list[list[int]], *, quality: float, seed: int, full: bool = False) -> None:
        self.tokens = tokens
        self.texts = texts
        self.quality = quality
        self.full = full
        self.rng = np.random.default_rng(seed)
        self.advanced: list[tuple[int, int]] = []

    follows = True

    def begin(self, row: int, namespace: int, num_prompt: int) -> None:
        """Do nothing."""

    def advance(self, rows: Int32, ends: Int32) -> None:
        """Remember the calls."""
        self.advanced += zip(rows.tolist(), ends.tolist(), strict=True)

    def draft(self, rows: Int32, ends: Int32, most: Int32, counts: Int32) -> None:
        """Draft."""
        for i, (row, end) in enumerate(zip(rows.tolist(), ends.tolist(), strict=True)):
            counts[i] = most[i] if self.full else self.rng.integers(0, most[i] + 1)
            for position in range(end, end + counts[i]):
                is_right = self.rng.random() < self.quality and position < len(self.texts[row])
                self.tokens[row, position] = self.texts[row][position] if is_right else self.rng.integers(0, 40)
