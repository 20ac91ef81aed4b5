"""Where the positions whose inner rows a step reports are among what it computes, on every device.

A step computes the last state of some tokens only: those whose logits are wanted, then reported prompt tokens, then
pooled ones, and last those that are kept beside these because their inner rows are reported.

Legend: G grants, S sampled grants, R reported positions.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import num_rows_of


class Granted(Protocol):
    """The grants of a step."""

    @property
    def counts(self) -> Int32:
        """[G], as in `Batch`; this and the next ones."""
        ...

    @property
    def sampled(self) -> Int32:
        """[S]."""
        ...

    @property
    def promised(self) -> Int32:
        """[S], `Batch.num_promised`."""
        ...

    @property
    def routed(self) -> Int32:
        """[n, 2]."""
        ...

    @property
    def stated(self) -> Int32:
        """[n, 2]."""
        ...


def num_wanted_of(grants: Granted) -> Int32:
    """Return the number of wanted tokens of each sampled grant."""
    return np.where(grants.promised > 1, grants.counts[grants.sampled], 1).astype(np.int32)


def kept_beside(grants: Granted) -> Int32:
    """Return the tokens that are kept for `routed` and `stated`, because they are not wanted: `[n, 3]`, as pooled ones.

    See `Batch.pooled`.
    """
    first = grants.counts.copy()
    first[grants.sampled] -= num_wanted_of(grants)
    left_out = first.copy()
    for entries in (grants.routed, grants.stated):
        left_out[entries[:, 0]] = np.minimum(left_out[entries[:, 0]], entries[:, 1])
    which = np.flatnonzero(left_out < first).astype(np.int32)
    return np.column_stack([which, left_out[which], (first - left_out)[which]]).astype(np.int32)


def places_of(
    entries: Int32, grants: Granted, yielded: Int32, beside: Int32, num_before: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the rows of the reported positions, among all tokens `[R]` and among those with a last state `[R]`.

    Args:
        entries: `[n, 2]`, see `Batch.routed`.
        grants: of the step.
        yielded: `[S]`, the tokens of each sampled grant.
        beside: what `kept_beside` returns.
        num_before: tokens with a last state before those.
    """
    nums = num_rows_of(entries, grants.counts, grants.sampled, grants.promised, yielded).astype(np.intp)
    grant = np.repeat(entries[:, 0], nums).astype(np.intp)
    place = np.arange(len(grant)) - np.repeat(np.cumsum(nums) - nums - entries[:, 1], nums)  # in its grant
    wanted = np.zeros_like(grants.counts)
    wanted[grants.sampled] = num_wanted_of(grants)
    first_wanted = (grants.counts - wanted)[grant]  # a grant's wanted tokens are its last ones
    first_beside, left_out = np.zeros((2, len(grants.counts)), np.intp)
    first_beside[beside[:, 0]] = num_before + np.cumsum(beside[:, 2]) - beside[:, 2]
    left_out[beside[:, 0]] = beside[:, 1]
    kept = np.where(
        place < first_wanted,
        first_beside[grant] + place - left_out[grant],
        (np.cumsum(wanted) - wanted)[grant] + place - first_wanted,
    )
    return (np.cumsum(grants.counts) - grants.counts)[grant] + place, kept
