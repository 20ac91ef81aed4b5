"""What the cache records about the use of a page; policies compute scores from it."""

import math
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Usage:
    """How the pages of one run have been used. All pages of a run share one usage.

    Times are ticks of the cache's own clock, which counts its operations. Only the cache writes these fields; policies
    read them, and may write `age`.

    Attributes:
        created: tick at which the pages were adopted.
        last_used: tick at which they were last matched, inserted or unlocked.
        num_uses: 1, plus 1 for each locked match that contained them.
        num_sequence_tokens: length of the sequence that was last inserted through them.
        priorities: priorities from `RadixCache.retain` that are not covered by one at least as high and as long:
            (priority, until), the highest first; `until` is in seconds of the clock given to `Retained`.
        age: set by the policy in `used`; 0 at first.
        entry: the heap entry of the run; internal.
    """

    created: int
    last_used: int  # written by: Scored, oracle
    num_uses: int = 1  # written by: Scored, oracle
    num_sequence_tokens: int = 0  # written by: Scored, oracle
    priorities: tuple[tuple[int, float], ...] = ()  # written by: retain, oracle
    age: float = 0.0  # written by: policies
    entry: object = field(default=None, repr=False, compare=False)  # written by: Scored

    @property
    def priority(self) -> int:
        """The highest of `priorities`, ended or not; 0 without priorities."""
        return self.priorities[0][0] if self.priorities else 0

    @property
    def until(self) -> float:
        """When `priority` ends; infinity without priorities."""
        return self.priorities[0][1] if self.priorities else math.inf

    def priority_at(self, now_s: float) -> int:
        """Return the highest priority that has not ended, or 0."""
        for priority, until in self.priorities:
            if now_s < until:
                return priority
        return 0

    def retain(self, priority: int, until: float) -> None:
        """Add a priority, and drop those that it covers."""
        if not any(other >= priority and end >= until for other, end in self.priorities):
            left = [(other, end) for other, end in self.priorities if other > priority or end > until]
            self.priorities = tuple(sorted([*left, (priority, until)], reverse=True))
