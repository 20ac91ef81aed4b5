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
        priority: set by `RadixCache.retain`; 0 by default.
        until: when the priority ends, in seconds of the clock given to `Retained`.
        age: set by the policy in `used`; 0 at first.
        entry: the heap entry of the run; internal.
    """

    created: int
    last_used: int  # written by: Scored, oracle
    num_uses: int = 1  # written by: Scored, oracle
    num_sequence_tokens: int = 0  # written by: Scored, oracle
    priority: int = 0  # written by: Scored, oracle
    until: float = math.inf  # written by: Scored, oracle
    age: float = 0.0  # written by: policies
    entry: object = field(default=None, repr=False, compare=False)  # written by: Scored
