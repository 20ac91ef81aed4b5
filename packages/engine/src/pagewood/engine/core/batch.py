"""One step as flat arrays: what a runner is given, with nothing of the host's objects in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.api import SamplingParams
from pagewood.engine.core.arrays import Int32
from pagewood.engine.core.plan import Grant


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


class BatchBuilder:
    """Turns grants into arrays. Keeps the sampling parameters of each row, so that a decode step only gathers them."""

    __slots__ = ("_min_ps", "_page_size", "_seeds", "_temperatures", "_top_ks", "_top_ps")

    def __init__(self, *, num_rows: int, page_size: int) -> None:
        self._page_size = page_size
        self._temperatures = np.zeros(num_rows, np.float32)
        self._top_ks = np.zeros(num_rows, np.int32)
        self._top_ps = np.ones(num_rows, np.float32)
        self._min_ps = np.zeros(num_rows, np.float32)
        self._seeds = np.zeros(num_rows, np.int64)

    def build(self, grants: Sequence[Grant], *, step: int) -> Batch:
        """Return the arrays of one step. Grants are those of one plan, before its launch is counted."""
        page_size = self._page_size
        page_rows: list[int] = []
        page_columns: list[int] = []
        page_ids: list[Int32] = []
        token_rows: list[int] = []
        token_starts: list[int] = []
        token_ids: list[Int32] = []
        for request, start, count, _, admitted in grants:
            first = 0 if admitted else -(-start // page_size)  # the page that start is inside of is known already
            last = -(-(start + count) // page_size)
            if first < last:
                page_rows.append(request.row)
                page_columns.append(first)
                page_ids.append(request.pages[first:last])
            if admitted:
                token_rows.append(request.row)
                token_starts.append(start)
                token_ids.append(request.tokens[start : request.num_known])
                self._remember(request.row, request.sampling, request.seed)
        rows = np.array([grant.request.row for grant in grants], np.int32)
        sampled = np.array([index for index, grant in enumerate(grants) if grant.samples], np.int32)
        sampled_rows = rows[sampled]
        pages, tokens = _Ragged(page_rows, page_columns, page_ids), _Ragged(token_rows, token_starts, token_ids)
        return Batch(
            step=step,
            page_rows=pages.rows,
            page_columns=pages.columns,
            page_ids=pages.values,
            token_rows=tokens.rows,
            token_positions=tokens.columns,
            token_ids=tokens.values,
            rows=rows,
            starts=np.array([grant.start for grant in grants], np.int32),
            counts=np.array([grant.num_tokens for grant in grants], np.int32),
            sampled=sampled,
            temperatures=self._temperatures[sampled_rows],
            top_ks=self._top_ks[sampled_rows],
            top_ps=self._top_ps[sampled_rows],
            min_ps=self._min_ps[sampled_rows],
            seeds=self._seeds[sampled_rows],
        )

    def _remember(self, row: int, sampling: SamplingParams, seed: int) -> None:
        self._temperatures[row] = sampling.temperature
        self._top_ks[row] = sampling.top_k
        self._top_ps[row] = sampling.top_p
        self._min_ps[row] = sampling.min_p
        self._seeds[row] = seed


class _Ragged:
    """Pieces of rows, flattened: each value with its row and column."""

    __slots__ = ("columns", "rows", "values")

    def __init__(self, rows: list[int], starts: list[int], pieces: list[Int32]) -> None:
        if not pieces:
            self.rows = self.columns = self.values = np.empty(0, np.int32)
            return
        lengths = [len(piece) for piece in pieces]
        self.values = np.concatenate(pieces)
        self.rows = np.repeat(np.array(rows, np.int32), lengths)
        ends = np.cumsum(lengths)
        shift = np.array(starts, np.int64) + lengths - ends  # column = index + shift of its piece
        self.columns = (np.arange(len(self.values)) + np.repeat(shift, lengths)).astype(np.int32)
