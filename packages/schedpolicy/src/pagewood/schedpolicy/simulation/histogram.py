"""Percentiles of many durations, counted in buckets."""

import math

_WIDTH = math.log(1.01)


class DurationHistogram:
    """Counts durations in buckets 1% wide, so that a percentile is within 1% of the exact one.

    Invariant: `num` is the sum of the counts.
    """

    __slots__ = ("_counts", "longest_s", "num", "total_s")

    def __init__(self) -> None:
        """Start empty."""
        self._counts: dict[int, int] = {}
        self.num = 0  # written by: DurationHistogram
        self.total_s = 0.0  # written by: DurationHistogram
        self.longest_s = 0.0  # written by: DurationHistogram

    def add(self, seconds: float, num: int = 1) -> None:
        """Count `num` durations of `seconds`, > 0."""
        bucket = math.floor(math.log(seconds) / _WIDTH)
        self._counts[bucket] = self._counts.get(bucket, 0) + num
        self.num += num
        self.total_s += seconds * num
        self.longest_s = max(self.longest_s, seconds)

    def add_ramp(self, first_s: float, step_s: float, num_steps: int, num: int) -> None:
        """Count `num` of each of the `num_steps` durations `first_s`, `first_s + step_s`, ...; one bucket at a time."""
        index = 0
        while index < num_steps:
            seconds = first_s + index * step_s
            end = num_steps
            bucket_end_s = math.exp((math.floor(math.log(seconds) / _WIDTH) + 1) * _WIDTH)
            if bucket_end_s < first_s + num_steps * step_s:
                end = min(num_steps, max(index + 1, math.ceil((bucket_end_s - first_s) / step_s)))
            count = end - index
            self.add(seconds, num * count)
            # `add` counted each of them as the shortest; their mean is longer by half the rise.
            rise_s = step_s * (count - 1)
            self.total_s += num * count * rise_s / 2
            self.longest_s = max(self.longest_s, seconds + rise_s)
            index = end

    def merge(self, other: "DurationHistogram") -> None:
        """Add the counts of another histogram."""
        for bucket, count in other._counts.items():
            self._counts[bucket] = self._counts.get(bucket, 0) + count
        self.num += other.num
        self.total_s += other.total_s
        self.longest_s = max(self.longest_s, other.longest_s)

    def percentile(self, percent: float) -> float:
        """Return the percentile by nearest rank; 0 if the histogram is empty."""
        if not self.num:
            return 0.0
        rank = max(1, math.ceil(percent / 100 * self.num))
        if rank == self.num:
            return self.longest_s
        seen = 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= rank:
                return min(self.longest_s, math.exp((bucket + 0.5) * _WIDTH))
        raise AssertionError("num is the sum of the counts")

    def buckets(self) -> list[tuple[float, int]]:
        """Return (upper end in seconds, count) of every non-empty bucket, in ascending order."""
        return [(math.exp((bucket + 1) * _WIDTH), self._counts[bucket]) for bucket in sorted(self._counts)]
