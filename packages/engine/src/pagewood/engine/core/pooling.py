"""Vectors of prompts: which hidden states they are made of, and how.

A runner adds the states of a prompt up, grant by grant. The sum of each grant is added to that of the request when the
step is retired, so a position that is computed again after a preemption is not added twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.api import PoolingParams
from pagewood.engine.core.vector_tail import VectorTail

Float32 = NDArray[np.float32]


@dataclass(slots=True, kw_only=True, eq=False)
class Pool:
    """The vector of one request while it is computed. Invariant: `total` has the states of [first, `num_done`)."""

    params: PoolingParams
    num_done: int
    """Leading positions that are done: their states are in the sum, or are not part of it."""  # written by: pooling
    end: int
    """The position after the last one whose state is part of the sum."""
    total: NDArray[np.float64] | None = None
    """[E], the sum of states; None: no states yet."""  # written by: pooling
    num_added: int = 0  # written by: pooling
    tail: VectorTail | None = None
    """What follows the pooling; None: nothing."""

    @classmethod
    def of(cls, params: PoolingParams, num_prompt: int, tail: VectorTail | None = None) -> Pool:
        """Return the empty sum for a prompt."""
        first = num_prompt - 1 if params.kind == "last" else 0
        return cls(params=params, num_done=first, end=1 if params.kind == "cls" else num_prompt, tail=tail)

    @property
    def is_complete(self) -> bool:
        """Whether all states are in the sum."""
        return self.num_done >= self.end

    def wanted_in(self, start: int, num_tokens: int) -> tuple[int, int]:
        """Return which of the positions from `start` on have states that are still to be added.

        Returns:
            Where they begin, counted from `start`, and their number. The steps that a request has in flight are
            consecutive, so this is the same when a step is built and when it is retired.
        """
        first = max(0, self.num_done - start)
        return first, max(0, min(start + num_tokens, self.end) - start - first)

    def add(self, total: Float32, num: int) -> bool:
        """Add the sum of the next `num` states `[E]`; return whether all of it is finite."""
        self.total = total.astype(np.float64) if self.total is None else self.total + total
        self.num_added += num
        self.num_done += num
        return bool(np.isfinite(total).all())

    def vector(self) -> bytes:
        """Return the complete vector, float32 little-endian: the mean behind the tail, truncated, then normalised."""
        assert self.total is not None
        mean = self.total / self.num_added
        mean = (mean if self.tail is None else self.tail(mean))[: self.params.dimensions]
        if self.params.normalize:
            length = float(np.linalg.norm(mean))
            mean = mean / length if length > 0.0 else mean
        return mean.astype("<f4").tobytes()
