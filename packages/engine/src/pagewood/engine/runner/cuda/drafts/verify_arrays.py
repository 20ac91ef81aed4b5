"""A batch that verifies drafts as int32 arrays: only the device knows where its rows begin.

Legend: U page updates, N token updates, T tokens, G grants (including those that pad a graph), V verified positions,
S sampled grants, D grants with drafts, F draft tokens, M of the grants with drafts that have masks, W `width`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.runner.cuda.attention import PageArrays, offsets_of
from pagewood.engine.runner.cuda.drafts.masks import MaskShape
from pagewood.engine.runner.cuda.pool import pooled_tokens
from pagewood.engine.runner.cuda.step_arrays import TableShape, X, extended, places_of_states, scored_tokens, updates

_PADDING_LENGTH = 8
"""Positions for which a padding grant is planned, if its page has that many: a mask with shorter rows costs more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyArrays(Generic[X]):
    """The arrays of a step that verifies, all int32.

    Invariant: none of them depends on the true start of a grant; `starts` are upper bounds.
    """

    page_places: X
    """[2U], see `StepArrays`."""
    page_ids: X
    token_places: X
    token_ids: X
    shifted_rows: X
    shifts: X
    adapted_rows: X
    adapter_slots: X
    adapter_starts: X
    rows: X
    """[G] row of each grant; for padding, the last row of the tables."""
    starts: X
    """[G] upper bound of each grant's first position."""
    is_inexact: X
    """[G] 1 if an earlier step of the row may have yielded fewer tokens than it promised."""
    token_grants: X
    """[T] the grant whose pages hold each token; for a padding token, a padding grant."""
    token_offsets: X
    """[T] position of each token after the start of that grant."""
    is_draft: X
    """[T] 1 for the tokens of grants that verify."""
    qo_indptr: X
    """[G + 1], see `StepArrays`; here and below, G includes empty grants."""
    kv_indptr: X
    """[G + 1]"""
    page_shifts: X
    """[G]"""
    last_page_len: X
    """[G]"""
    kv_lens: X
    """[G] positions that each grant is planned for."""
    mask_offsets: X
    """[G + 1], see `MaskShape`."""
    wanted: X
    """[V] token at each verified position."""
    scored: X
    """[R], see `StepArrays`."""
    pooled: X
    """[K], see `StepArrays`."""
    cells: X
    """[V] place of each in a matrix of S rows, see `width`."""
    first_tokens: X
    """[S] token at the first verified position of each sampled grant."""
    drafting: X
    """[D] sampled grants that have drafts."""
    most_drafts: X
    """[D] draft tokens that each is granted."""
    draft_tokens: X
    """[F] token of each draft."""
    draft_cells: X
    """[F] place of each in a matrix of D rows and `width` - 1 columns."""
    told: X
    """[M] sampled grants with masks and drafts, which the host must know before it makes the masks."""
    states: X
    """[2G] without empty grants, see `StepArrays`."""
    state_copies: X
    """[4C] the grant of each copy of a state, the grant's tokens, and see `Batch.state_copies`."""
    certain: X
    """[G] tokens of each grant that are no drafts; [0] if no layer is recurrent."""
    told_tokens: X
    """[M * (W - 1)] token of each of their drafts; for drafts that are not granted, the last granted one."""
    sampling: X
    """[NUM_SAMPLING_COLUMNS * V], see `SamplingArrays.flat`."""

    def words(self) -> dict[str, X]:
        """Return all arrays by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def of_words(cls, words: Mapping[str, X], *, mark: str = "") -> VerifyArrays[X]:
        """Return the `VerifyArrays` whose `words` are given, under names behind a `mark`."""
        return cls(**{field.name: words[mark + field.name] for field in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyStep:
    """The host's view of a batch that verifies."""

    arrays: VerifyArrays[Int32]
    mask: MaskShape
    width: int
    """The most tokens that a grant promises."""
    longest: int
    """The most tokens that a row of the step can have."""


