"""How long a step of n tokens and its drafting take: measured at start, corrected by observed steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

_RATE = 0.05
_MOST_CHANGE = 1.25
_LEAST_SPREAD = 0.1


class StepCost:
    """Seconds of a step by its number of tokens: a table, and a line over it that observed steps correct.

    The table is interpolated linearly between measured sizes, constant below the smallest, and continued above the
    largest with the slope of the whole table. It need be neither convex nor continuous: a machine whose steps are
    padded to 16 and 32 tokens is measured at 1, 16, 17 and 32.

    Observed steps correct it by a line, one for plain steps and one for steps with drafts: the host does more for
    these. Host work takes the same time whatever the size of the step, a machine that has become slower takes longer
    for each token, and the line can tell the two apart only where sizes differ. So it goes through the mean of the
    latest steps; its slope follows them as far as their sizes differ by more than a tenth, and is else that of the
    table. Invariant: all values are positive and finite, and one observation changes a line by little.
    """

    __slots__ = ("_drafting", "_plain", "_slope", "_values")

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        """Start from a measurement.

        Args:
            sizes: Tokens of the measured steps, ascending, >= 1; at least one.
            seconds: Duration of each, > 0.

        Raises:
            ValueError: The sizes do not ascend, or a duration is not positive and finite.
        """
        if not sizes or len(sizes) != len(seconds):
            raise ValueError(f"sizes and seconds must be of one length >= 1, got {len(sizes)} and {len(seconds)}")
        if sizes[0] < 1 or any(a >= b for a, b in pairwise(sizes)):
            raise ValueError(f"sizes must be >= 1 and ascend, got {list(sizes)}")
        if not all(0 < value < math.inf for value in seconds):
            raise ValueError(f"seconds must be > 0 and finite, got {list(seconds)}")
        self._values = [float(seconds[0])] * (sizes[0] + 1)  # written by: StepCost
        for (a, b), (low, high) in zip(pairwise(sizes), pairwise(seconds), strict=True):
            self._values += [low + (high - low) * (size - a) / (b - a) for size in range(a + 1, b + 1)]
        self._slope = max(0.0, seconds[-1] - seconds[0]) / max(1, sizes[-1] - sizes[0])
        self._plain, self._drafting = _Line(), _Line()

    def seconds(self, num_tokens: int, *, has_drafts: bool = False) -> float:
        """Return the seconds of a step.

        Args:
            num_tokens: Of the step, >= 0, drafts included.
            has_drafts: Whether drafts are among these tokens, or were looked for.
        """
        return (self._drafting if has_drafts else self._plain).at(self._at(num_tokens))

    def as_measured(self, num_tokens: int) -> float:
        """Return the seconds of a step from the table alone, without corrections by observed steps."""
        return self._at(num_tokens)

    def observe(self, num_tokens: int, seconds: float, *, has_drafts: bool = False) -> None:
        """Correct the line of one kind of steps by a measured step."""
        (self._drafting if has_drafts else self._plain).observe(self._at(num_tokens), seconds)

    def _at(self, num_tokens: int) -> float:
        values = self._values
        if num_tokens >= len(values):
            last, first = values[-1], len(values)
            more = range(1, num_tokens + num_tokens // 4 - first + 2)
            values += [last + self._slope * number for number in more]
        return values[num_tokens]


class _Line:
    """Observed seconds as a line over those of the table, from decayed moments."""

    __slots__ = ("_covariance", "_mean", "_mean_expected", "_slope", "_variance")

    def __init__(self) -> None:
        self._mean_expected = 0.0
        """Mean of the table's seconds; 0: nothing was observed."""  # written by: _Line
        self._mean = 0.0
        """Mean of the observed seconds."""  # written by: _Line
        self._variance = 0.0
        """Variance of the table's seconds."""  # written by: _Line
        self._covariance = 0.0
        """Covariance of the table's and the observed seconds."""  # written by: _Line
        self._slope = 1.0  # written by: _Line

    def at(self, expected_s: float) -> float:
        """Return the seconds of a step for which the table says `expected_s`."""
        seconds = self._mean + self._slope * (expected_s - self._mean_expected)
        return max(seconds, 0.1 * expected_s)

    def observe(self, expected_s: float, seconds: float) -> None:
        """Move the line towards one step."""
        if not self._mean_expected:
            self._mean_expected = self._mean = expected_s
        present_s = self.at(expected_s)
        seconds = min(_MOST_CHANGE * present_s, max(present_s / _MOST_CHANGE, seconds))
        of_table, of_step = expected_s - self._mean_expected, seconds - self._mean
        self._mean_expected += _RATE * of_table
        self._mean += _RATE * of_step
        self._variance = (1 - _RATE) * (self._variance + _RATE * of_table * of_table)
        self._covariance = (1 - _RATE) * (self._covariance + _RATE * of_table * of_step)
        least = (_LEAST_SPREAD * self._mean_expected) ** 2
        self._slope = max(0.0, (self._covariance + least) / (self._variance + least))


class DraftCost:
    """Seconds of drafting: one part per drafting step, one per pass of the drafter, one per token.

    A draft model makes one pass per position, over all requests that still draft. A lookup makes no passes, so all its
    time is in the first part. Measured steps correct one factor for all three parts.
    """

    __slots__ = ("_factor", "per_pass_s", "per_step_s", "per_token_s")

    def __init__(self, *, per_step_s: float = 0.0, per_pass_s: float = 0.0, per_token_s: float = 0.0) -> None:
        """Start from a measurement, or from 0.

        Args:
            per_step_s: Seconds per step that makes any drafts, >= 0.
            per_pass_s: Seconds per position of the longest draft, >= 0.
            per_token_s: Seconds per draft token, >= 0.

        Raises:
            ValueError: One of them is negative or not finite.
        """
        for name, value in (("per_step_s", per_step_s), ("per_pass_s", per_pass_s), ("per_token_s", per_token_s)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be >= 0 and finite, got {value}")
        self.per_step_s = per_step_s  # written by: DraftCost
        self.per_pass_s = per_pass_s  # written by: DraftCost
        self.per_token_s = per_token_s  # written by: DraftCost
        self._factor = 1.0  # written by: DraftCost

    def seconds(self, num_passes: int, num_tokens: int) -> float:
        """Return the seconds to draft `num_tokens` tokens in `num_passes` passes; 0 for no tokens."""
        if not num_tokens:
            return 0.0
        return self._factor * (self.per_step_s + self.per_pass_s * num_passes + self.per_token_s * num_tokens)

    def observe(self, num_passes: int, num_tokens: int, seconds: float) -> None:
        """Correct the cost by a measured step that drafted; a cost of 0 becomes a cost per pass."""
        expected_s = self.seconds(num_passes, num_tokens)
        if not expected_s:
            self.per_pass_s = seconds / max(1, num_passes)
            return
        ratio = min(_MOST_CHANGE, max(1 / _MOST_CHANGE, seconds / expected_s))
        self._factor *= 1 + _RATE * (ratio - 1)
