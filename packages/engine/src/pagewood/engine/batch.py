"""One step as flat arrays: what a runner is given, with nothing of the host's objects in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What to compute in one step. Owns its arrays: none aliases the state that it was built from.

    Tokens are addressed, not carried: grant g computes positions [start, start + count) of its row and reads their
    token ids from the runner's table `tokens[row, position]`. A grant in `sampled` samples the token that follows;
    the runner writes it to `tokens[row, start + count]`, so that the next step can be built before it is known here.

    A runner first applies the page updates and the token updates, then computes. Legend: U page updates, T token
    updates, G grants, S sampled grants.
    """

    step: int
    """Counts launched steps from 0."""

    page_rows: Int32
    """[U] row of each new page."""
    page_columns: Int32
    """[U] place of each new page in its row: it holds positions [column * page_size, (column + 1) * page_size)."""
    page_ids: Int32
    """[U] page ids."""

    token_rows: Int32
    """[T] row of each token that the host knows and the runner does not."""
    token_positions: Int32
    """[T] its position."""
    token_ids: Int32
    """[T] its id."""

    rows: Int32
    """[G] row of each grant."""
    starts: Int32
    """[G] first position that is computed."""
    counts: Int32
    """[G] number of positions that are computed, >= 1."""

    sampled: Int32
    """[S] indices into the grants, ascending: those that sample a next token."""
    temperatures: NDArray[np.float32]
    """[S] 0 is greedy."""
    top_ks: Int32
    """[S] 0 is off."""
    top_ps: NDArray[np.float32]
    """[S] 1 is off."""
    min_ps: NDArray[np.float32]
    """[S] 0 is off."""
    seeds: NDArray[np.int64]
    """[S] with the position of the sampled token, the only source of randomness of a row."""

    @property
    def num_tokens(self) -> int:
        """Positions that this step computes."""
        return int(self.counts.sum())
