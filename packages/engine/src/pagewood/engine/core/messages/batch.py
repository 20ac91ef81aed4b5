"""One step as flat arrays, the input of a runner. It refers to no request and to no other object of the core."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.messages.adjustments import Adjustments
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.images import BatchImages
from pagewood.engine.core.messages.logprobs import Reports
from pagewood.engine.core.messages.processors import Processors
from pagewood.engine.core.messages.sampling_table import SamplingArrays

Int64 = NDArray[np.int64]
NUM_STOP_IDS = 8
"""Stop tokens of a request that a batch has room for. If a request has more, a runner misses some of its ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What to compute in one step. Owns its arrays: none aliases the state that it was built from.

    Tokens are addressed, not carried: grant g computes positions [start, start + count) of its row and reads their
    token ids from the runner's table `tokens[row, position]`. A grant in `sampled` yields the token that follows its
    last position. The runner writes it to `tokens[row, start + count]`, so the next step can be built before the host
    knows it.

    A grant that promises more than one token speculates. Its first position is that of the row's last token, and the
    runner drafts the tokens of the others; it may draft fewer and then computes fewer positions. The grant yields the
    token that follows each position, up to and including the first that differs from the draft. An earlier step in
    flight may yield fewer tokens than it promised, so `starts` are upper bounds: a grant begins at its start, or at the
    last token that the runner knows of its row, whichever is lower.

    A row ends with a token that was drawn after its admission if that is one of its stop tokens, or if the row then has
    as many tokens as its limit. A runner may leave out the grants of such a row, which were launched before the host
    knew the end; they yield no tokens.

    A runner first applies the page updates and the token updates, then computes. Legend: U page updates, T token
    updates, G grants, S sampled grants, A admitted grants.
    """

    page_rows: Int32
    """[U] row of each new page. The page tables of the groups of layers (`EngineInfo.windows`) form one table, in which
    the row is group * num_rows + row. With `EngineInfo.announces_pages`, a table of the pages' own ids follows."""
    page_columns: Int32
    """[U] place of each new page in its row; it holds positions [column * page_size, (column + 1) * page_size)."""
    page_ids: Int32
    """[U] page ids; with several groups of layers, ids of frames (a frame is the memory of a page in one group)."""

    token_rows: Int32
    """[T] row of each token that the host knows and the runner does not."""
    token_positions: Int32
    """[T] its position."""
    token_ids: Int32
    """[T] its id."""

    admitted: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    """[A] indices of the grants whose requests were admitted in this step, ascending."""
    limits: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    """[A] length in tokens at which the row of each ends; [0] if rows do not end."""
    stop_ids: Int32 = field(default_factory=lambda: np.empty((0, NUM_STOP_IDS), np.int32))
    """[A, NUM_STOP_IDS] tokens that end the row of each; -1: no token."""
    namespaces: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    """[A] a number that stands for the namespace of each, for drafters that remember text; empty without a drafter."""
    adapters: Int32 = field(default_factory=lambda: np.empty((0, 3), np.int32))
    """[A, 3] the slot and the number of the adapter of each, -1 for one without, and the first position that it
    computes; empty if the engine has no adapters.
    A slot has the adapter that was named with it last: no earlier step reads another one there."""
    is_long: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    """[A] 1 for a request that has the second set of factors for rotations, 0 for the others; empty if the model has
    one set (`EngineInfo.short_length`)."""
    is_followed: bool = True
    """Whether a drafter may be asked for drafts soon. If not, it may leave out what only later drafts would need."""
    adjustments: Adjustments | None = None
    """How the logits of admitted requests are changed before tokens are drawn; None: no logits change."""
    processors: Processors | None = None
    """Which functions change the logits of admitted requests; None: no logits change."""
    images: BatchImages | None = None
    """The images of admitted requests; None: they have none."""
    reports: Reports | None = None
    """Which admitted requests want log probabilities of their output; None: no request does."""
    scored: Int32 = field(default_factory=lambda: np.empty((0, 3), np.int32))
    """[Q, 3] grants of prompts whose tokens are reported, ascending: the grant; how many of its first positions are
    followed by a reported token; how many of the most probable tokens are reported with each."""
    pooled: Int32 = field(default_factory=lambda: np.empty((0, 3), np.int32))
    """[P, 3] grants of prompts whose hidden states are added up, ascending: the grant, the first of its positions that
    counts, and how many do. These grants yield no tokens."""
    routed: Int32 = field(default_factory=lambda: np.empty((0, 2), np.int32))
    """[R, 2] grants whose choices of experts are reported, ascending: the grant, and how many of its first positions
    are left out."""
    stated: Int32 = field(default_factory=lambda: np.empty((0, 2), np.int32))
    """[H, 2] the same for hidden states."""

    states: Int32 = field(default_factory=lambda: np.empty((0, 2), np.int32))
    """[G, 2] of each grant the place of the state that it reads, -1: zeros, and of that which it leaves; empty if no
    layer is recurrent. A later grant of the row finds there the state before its first position, whatever has come of
    drafts."""
    state_copies: Int32 = field(default_factory=lambda: np.empty((0, 3), np.int32))
    """[V, 3] copies of states: the grant, behind how many tokens of its row, and the place. A grant that does not
    compute the last of these tokens, because it begins earlier or later than it might, leaves the place as it is."""

    constrained: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    """[M] indices of the S sampled grants whose tokens must be allowed by a mask, ascending. They are drawn when the
    handle of the step has been given the masks."""

    rows: Int32
    """[G] row of each grant."""
    starts: Int32
    """[G] first position that is computed, at most."""
    counts: Int32
    """[G] number of positions that are computed, >= 1; of a grant that speculates, at most."""

    sampled: Int32
    """[S] indices of the grants that yield tokens, ascending."""
    num_promised: Int32
    """[S] the most tokens that each yields, >= 1; one follows each of its last `num_promised` positions."""
    sampling: SamplingArrays
    """Sampling parameters of the S grants."""

    @property
    def num_tokens(self) -> int:
        """Positions that this step computes."""
        return int(self.counts.sum())

    def admitted_rows(self) -> list[int]:
        """Return the rows of the A admitted grants."""
        rows: list[int] = self.rows.tolist()
        return [rows[grant] for grant in self.admitted.tolist()]


def num_rows_of(entries: Int32, counts: Int32, sampled: Int32, promised: Int32, yielded: Int32) -> Int32:
    """Return how many positions of each of some grants are reported in the result of a step.

    These are all that it has computed and not left out; of a grant that speculates, those that its tokens follow; and
    none of one that should have yielded tokens and did not. The grants are `entries` `[R, 2]`, see `Batch.routed`; of
    all, `counts` `[G]`, `sampled` and `promised` `[S]` are as in `Batch`; `yielded` `[S]`: tokens of the sampled ones.
    """
    nums = counts.copy()
    nums[sampled] = np.where(yielded == 0, 0, np.where(promised > 1, yielded, counts[sampled]))
    return np.maximum(0, nums[entries[:, 0]] - entries[:, 1])


def num_masks(batch: Batch) -> int:
    """Return how many masks the constrained grants of a batch need at most: one for each token that they may yield."""
    return int(batch.num_promised[batch.constrained].sum())
