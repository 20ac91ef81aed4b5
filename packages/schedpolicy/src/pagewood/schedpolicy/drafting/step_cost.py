"""What a step of n tokens costs, and what drafting costs: measured at start, corrected by every step."""

import math
from collections.abc import Sequence
from itertools import pairwise

_SLOW_RATE = 0.05
_LAST_COUNT = 19
_NUM_TRUSTED = 3
_FADE_EVERY = 64
_FADED = 0.25
_DRAFT_RATE = 0.2
_TOKEN_SHARE = 0.01


class StepCost:
    """Seconds of a step by its number of tokens, from a table that observed steps correct.

    Between two measured sizes the table is interpolated linearly, below the smallest it is constant, and above the
    largest it continues with the slope of all of it. It need be neither convex nor continuous: a machine whose steps
    are padded to 16 and 32 tokens is measured at 1, 16, 17 and 32.

    Steps with drafts have a table of their own, which starts as the same one: the host does more for them, and the
    caches of the processor hold more. An observation corrects its own size; sizes near it, the less, the more steps
    these have had; those of the other table too, as long as that has observed none of them; and, if the size is well
    known, slowly a factor of both tables, for changes that concern every step, such as longer contexts. A size that is
    no longer observed fades back to the shape that was measured, relative to those that are: otherwise a size that was
    slow once would never be tried again. Invariant: every entry is positive and finite, and no observation changes a
    size with three or more by over a quarter.
    """

    __slots__ = ("_scale", "_tables")

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
        self._tables = (_Table(sizes, seconds), _Table(sizes, seconds))
        """Of plain steps, and of steps with drafts."""
        self._scale = 1.0
        """Factor of both tables."""  # written by: StepCost

    def seconds(self, num_tokens: int, *, has_drafts: bool = False) -> float:
        """Return the seconds of a step.

        Args:
            num_tokens: Of the step, >= 0, drafts included.
            has_drafts: Whether some of them are, or were looked for.
        """
        return self._tables[has_drafts].at(num_tokens) * self._scale

    def after(self, num_tokens: int, num_more: int) -> list[float]:
        """Return the seconds of steps with drafts of 1, 2, ..., `num_more` tokens more than `num_tokens`."""
        scale = self._scale
        return [value * scale for value in self._tables[True].between(num_tokens + 1, num_tokens + num_more)]

    def observe(self, num_tokens: int, seconds: float, *, has_drafts: bool = False) -> None:
        """Correct the tables by a measured step."""
        own, other = self._tables[has_drafts], self._tables[not has_drafts]
        ratio = self.credible(num_tokens, seconds, has_drafts=has_drafts) / self.seconds(
            num_tokens, has_drafts=has_drafts
        )
        count = own.counts[num_tokens]
        # What an unknown size deviates by says nothing of the others.
        self._scale *= 1 + _SLOW_RATE * (ratio - 1) * count / _LAST_COUNT
        factor = own.correct(num_tokens, ratio)
        other.follow(num_tokens, factor, count)

    def credible(self, num_tokens: int, seconds: float, factor: float = 1.25, *, has_drafts: bool = False) -> float:
        """Return a measured duration, limited to `factor` times or a part of the expected if this size is known."""
        expected_s = self.seconds(num_tokens, has_drafts=has_drafts)
        if self._tables[has_drafts].counts[num_tokens] < _NUM_TRUSTED:
            return seconds
        return min(factor * expected_s, max(expected_s / factor, seconds))

    def is_observed(self, num_tokens: int) -> bool:
        """Return whether a plain step of this size, or of one so near that it was corrected too, has been observed."""
        return self._tables[False].is_observed(num_tokens)


