"""Counts by size, and a bounded number of labels, for metrics; standard library only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from itertools import pairwise

OTHER = "other"
"""Label of all values beyond the limit of a `Labels`."""


class Histogram:
    """Counts values by upper bounds. Invariant: `counts` has one more element than `bounds`, for larger ones.

    Attributes:
        bounds: upper bounds, ascending; a value equal to a bound is below it.
        counts: values between two bounds, not cumulated.
        total: sum of all values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """Start without values.

        Raises:
            ValueError: the bounds do not ascend.
        """
        if any(low >= high for low, high in pairwise(bounds)):
            raise ValueError(f"bounds must ascend, got {list(bounds)}")
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)  # written by: add
        self.total = 0.0  # written by: add

    def add(self, value: float, num: int = 1) -> None:
        """Count `num` equal values."""
        self.counts[bisect_left(self.bounds, value)] += num
        self.total += value * num


class Labels:
    """Names for values that a client chooses. Invariant: there are at most `limit` names, `other` among them.

    The first values get names of their own and keep them, so that a counter never changes its label.
    """

    __slots__ = ("_limit", "_names")

    def __init__(self, limit: int) -> None:
        """Give at most `limit` names, >= 2."""
        if limit < 2:
            raise ValueError(f"limit must be >= 2, got {limit}")
        self._limit = limit
        self._names: dict[Hashable, str] = {}  # written by: of

    def of(self, value: Hashable) -> str:
        """Return the name of a value."""
        name = self._names.get(value)
        if name is not None:
            return name
        if len(self._names) >= self._limit - 1:
            return OTHER
        self._names[value] = name = str(value)
        return name
