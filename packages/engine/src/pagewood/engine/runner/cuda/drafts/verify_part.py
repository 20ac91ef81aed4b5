"""A rank's part of a step that verifies, where rows are divided among ranks by request."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.runner.cuda.division import DividedRows, OwnSampled
from pagewood.engine.runner.cuda.drafts.verify_arrays import VerifyArrays, VerifyStep, X

_MARK = "own "


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VerifyPart:
    """What a rank attends to of a step. All ranks draft, draw and accept for all rows.

    Legend: S sampled grants, S' those of this rank.
    """

    verify: VerifyStep
    """Its own grants, at least one."""
    num_verified: int
    """Their verified positions."""
    gathered: Int32
    """See `division.OwnVerified`."""
    rows: DividedRows
    """Of tokens."""
    extended: OwnSampled
    """What a head reads."""

    def words(self) -> dict[str, Int32]:
        """Return all arrays by name."""
        own = {_MARK + name: array for name, array in self.verify.arrays.words().items()}
        return {**own, **self.extended.words(), "gathered": self.gathered}

    def of_words(self, words: Mapping[str, X]) -> VerifyArrays[X]:
        """Return its arrays among all `words` of a step."""
        return VerifyArrays.of_words(words, mark=_MARK)

    def wanted(self, own: VerifyArrays[Tensor]) -> Tensor:
        """Return the tokens whose last states are needed, of its `own` ones."""
        wanted = torch.cat([own.wanted[: self.num_verified], own.scored, own.pooled])
        return wanted if len(wanted) else own.wanted

    def last(
        self, own: VerifyArrays[Tensor], accepted: Tensor, rows: Tensor, words: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the token before the last one that its own grants yield, `[max(S', 1)]`, and their rows, `[S']`.

        Args:
            own: its arrays.
            accepted: `[S]`, accepted drafts of each sampled grant.
            rows: `[S] int64`, of all.
            words: of the step.
        """
        places = words["own_sampled"]
        if not len(places):
            return words["own_wanted"], rows[:0]
        return own.first_tokens + accepted.index_select(0, places), rows.index_select(0, places)
