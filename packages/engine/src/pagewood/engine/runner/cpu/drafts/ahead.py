"""Drafts that are made at the end of a step and held until the next step of their rows.

In a model that is cut into stages, only the last stage has what an index of texts or a head drafts from. Its drafts go
with the result of a step to all stages, so all of them compute and verify the same ones.

Legend: S sampled grants of a step, D most drafts of a row.
"""

# pyright: basic
# numpy's scalars have no types.

from __future__ import annotations

import numpy as np

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.sampling_table import SamplingArrays
from pagewood.engine.runner.cpu.program.passes import Grants, RowTables


class HeldDrafts:
    """`LookupDrafter` of what was held. Invariant: a draft is found only behind the token that it was made for."""

    __slots__ = ("_ends", "_nums", "_tokens")

    follows = True

    def __init__(self, tokens: Int32) -> None:
        """Hold nothing.

        Args:
            tokens: `[rows, positions]`, the token table of the runner. Drafts are written to it.
        """
        self._tokens = tokens
        self._ends: Int32 = np.zeros(len(tokens), np.int32)  # contents written by: hold
        self._nums: Int32 = np.zeros(len(tokens), np.int32)  # contents written by: hold, begin

    def hold(self, row: int, end: int, drafts: Int32) -> None:
        """Hold drafts of a row with `end` known tokens: those of `drafts` `[D]` before the first -1."""
        num = int((drafts >= 0).sum())
        self._tokens[row, end : end + num] = drafts[:num]
        self._ends[row], self._nums[row] = end, num

    def begin(self, row: int, namespace: int, num_prompt: int) -> None:
        """Forget what was held for the row's last request."""
        del namespace, num_prompt
        self._nums[row] = 0

    def advance(self, rows: Int32, ends: Int32) -> None:
        """Do nothing."""

    def draft(self, rows: Int32, ends: Int32, most: Int32, counts: Int32) -> None:
        """Write how many drafts are held; see `drafting.LookupDrafter`."""
        counts[:] = np.where(self._ends[rows] == ends, np.minimum(self._nums[rows], most), 0)


def grants_ahead(
    grants: Grants, counts: Int32, rows: RowTables, *, most: int, page_size: int | None
) -> tuple[Grants, Int32]:
    """Return the next step of the rows that have yielded tokens, with as many drafts as may be made now.

    Args:
        grants: of the step that has been computed.
        counts: `[S]`, tokens that each has yielded.
        rows: of the runner, with these tokens.
        most: D.
        page_size: of a drafter with KV memory of its own, which writes only to pages that the step has; None: it has no
            such memory.

    Returns:
        The grants, which have drafts, and which of the S grants each follows.
    """
    own = grants.rows[grants.sampled]
    nums = np.minimum(most, rows.tokens.shape[1] - rows.lengths[own])
    if page_size is not None:
        promised = grants.promised
        ends = grants.starts[grants.sampled] + np.where(promised > 1, promised, grants.counts[grants.sampled])
        ends += -ends % page_size
        nums = np.minimum(nums, ends - rows.lengths[own] + 2)  # the first needs no slot, the second that of the token
    places = np.flatnonzero((counts > 0) & (nums > 0))
    own, nums = own[places], nums[places].astype(np.int32)
    ahead = Grants(
        rows=own,
        starts=rows.lengths[own] - 1,
        counts=1 + nums,
        sampled=np.arange(len(places), dtype=np.int32),
        promised=1 + nums,
        sampling=SamplingArrays(words=grants.sampling.words[places]),
        is_drafting=True,
    )
    return ahead, places.astype(np.int32)


def drafts_of(grants: Grants, places: Int32, rows: RowTables, *, num_sampled: int, most: int) -> Int32:
    """Return the drafts that lie behind the known tokens of rows, `[S, D]`, -1 behind the last.

    Args:
        grants: see `grants_ahead`; their counts are now one more than the drafts that were made.
        places: likewise.
        rows: of the runner.
        num_sampled: S.
        most: D.
    """
    found = np.full((num_sampled, most), -1, np.int32)
    for place, row, count in zip(places.tolist(), grants.rows.tolist(), grants.counts.tolist(), strict=True):
        end = int(rows.lengths[row])
        found[place, : count - 1] = rows.tokens[row, end : end + count - 1]
    return found
