"""What is known of the use of a page, for policies to score."""

import math
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Usage:
    """How the pages of one run have been used; all pages of a run have been used alike.

    Times are ticks of the cache's own clock, which counts its operations. Read it; the cache alone writes it.

    Attributes:
        created: when the pages were adopted.
        last_used: when they were last matched, inserted or unlocked.
        num_uses: 1, and 1 more for each match of a prefix with them in it that was locked.
        num_sequence_tokens: the length of the sequence last inserted through them.
        priority: as set by `RadixCache.retain`; 0 otherwise.
        until: when the priority ends, in seconds of the clock that was given to `Retained`.
        age: what the policy makes of it in `used`; 0 at first.
    """

    created: int
    last_used: int  # written by: Scored, oracle
    num_uses: int = 1  # written by: Scored, oracle
    num_sequence_tokens: int = 0  # written by: Scored, oracle
    priority: int = 0  # written by: Scored, oracle
    until: float = math.inf  # written by: Scored, oracle
    age: float = 0.0  # written by: policies
    entry: object = field(default=None, repr=False, compare=False)  # written by: Scored; its entry in the heap
