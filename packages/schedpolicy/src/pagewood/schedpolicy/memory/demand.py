"""The demand for memory at future moments, with and without one more request."""

import math

from pagewood.schedpolicy.memory.look_ahead import LookAhead
from pagewood.schedpolicy.requests import Running

_ROUNDING = 1e-6
"""Sums of probabilities that differ by less count as equal, so that the order of summation does not matter."""


class Demand:
    """Pages that requests are expected to need beyond their present ones, at the moments of a `LookAhead`.

    Invariant: the time of `worst_with` does not depend on the number of requests. Candidates like an earlier one take
    hardly any time.
    """

    __slots__ = ("_ahead", "_growth", "_scale", "_worst_with", "worst_moment")

    def __init__(self, ahead: LookAhead, growth: list[float], *, scale: float) -> None:
        """Begin with requests that need `growth` pages at each moment; from now on this owns the list.

        Args:
            ahead: The moments.
            growth: Pages that the requests so far need, at each moment.
            scale: Factor of the demand.
        """
        self._ahead = ahead
        self._growth = growth  # contents written by: add
        self._scale = scale
        self._worst_with: dict[tuple[int, int, int], int] = {}  # contents written by: worst_with, add
        self.worst_moment = 0
        """Index of the moment of the largest demand, for the latest candidate that had to be computed."""
        # written by: worst_with

    @property
    def num_most(self) -> int:
        """Steps to look ahead."""
        return self._ahead.num_most

    def add(self, request: Running) -> None:
        """Count a request."""
        self._ahead.add(request, self._growth)
        self._worst_with.clear()

    def worst(self) -> int:
        """Return the pages of the largest demand."""
        return self._pages(max(self._growth))

    def worst_with(self, candidate: Running) -> int:
        """Return the pages of the largest demand if a candidate ran too."""
        num_generated, num_most = candidate.num_generated, candidate.max_new_tokens
        alike = (candidate.num_tokens - num_generated) % self._ahead.page_size, num_generated, num_most
        pages = self._worst_with.get(alike)
        if pages is None:
            growth = self._growth.copy()
            self._ahead.add(candidate, growth)
            most = max(growth)
            self.worst_moment = growth.index(most)
            pages = self._worst_with[alike] = self._pages(most)
        return pages

    def _pages(self, growth: float) -> int:
        return max(0, math.ceil(self._scale * growth - _ROUNDING))