def verify_step(
    batch: Batch,
    tables: TableShape,
    *,
    is_inexact: NDArray[np.bool_],
    graph: tuple[int, int] | None = None,
    num_empty: int = 0,
) -> VerifyStep:
    """Return the arrays of a batch.

    Args:
        batch: what to compute.
        tables: of the device.
        is_inexact: `[G]`, see `VerifyArrays`.
        graph: number of grants of the graph that computes the step, and of tokens of each; None: no graph.
        num_empty: grants without tokens and pages to add; a graph needs at least one if any token pads.
    """
    num_grants = len(batch.rows)
    if graph is None:
        num_padding, slots = 0, batch.counts
    else:
        num_padding, slots = graph[0] - num_grants, np.full(graph[0], graph[1], np.int32)
    padding = np.zeros(num_padding, np.int32)
    counts = np.concatenate([batch.counts, padding])
    offsets = offsets_of(slots)
    slot_grants = np.repeat(np.arange(len(slots), dtype=np.int32), slots)
    slot_offsets = np.arange(offsets[-1], dtype=np.int32) - offsets[:-1][slot_grants]
    is_padding = slot_offsets >= counts[slot_grants]
    has_dummy = graph is not None  # the first empty grant then owns the padding page
    num_more = num_padding + has_dummy
    starts = np.concatenate([batch.starts, np.zeros(num_more, np.int32)])
    rows = np.concatenate([batch.rows, np.full(num_more, tables.max_rows, np.int32)])
    lengths = np.full(num_more, min(tables.page_size, _PADDING_LENGTH), np.int32)
    kv_lens = np.concatenate([batch.starts + batch.counts, lengths])
    pages = PageArrays.of(kv_lens, page_size=tables.page_size)
    num_empty -= has_dummy
    slots = extended(slots, num_empty + has_dummy, 0)
    mask = MaskShape.of(slots, extended(kv_lens, num_empty, 0))

    promised, sampled = batch.num_promised, batch.sampled
    width = max(int(promised.max(initial=1)), 1)
    firsts = offsets[:-1][sampled] + batch.counts[sampled] - promised
    owners, steps = _ragged(promised)
    drafting = np.flatnonzero(promised > 1).astype(np.int32)
    most = promised[drafting] - 1
    draft_owners, draft_steps = _ragged(most)
    certain = batch.counts.copy()
    certain[sampled] -= np.maximum(promised - 1, 0)
    told = batch.constrained[promised[batch.constrained] > 1]
    draft_places = np.minimum(np.arange(1, width), promised[told, None] - 1) if len(told) else np.empty((0, 0))
    arrays = VerifyArrays(
        **updates(batch, tables),
        rows=rows,
        starts=starts,
        is_inexact=np.concatenate([is_inexact.astype(np.int32), np.zeros(num_more, np.int32)]),
        token_grants=np.where(is_padding, np.int32(len(rows) - 1), slot_grants),
        token_offsets=np.where(is_padding, np.int32(0), slot_offsets),
        is_draft=_of_tokens(promised > 1, sampled, slot_grants),
        qo_indptr=extended(offsets, num_empty + has_dummy, offsets[-1]),
        kv_indptr=extended(pages.kv_indptr, num_empty, pages.kv_indptr[-1]),
        page_shifts=extended(rows * np.int32(tables.pages_per_row) - pages.kv_indptr[:-1], num_empty, 0),
        last_page_len=extended(pages.last_page_len, num_empty, 1),
        kv_lens=extended(kv_lens, num_empty, 0),
        mask_offsets=mask.offsets,
        wanted=firsts[owners] + steps if len(owners) else np.zeros(1, np.int32),
        scored=scored_tokens(batch, offsets),
        pooled=pooled_tokens(batch, offsets),
        cells=owners * np.int32(width) + steps,
        first_tokens=firsts,
        drafting=drafting,
        most_drafts=most,
        draft_tokens=firsts[drafting][draft_owners] + draft_steps + 1,
        draft_cells=draft_owners * np.int32(max(width - 1, 1)) + draft_steps,
        told=told,
        states=places_of_states(batch, tables, num_padding),
        state_copies=np.insert(batch.state_copies, 1, batch.counts[batch.state_copies[:, 0]], 1).ravel(),
        certain=certain if tables.num_states else certain[:0],
        told_tokens=(firsts[told, None] + draft_places).astype(np.int32).ravel(),
        sampling=batch.sampling.take(owners).flat(),
    )
    return VerifyStep(arrays=arrays, mask=mask, width=width, longest=int(kv_lens.max()))


def _of_tokens(is_draft: NDArray[np.bool_], sampled: Int32, slot_grants: Int32) -> Int32:
    """Return `[T]`: 1 for the tokens of those `sampled` grants for which `is_draft` is true."""
    return np.isin(slot_grants, sampled[is_draft]).astype(np.int32)


def _ragged(counts: Int32) -> tuple[Int32, Int32]:
    """Return, for each element of rows of `counts`, its row and its place there."""
    owners = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    return owners, np.arange(len(owners), dtype=np.int32) - offsets_of(counts)[:-1][owners]