class _Table:
    """Seconds by number of tokens, before the scale."""

    __slots__ = ("_largest", "_measured", "_num_corrected", "_recent", "_slope", "_stale", "_values", "counts")

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        self._values = [float(seconds[0])] * (sizes[0] + 1)  # written by: _Table
        for (a, b), (low, high) in zip(pairwise(sizes), pairwise(seconds), strict=True):
            self._values += [low + (high - low) * (size - a) / (b - a) for size in range(a + 1, b + 1)]
        self._measured = list(self._values)
        """The table as it was measured, the shape that corrections keep."""  # written by: _Table
        self.counts = [0] * len(self._values)
        """Observed steps of each size, at most `_LAST_COUNT`."""  # written by: _Table
        self._recent: set[int] = set()
        """Sizes observed since others have last faded."""  # contents written by: _Table
        self._stale: set[int] = set()
        """Observed sizes that are not among them."""  # contents written by: _Table
        self._num_corrected = 0
        """Observations since then."""  # written by: _Table
        self._slope = max(0.0, seconds[-1] - seconds[0]) / max(1, sizes[-1] - sizes[0])
        self._largest = sizes[-1], float(seconds[-1])

    def at(self, num_tokens: int) -> float:
        """Return the value of a size."""
        if num_tokens >= len(self._values):
            self._extend(num_tokens)
        return self._values[num_tokens]

    def between(self, first: int, last: int) -> list[float]:
        """Return the values of sizes `first` to `last`."""
        if last >= len(self._values):
            self._extend(last)
        return self._values[first : last + 1]

    def correct(self, num_tokens: int, ratio: float) -> float:
        """Correct a size, which took `ratio` times its value; return by what factor it differs from the measured."""
        count = self.counts[num_tokens]
        self.counts[num_tokens] = min(count + 1, _LAST_COUNT)
        self._values[num_tokens] *= 1 + (ratio - 1) / (count + 1)
        # Neighbours move towards the same factor of the measured table. A factor for each observation would add up.
        factor = self._values[num_tokens] / self._measured[num_tokens]
        values, measured, counts = self._values, self._measured, self.counts
        for size in self._near(num_tokens):
            if size != num_tokens:
                values[size] += (measured[size] * factor - values[size]) / ((count + 1) * (1 + 4 * counts[size]))
        self._recent.add(num_tokens)
        self._num_corrected += 1
        if self._num_corrected == _FADE_EVERY:
            self._fade()
        return factor

    def _fade(self) -> None:
        """Move the sizes that were not observed lately towards the measured shape at the level of those that were."""
        values, measured, counts, recent = self._values, self._measured, self.counts, self._recent
        level = sum([values[size] / measured[size] for size in recent]) / len(recent)
        self._stale -= recent
        for size in self._stale:
            counts[size] -= counts[size] // 4
            values[size] += _FADED * (measured[size] * level - values[size])
        self._stale |= recent
        self._recent, self._num_corrected = set(), 0

    def follow(self, num_tokens: int, factor: float, count: int) -> None:
        """Follow the other table, in which a size with `count` steps before differs by a factor from the measured."""
        if self.is_observed(num_tokens):
            return
        values, measured = self._values, self._measured
        for size in self._near(num_tokens):
            values[size] += (measured[size] * factor - values[size]) / (count + 1)

    def is_observed(self, num_tokens: int) -> bool:
        """Return whether this size or one near it has been observed."""
        if num_tokens >= len(self._values):
            self._extend(num_tokens)
        near = self._near(num_tokens)
        return any(self.counts[near.start : near.stop])

    def _near(self, num_tokens: int) -> range:
        """Return the sizes that differ by at most an eighth."""
        reach = min(num_tokens // 8, 64)
        return range(num_tokens - reach, min(len(self._values) - 1, num_tokens + reach) + 1)

    def _extend(self, num_tokens: int) -> None:
        first, end = len(self._values), num_tokens + num_tokens // 4
        corrected = self._values[-1] - self._measured[-1]
        largest, seconds = self._largest
        more = [seconds + self._slope * (size - largest) for size in range(first, end + 1)]
        self._values += [value + corrected for value in more]
        self._measured += more
        self.counts += [0] * len(more)


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


class Costs:
    """The present costs of steps and of drafting, which several parts read.

    Invariant: only `DraftControl.set_cost` replaces them; observations correct them in place.
    """

    __slots__ = ("drafts", "steps")

    def __init__(self, steps: StepCost | None, drafts: DraftCost) -> None:
        """Start with these costs.

        Args:
            steps: Cost of steps; None: not measured yet.
            drafts: Cost of drafting.
        """
        self.steps = steps  # written by: control
        self.drafts = drafts  # written by: control
