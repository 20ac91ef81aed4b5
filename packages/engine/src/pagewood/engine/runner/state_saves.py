"""Behind which tokens of a step a runner leaves copies of states."""

from __future__ import annotations

import numpy as np

from pagewood.engine.core.messages.arrays import Int32


def state_saves(copies: Int32, starts: Int32, counts: Int32) -> Int32:
    """Return the place that gets the state behind each of the T tokens of a step, `[T]`; -1: no place.

    Args:
        copies: `[V, 3]`, see `Batch.state_copies`.
        starts: `[G]`, first position of each grant.
        counts: `[G]`, positions that it computes.
    """
    saves = np.full(int(counts.sum()), -1, np.int32)
    if len(copies):
        grant, length, place = copies.T
        index = length - 1 - starts[grant]  # of the last token before the copy, in its grant
        is_here = (index >= 0) & (index < counts[grant])
        firsts = np.cumsum(counts) - counts
        saves[(firsts[grant] + index)[is_here]] = place[is_here]
    return saves
