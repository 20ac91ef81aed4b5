"""What a step of n tokens costs, and what drafting costs: measured at start, corrected by every step."""

import math
from collections.abc import Sequence
from itertools import pairwise

_SLOW_RATE = 0.05
_LAST_COUNT = 19
_NUM_TRUSTED = 3
_DRAFT_RATE = 0.2
_TOKEN_SHARE = 0.01


class StepCost:
    """Seconds of a step by its number of tokens, from a table that observed steps correct.

    Between two measured sizes the table is interpolated linearly, below the smallest it is constant, and above the
    largest it continues with the slope of all of it. It need be neither convex nor continuous: a machine whose steps
    are padded to 16 and 32 tokens is measured at 1, 16, 17 and 32.

    An observation corrects its own size; sizes near it, the less, the more steps these have had; and, if the size is
    well known, slowly a factor of all sizes, for changes that concern every step, such as longer contexts. Invariant:
    every entry is positive and finite, and no observation changes a size with three or more by over a factor of two.
    """

    __slots__ = ("_counts", "_measured", "_scale", "_slope", "_table")

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
        self._measured = list(self._table)
        """The table as it was measured, the shape that corrections keep."""  # written by: StepCost
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
        ratio = self.credible(num_tokens, seconds) / self.seconds(num_tokens)
        table, counts = self._table, self._counts
        count = counts[num_tokens]
        # What an unknown size deviates by says nothing of the others.
        self._scale *= 1 + _SLOW_RATE * (ratio - 1) * count / _LAST_COUNT
        change = (ratio - 1) / (count + 1)
        counts[num_tokens] = min(count + 1, _LAST_COUNT)
        table[num_tokens] *= 1 + change
        # Neighbours move towards the same factor of the measured table. A factor for each observation would add up.
        factor = table[num_tokens] / self._measured[num_tokens]
        for size in self._near(num_tokens):
            if size != num_tokens:
                table[size] += (self._measured[size] * factor - table[size]) / ((count + 1) * (1 + 4 * counts[size]))

    def credible(self, num_tokens: int, seconds: float, factor: float = 2.0) -> float:
        """Return a measured duration, limited to `factor` times or a part of the expected if this size is known."""
        expected_s = self.seconds(num_tokens)
        if self._counts[num_tokens] < _NUM_TRUSTED:
            return seconds
        return min(factor * expected_s, max(expected_s / factor, seconds))

    def is_observed(self, num_tokens: int) -> bool:
        """Return whether a step of this size, or of one so near that it was corrected too, has been observed."""
        if num_tokens >= len(self._table):
            self._extend(num_tokens)
        near = self._near(num_tokens)
        return any(self._counts[near.start : near.stop])

    def _near(self, num_tokens: int) -> range:
        """Return the sizes that differ by at most an eighth."""
        reach = min(num_tokens // 8, 64)
        return range(num_tokens - reach, min(len(self._table) - 1, num_tokens + reach) + 1)

    def _extend(self, num_tokens: int) -> None:
        first, last = len(self._table), self._table[-1]
        end = num_tokens + num_tokens // 4
        more = [last + self._slope * (size - first + 1) for size in range(first, end + 1)]
        self._table += more
        self._measured += more
        self._counts += [0] * (end + 1 - first)


class DraftCost:
    """Seconds of drafting: a part for each step that drafts, one for each pass of the drafter, one for each token.

    A draft model makes one pass for each position, over all requests that still draft; a lookup makes none, so its time
    is all in the first part. A head also reads the prompts in the step, whose tokens are a fourth part. Every measured
    step moves the parts to explain it, by the least change that does (normalised least mean squares). Invariant: no
    part is negative.
    """

    __slots__ = ("is_known", "per_other_s", "per_pass_s", "per_step_s", "per_token_s")

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
        self.is_known = per_step_s + per_pass_s + per_token_s > 0
        """Whether it has been measured."""  # written by: DraftCost
        self.per_step_s = per_step_s  # written by: DraftCost
        self.per_pass_s = per_pass_s  # written by: DraftCost
        self.per_token_s = per_token_s  # written by: DraftCost
        self.per_other_s = 0.0
        """Seconds for each prompt token of a step that drafts."""  # written by: DraftCost

    def seconds(self, num_passes: int, num_tokens: int, num_others: int = 0) -> float:
        """Return the seconds of drafting `num_tokens` tokens, of which one request has `num_passes`; 0 for none.

        Args:
            num_passes: Draft tokens of the request that has most.
            num_tokens: Draft tokens of all requests.
            num_others: Prompt tokens of the step.
        """
        if not num_tokens:
            return 0.0
        passes_s, tokens_s = self.per_pass_s * num_passes, self.per_token_s * num_tokens
        return self.per_step_s + passes_s + tokens_s + self.per_other_s * num_others

    def observe(self, num_passes: int, num_tokens: int, seconds: float, num_others: int = 0) -> None:
        """Correct the parts by a measured step that drafted."""
        predicted_s = self.seconds(num_passes, num_tokens, num_others)
        error_s = (seconds if not self.is_known else min(seconds, 2 * predicted_s)) - predicted_s
        # Tokens are blamed last: the time of a pass depends little on how many requests are in it.
        norm = 1 + num_passes * num_passes + _TOKEN_SHARE * (num_tokens * num_tokens + num_others * num_others)
        step = (_DRAFT_RATE if self.is_known else 1.0) * error_s / norm
        self.per_step_s = max(0.0, self.per_step_s + step)
        self.per_pass_s = max(0.0, self.per_pass_s + step * num_passes)
        self.per_token_s = max(0.0, self.per_token_s + step * _TOKEN_SHARE * num_tokens)
        self.per_other_s = max(0.0, self.per_other_s + step * _TOKEN_SHARE * num_others)
        self.is_known = True
