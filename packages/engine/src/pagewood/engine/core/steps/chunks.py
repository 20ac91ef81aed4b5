"""How much of a prompt is computed in one step."""

from __future__ import annotations

from typing import Protocol

from pagewood.engine.core.request import Request
from pagewood.engine.core.steps.policies import StepBudget

ANY_NUMBER = 1 << 30
"""More prompt tokens than any step can have."""


class ChunkSizes(Protocol):
    """How long a chunk of a prompt may be, where steps should take equal time."""

    def tokens(self, start: int, most: int) -> int:
        """Return how many tokens from position `start` on take no more time than `most` at the start of a prompt."""
        ...

    def worth(self, start: int, count: int) -> int:
        """Return how many tokens at the start of a prompt take as long as `count` from position `start` on."""
        ...


class Chunks:
    """Cuts prompts. Invariant: a chunk ends where the runner can end one, and within the budget.

    Args:
        max_scored: most prompt tokens of a request in one step if their log probabilities are wanted.
        align: a chunk that does not end its prompt ends at a multiple of this many positions.
        sizes: of long prompts; None: a chunk is as long as the budget allows.
    """

    __slots__ = ("_align", "_max_scored", "_sizes")

    def __init__(self, *, max_scored: int = ANY_NUMBER, align: int = 1, sizes: ChunkSizes | None = None) -> None:
        self._max_scored = max_scored
        self._align = align
        self._sizes = sizes

    def longest(
        self, request: Request, start: int, num_missing: int, budget: StepBudget, room: int = ANY_NUMBER
    ) -> int:
        """Return how many positions to compute from `start` on; 0 if no end of a chunk is within reach.

        Where log probabilities of the prompt are wanted, and fewer positions than `align` fit in the memory for them,
        the end is not aligned. An image that must be computed as a whole is not cut.

        Args:
            request: whose prompt it is.
            start: position from which on it is computed.
            num_missing: positions from there on, at least 1.
            budget: what is left of the step.
            room: a further limit, in tokens of the budget.
        """
        count = min(budget.offer_prefill(num_missing), room)
        if self._sizes is not None:
            count = min(count, self._sizes.tokens(start, min(budget.offer_prefill(ANY_NUMBER), room)))
        if request.num_unscored:
            count = min(count, self._max_scored)
        if request.images is not None:
            count = request.images.whole(start, min(count, num_missing))
        if self._align == 1 or count >= num_missing:
            return count
        aligned = (start + count) // self._align * self._align - start
        return count if aligned <= 0 < request.num_unscored else max(0, aligned)

    def worth(self, start: int, count: int) -> int:
        """Return the tokens of the budget that a chunk takes."""
        return count if self._sizes is None else self._sizes.worth(start, count)
