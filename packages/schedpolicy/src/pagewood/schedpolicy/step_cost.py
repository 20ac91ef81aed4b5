"""What a step of n tokens costs, and what drafting costs: measured at start, corrected by every step."""

import math
from collections.abc import Sequence
from itertools import pairwise

_SLOW_RATE = 0.02
_LAST_COUNT = 19


class StepCost:
    """Seconds of a step by its number of tokens, from a table that observed steps correct.

    Between two measured sizes the table is interpolated linearly, below the smallest it is constant, and above the
    largest it continues with the slope of all of it. It need be neither convex nor continuous: a machine whose steps
    are padded to 16 and 32 tokens is measured at 1, 16, 17 and 32.

    An observation corrects its own size, sizes near it in the same interval (the less, the more steps these have had),
    and slowly a factor of all sizes, for changes that concern every step, such as longer contexts. Invariant: every
    entry is positive and finite, and one observation changes none by more than a factor of two.
    """

    __slots__ = ("_bounds", "_counts", "_scale", "_slope", "_table")

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        """Start from a measurement.

        Args:
            sizes: Tokens of the measured steps, ascending, >= 1; at least one.
            seconds: Duration of each, > 0.

        Raises:
            ValueError: The sizes do not ascend, or a duration is not positive and finite.
        """
        if not sizes or len(sizes) != len(seconds):
            raise ValueError(f"sizes and seconds must be as many, at least 1, got {len(sizes)} and {len(seconds)}")
        if sizes[0] < 1 or any(a >= b for a, b in pairwise(sizes)):
            raise ValueError(f"sizes must be >= 1 and ascend, got {list(sizes)}")
        if not all(0 < value < math.inf for value in seconds):
            raise ValueError(f"seconds must be > 0 and finite, got {list(seconds)}")
        self._table = [float(seconds[0])] * (sizes[0] + 1)  # written by: StepCost
        for (a, b), (low, high) in zip(pairwise(sizes), pairwise(seconds), strict=True):
            self._table += [low + (high - low) * (size - a) / (b - a) for size in range(a + 1, b + 1)]
        self._bounds = list(sizes)
        self._counts = [0] * len(self._table)
        """Observed steps of each size, at most `_LAST_COUNT`."""  # written by: StepCost
        self._scale = 1.0
        """Factor of the whole table."""  # written by: StepCost
        self._slope = max(0.0, seconds[-1] - seconds[0]) / max(1, sizes[-1] - sizes[0])

    def seconds(self, num_tokens: int) -> float:
        """Return the seconds of a step of `num_tokens` >= 0 tokens."""
        if num_tokens >= len(self._table):
            self._extend(num_tokens)
        return self._table[num_tokens] * self._scale

    def after(self, num_tokens: int, num_more: int) -> list[float]:
        """Return the seconds of steps of 1, 2, ..., `num_more` tokens more than `num_tokens`."""
        end = num_tokens + num_more
        if end >= len(self._table):
            self._extend(end)
        scale = self._scale
        return [value * scale for value in self._table[num_tokens + 1 : end + 1]]

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Correct the table by a measured step."""
        ratio = min(2.0, max(0.5, seconds / self.seconds(num_tokens)))
        self._scale *= 1 + _SLOW_RATE * (ratio - 1)
        table, counts = self._table, self._counts
        count = counts[num_tokens]
        change = (ratio - 1) / (count + 2)
        counts[num_tokens] = min(count + 1, _LAST_COUNT)
        table[num_tokens] *= 1 + change
        reach = min(num_tokens // 8, 64)
        low, high = self._interval(num_tokens)
        for size in range(max(low, num_tokens - reach), min(high, num_tokens + reach) + 1):
            if size != num_tokens:
                table[size] *= 1 + change / (2 + 2 * counts[size])

    def _interval(self, num_tokens: int) -> tuple[int, int]:
        """Return the first and the last size of the measured interval (a, b] that `num_tokens` is in."""
        low = 0
        for bound in self._bounds:
            if num_tokens <= bound:
                return low + 1, bound
            low = bound
        return low + 1, len(self._table) - 1

    def _extend(self, num_tokens: int) -> None:
        first, last = len(self._table), self._table[-1]
        end = num_tokens + num_tokens // 4
        self._table += [last + self._slope * (size - first + 1) for size in range(first, end + 1)]
        self._counts += [0] * (end + 1 - first)


class DraftCost:
    """Seconds of drafting: a part for each step that drafts, one for each pass of the drafter, one for each token.

    A draft model makes one pass for each position, over all requests that still draft; a lookup makes none, so its time
    is all in the first part. Every measured step moves the three parts to explain it, by the least change that does
    (normalised least mean squares). Invariant: no part is negative.
    """

    __slots__ = ("per_pass_s", "per_step_s", "per_token_s")

    def __init__(self, *, per_step_s: float = 0.0, per_pass_s: float = 0.0, per_token_s: float = 0.0) -> None:
        """Start from a measurement, or from 0.

        Args:
            per_step_s: Seconds of a step that drafts at all, >= 0.
            per_pass_s: Seconds for each position of the longest draft, >= 0.
            per_token_s: Seconds for each draft token, >= 0.

        Raises:
            ValueError: One of them is negative or not finite.
        """
        for name, value in (("per_step_s", per_step_s), ("per_pass_s", per_pass_s), ("per_token_s", per_token_s)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be >= 0 and finite, got {value}")
        self.per_step_s = per_step_s  # written by: DraftCost
        self.per_pass_s = per_pass_s  # written by: DraftCost
        self.per_token_s = per_token_s  # written by: DraftCost

    def seconds(self, num_passes: int, num_tokens: int) -> float:
        """Return the seconds of drafting `num_tokens` tokens, of which one request has `num_passes`; 0 for none."""
        if not num_tokens:
            return 0.0
        return self.per_step_s + self.per_pass_s * num_passes + self.per_token_s * num_tokens

    def observe(self, num_passes: int, num_tokens: int, seconds: float) -> None:
        """Correct the parts by a measured step that drafted."""
        predicted = self.seconds(num_passes, num_tokens)
        error = min(seconds, 2 * predicted) - predicted if predicted > 0 else seconds
        step = 0.2 * error / (1 + num_passes * num_passes + num_tokens)
        self.per_step_s = max(0.0, self.per_step_s + step)
        self.per_pass_s = max(0.0, self.per_pass_s + step * num_passes)
        self.per_token_s = max(0.0, self.per_token_s + step)
