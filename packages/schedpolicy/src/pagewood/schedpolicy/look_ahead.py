"""How many pages running requests are expected to need at moments to come."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pagewood.schedpolicy.lengths import MAX_EXPECTED_TOKENS, NUM_PARTS, Lengths, part_of
from pagewood.schedpolicy.requests import Running

NUM_MOMENTS = 16
"""Moments of the future at which the demand for memory is estimated."""

Moments = tuple[list[tuple[int, int, int]], NDArray[np.float64], NDArray[np.float64]]
"""Number of each moment, with the steps from now to the moment before and to itself; and these two as `[16, 1]`."""


class LookAhead:
    """Moments up to a number of steps from now, and the pages that requests are expected to need at each of them.

    At a moment it counts what those that are expected to run at the moment before hold at this one, so the estimate is
    never too low between two. `add` and `of_many` find the same; for many requests `of_many` takes a fraction of the
    time.
    """

    __slots__ = ("_chances", "_moments", "_page_size", "_survival", "num_most")

    def __init__(self, survival: NDArray[np.float64], *, num_most: int, page_size: int) -> None:
        """Choose the moments.

        Args:
            survival: `[101]`, `NewTokenRatio.survival`.
            num_most: Steps to look ahead.
            page_size: Tokens of a page.
        """
        self._survival = survival
        self._chances: list[float] = survival.tolist()
        self._page_size = page_size
        self._moments = _moments_until(num_most)
        self.num_most = num_most

    def add(self, request: Running, growth: list[float]) -> None:
        """Add the pages that one request is expected to hold beyond its present ones to `growth`, at each moment."""
        page_size, survival = self._page_size, self._chances
        num_tokens, num_generated, num_most = request.num_tokens, request.num_generated, request.max_new_tokens
        num_left = min(num_most - num_generated, MAX_EXPECTED_TOKENS)
        num_shared = -(-(num_tokens - num_generated) // page_size)  # it stays, as the pages of a prompt may do
        num_own = -(-num_tokens // page_size) - num_shared
        now = part_of(request)
        divisor = survival[min(now + 1, NUM_PARTS)]
        for index, before, moment in self._moments[
            0
        ]:  # nothing is called here, because an engine does this in every step
            if before >= num_left:
                growth[index] -= num_own
                continue
            num_then = -(-(num_tokens + (moment if moment < num_left else num_left)) // page_size) - num_shared
            part = (num_generated + before) * NUM_PARTS // num_most
            if part > now:
                growth[index] += num_then * survival[part] / divisor - num_own
            else:
                growth[index] += num_then - num_own

    def of_many(self, lengths: Lengths, part: NDArray[np.intp]) -> list[float]:
        """Return what `add` adds for all of these requests together, to within errors of floats; `part` is theirs."""
        kept, (_, before, moment) = lengths.kept, self._moments
        going_on = self._survival[1:].take(part, mode="clip")
        survival = self._survival.copy()
        survival[NUM_PARTS] = 0.0  # a request that has reached its limit has ended
        parts = before * kept.parts_per_token
        parts += lengths.parts
        chance = survival.take(parts.astype(np.intp), mode="clip")
        chance /= going_on
        np.minimum(chance, 1.0, out=chance)  # before the next part
        pages = np.minimum(moment * (1 / kept.page_size), lengths.pages_left)
        pages += lengths.pages
        np.floor(pages, out=pages)
        pages -= kept.prompt_pages  # they stay, as the pages of a prompt may do
        num_own = lengths.num_pages - kept.num_prompt_pages
        return (np.einsum("ij,ij->i", chance, pages) - num_own).tolist()


@lru_cache(maxsize=64)
def _moments_until(num_most: int) -> Moments:
    """Return moments up to `num_most` steps from now. They are denser soon, when most requests end."""
    steps = [-(-num_most * number * number // NUM_MOMENTS**2) for number in range(NUM_MOMENTS + 1)]
    column = np.array(steps, np.float64)[:, None]
    return [(number, steps[number], steps[number + 1]) for number in range(NUM_MOMENTS)], column[:-1], column[1:]
