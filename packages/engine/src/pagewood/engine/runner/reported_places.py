"""Where the positions whose inner rows a step reports are among what it computes, on every device.

A step computes the last state of some tokens only: those whose logits are wanted, then reported prompt tokens, then
pooled ones, and last those that are kept beside these because their inner rows are reported.

Legend: G grants, S sampled grants, R reported positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch, num_rows_of


def has_rows(batch: Batch) -> bool:
    """Return whether a step reports experts or hidden states."""
    return len(batch.routed) > 0 or len(batch.stated) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The grants of a step; its arrays are those of `Batch`, of which a runner may have left out some grants."""

    counts: Int32
    """[G]"""
    sampled: Int32
    """[S]"""
    promised: Int32
    """[S]"""
    routed: Int32
    """[n, 2]"""
    stated: Int32
    """[n, 2]"""

    @classmethod
    def of(cls, batch: Batch) -> Granted:
        """Return the grants of a batch."""
        return cls(
            counts=batch.counts,
            sampled=batch.sampled,
            promised=batch.num_promised,
            routed=batch.routed,
            stated=batch.stated,
        )

    @property
    def num_wanted(self) -> Int32:
        """The number of wanted tokens of each sampled grant, `[S]`."""
        return np.where(self.promised > 1, self.counts[self.sampled], 1).astype(np.int32)

    @property
    def beside(self) -> Int32:
        """The tokens that are kept because they are reported and not wanted, `[n, 3]`, see `Batch.pooled`."""
        first = self.counts.copy()
        first[self.sampled] -= self.num_wanted
        left_out = first.copy()
        for entries in (self.routed, self.stated):
            left_out[entries[:, 0]] = np.minimum(left_out[entries[:, 0]], entries[:, 1])
        which = np.flatnonzero(left_out < first).astype(np.int32)
        return np.column_stack([which, left_out[which], (first - left_out)[which]]).astype(np.int32)

    def num_rows(self, entries: Int32, yielded: Int32) -> Int32:
        """Return how many positions of each of `entries` are reported, see `num_rows_of`."""
        return num_rows_of(entries, self.counts, self.sampled, self.promised, yielded)

    def places(self, entries: Int32, yielded: Int32, num_before: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return the rows of reported positions, among all tokens `[R]` and among those with a last state `[R]`.

        Args:
            entries: `[n, 2]`, `routed` or `stated`.
            yielded: `[S]`, the tokens of each sampled grant.
            num_before: tokens with a last state before those of `beside`.
        """
        counts, beside = self.counts, self.beside
        nums = self.num_rows(entries, yielded).astype(np.intp)
        grant = np.repeat(entries[:, 0], nums).astype(np.intp)
        place = np.arange(len(grant)) - np.repeat(np.cumsum(nums) - nums - entries[:, 1], nums)  # in its grant
        wanted = np.zeros_like(counts)
        wanted[self.sampled] = self.num_wanted
        first_wanted = (counts - wanted)[grant]  # a grant's wanted tokens are its last ones
        first_beside, left_out = np.zeros((2, len(counts)), np.intp)
        first_beside[beside[:, 0]] = num_before + np.cumsum(beside[:, 2]) - beside[:, 2]
        left_out[beside[:, 0]] = beside[:, 1]
        kept = np.where(
            place < first_wanted,
            first_beside[grant] + place - left_out[grant],
            (np.cumsum(wanted) - wanted)[grant] + place - first_wanted,
        )
        return (np.cumsum(counts) - counts)[grant] + place, kept
