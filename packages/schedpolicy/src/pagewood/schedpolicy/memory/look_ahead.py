"""How many pages running requests are expected to need at future moments."""

from collections.abc import Sequence
from functools import lru_cache

from pagewood.schedpolicy.memory.lengths import MAX_EXPECTED_TOKENS, NUM_PARTS, part_of
from pagewood.schedpolicy.requests import Running

NUM_MOMENTS = 16
"""Future moments at which the demand for memory is estimated."""


class LookAhead:
    """Moments up to a number of steps from now, and the pages that requests are expected to need at each of them.

    The demand at a moment counts the requests that are expected to run at the previous moment, with the pages that they
    hold at this one. So the estimate is never too low between two moments.
    """

    __slots__ = ("_moments", "num_most", "number", "page_size", "survival")

    def __init__(self, survival: Sequence[float], *, num_most: int, page_size: int, number: int | None = None) -> None:
        """Choose the moments.

        Args:
            survival: `NewTokenRatio.survival`.
            num_most: Steps to look ahead.
            page_size: Tokens of a page.
            number: The only moment to look at, in [0, `NUM_MOMENTS`); None: all moments.
        """
        self.survival = survival
        self.page_size = page_size
        self._moments = moments_until(num_most, number)
        self.num_most = num_most
        self.number = number

    def add(self, request: Running, growth: list[float]) -> None:
        """Add to `growth`, for each moment, the pages that a request is expected to hold beyond its present ones."""
        page_size, survival = self.page_size, self.survival
        num_tokens, num_generated, num_most = request.num_tokens, request.num_generated, request.max_new_tokens
        num_left = min(num_most - num_generated, MAX_EXPECTED_TOKENS)
        num_shared = -(-(num_tokens - num_generated) // page_size)  # prompt pages may stay cached after the end
        num_own = -(-num_tokens // page_size) - num_shared
        now = part_of(request)
        divisor = survival[min(now + 1, NUM_PARTS)]
        for index, before, moment in self._moments:  # no calls here: an engine runs this in every step
            if before >= num_left:
                growth[index] -= num_own
                continue
            num_then = -(-(num_tokens + (moment if moment < num_left else num_left)) // page_size) - num_shared
            part = (num_generated + before) * NUM_PARTS // num_most
            if part > now:
                growth[index] += num_then * survival[part] / divisor - num_own
            else:
                growth[index] += num_then - num_own


@lru_cache(maxsize=64)
def moments_until(num_most: int, number: int | None = None) -> list[tuple[int, int, int]]:
    """Return moments up to `num_most` steps from now, denser soon, when most requests end; or only the one `number`.

    Returns:
        For each moment: its index in the list, the steps from now to the previous moment, and the steps to it.
    """
    steps = [-(-num_most * index * index // NUM_MOMENTS**2) for index in range(NUM_MOMENTS + 1)]
    chosen = range(NUM_MOMENTS) if number is None else (number,)
    return [(index, steps[one], steps[one + 1]) for index, one in enumerate(chosen)]
