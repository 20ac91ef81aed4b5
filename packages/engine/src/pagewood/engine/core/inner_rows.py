"""Inner rows: what trainers ask for of a request's positions besides tokens, such as the experts that were chosen.

A runner returns them step by step. They are kept in the order of positions, so a position that is computed again after
a preemption is not reported twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.api import Rows


@dataclass(slots=True, kw_only=True, eq=False)
class InnerRows:
    """The rows of one kind of a request. Invariant: those of positions [first, `num_done`) are known."""

    first: int
    """First position that is reported."""
    num_done: int
    """Leading positions whose rows are known or not wanted."""  # written by: inner_rows
    _new: list[NDArray[Any]] = field(default_factory=list[NDArray[Any]])
    """Rows that have not been answered."""  # written by: inner_rows

    @classmethod
    def of(cls, start: int | None, *, num_prompt: int, num_known: int) -> InnerRows | None:
        """Return what is known of a new request; None: it wants nothing.

        Args:
            start: see `SamplingParams.routed_experts_from`.
            num_prompt: tokens of its prompt.
            num_known: tokens of its prompt and output. With an output, its client has the rows before the last of it.
        """
        if start is None:
            return None
        first = num_prompt - 1 if start == -1 else start
        return cls(first=first, num_done=max(first, num_known - 1) if num_known > num_prompt else first)

    def skipped(self, start: int) -> int:
        """Return how many positions of a grant from `start` on have no row, because they are before the first one."""
        return max(0, self.first - start)

    def add(self, start: int, rows: NDArray[Any]) -> None:
        """Add the rows `[positions, ...]` of positions from `start` on, of which leading ones may be known."""
        assert start <= self.num_done, f"rows of [{self.num_done}, {start}) are missing"
        new = rows[self.num_done - start :]
        if len(new):
            self._new.append(new)
            self.num_done += len(new)

    def take(self, end: int) -> Rows | None:
        """Return the rows before position `end` that have not been answered, which then have been; None: none.

        There are others only where drafts behind the end of the request were accepted.
        """
        if not self._new:
            return None
        rows, self._new = np.concatenate(self._new), []
        rows = rows[: len(rows) - max(0, self.num_done - end)]
        if not len(rows):
            return None
        return Rows(rows.shape, rows.astype(rows.dtype.newbyteorder("<"), copy=False).tobytes())
