"""Drafts that the last stage of a model has made at the end of a step, held until the next step of their rows.

They go with the result of the step to all stages, so that all compute and verify the same ones.

Legend: S sampled grants of a step, D most drafts of a row, N drafts, G grants with drafts.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.runner.cuda.drafts.verify import DraftRequest
from pagewood.engine.runner.cuda.drafts.verify_arrays import VerifyStep


class HeldDrafts:
    """`Drafter` of what was held. Invariant: a draft is verified only behind the token that it was made for.

    The host knows the end of each row, as it does in stages. The token table has the drafts, from `hold`.

    Args:
        max_rows: of the runner.
    """

    __slots__ = ("_ends", "_nums")

    def __init__(self, max_rows: int) -> None:
        self._ends: Int32 = np.zeros(max_rows, np.int32)  # contents written by: hold
        self._nums: Int32 = np.zeros(max_rows, np.int32)  # contents written by: hold, note

    def note(self, batch: Batch) -> None:
        """Forget what was held for the last requests of rows."""
        self._nums[batch.rows[batch.admitted]] = 0

    def hold(self, rows: Int32, ends: Int32, drafts: Int32) -> tuple[Int32, Int32]:
        """Hold drafts of rows.

        Args:
            rows: `[S]`
            ends: `[S]`, known tokens of each.
            drafts: `[S, D]`, -1 behind the last.

        Returns:
            `[N, 2]`, row and position of each draft, and `[N]`, the drafts, for the token table.
        """
        is_draft = drafts >= 0
        self._ends[rows], self._nums[rows] = ends, is_draft.sum(1)
        owners, steps = np.nonzero(is_draft)
        return np.stack([rows[owners], ends[owners] + steps.astype(np.int32)], 1), drafts[is_draft]

    def limited(self, batch: Batch, step: VerifyStep) -> VerifyStep:
        """Return a step that verifies no more drafts of a row than are held for it."""
        grants = batch.sampled[step.arrays.drafting]
        rows, promised = batch.rows[grants], batch.num_promised[step.arrays.drafting]
        ends = batch.starts[grants] + batch.counts[grants] - promised + 1
        held = np.where(self._ends[rows] == ends, self._nums[rows], 0)
        most = np.minimum(step.arrays.most_drafts, held).astype(np.int32)
        return replace(step, arrays=replace(step.arrays, most_drafts=most))

    def draft(self, request: DraftRequest) -> tuple[Tensor, Tensor]:
        """Return what the token table has behind the known tokens; `limited` says how much of it are drafts."""
        width = request.tokens.shape[1]
        steps = torch.arange(request.num_drafts, dtype=torch.int32, device=request.lengths.device)
        columns = (request.lengths[:, None] + steps).clamp_(max=width - 1)
        places = (request.rows[:, None] * width + columns).flatten()
        drafts = request.tokens.reshape(-1).index_select(0, places)
        return drafts.view(-1, request.num_drafts), torch.full_like(request.rows, request.num_drafts)
