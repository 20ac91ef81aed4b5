"""A batch as int32 arrays that one copy brings to a CUDA device.

Legend: U page updates, N token updates, A admitted requests of a model with two sets of factors for rotations, T
tokens, G grants (including those that pad a graph), S sampled grants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import numpy as np

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.runner.cuda.attention import PageArrays, offsets_of
from pagewood.engine.runner.cuda.pool import pooled_tokens
from pagewood.engine.runner.state_saves import state_saves

_EMPTY = np.empty(0, np.int32)
X = TypeVar("X")
"""An array type: numpy's on the host, torch's in pinned memory or on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableShape:
    """Shape of the device's tables. Each has one row more than `max_rows`, which the grants that pad a graph read.

    There is a page table for each group of layers; they lie behind each other.
    """

    max_rows: int
    tokens_per_row: int
    pages_per_row: int
    page_size: int
    windows: tuple[int | None, ...] = (None,)
    """Window of each group of layers, see `EngineInfo.windows`."""
    long_shift: int = 0
    """How far the place of a position in a long request is behind it in the tables of rotations, see `models.rope`."""
    has_pages: bool = False
    """Whether the table of the pages' own ids is behind those of the groups, see `EngineInfo.announces_pages`."""
    num_states: int = 0
    """Places of states, see `CUDAStates`; grants that pad a graph write the last one. 0: no layer is recurrent."""

    @property
    def num_tables(self) -> int:
        """Page tables."""
        return len(self.windows) + self.has_pages

    @property
    def pages_per_group(self) -> int:
        """Places in the page table of a group."""
        return (self.max_rows + 1) * self.pages_per_row


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays(Generic[X]):
    """The arrays of a step, all int32. A place is row * columns + column of a table.

    Places that are written to are int64, viewed as int32, because torch requires int64 indices there.
    """

    page_places: X
    """[2U] int64 viewed as int32, places in the page table."""
    page_ids: X
    """[U] page ids."""
    token_places: X
    """[2N] int64 viewed as int32, places in the token table."""
    token_ids: X
    """[N] token ids."""
    shifted_rows: X
    """[2A] int64 viewed as int32, rows of admitted requests."""
    shifts: X
    """[A] how far the places of their positions are behind the positions."""
    adapted_rows: X
    """[2A] int64 viewed as int32, rows of all admitted requests; [0] without adapters."""
    adapter_slots: X
    """[A] the slots of their adapters; -1: none."""
    adapter_starts: X
    """[A] the first positions that these compute."""
    sources: X
    """[T] place of each token in the token table."""
    positions: X
    """[T] position of each token in its sequence."""
    grants: X
    """[T] grant of each token."""
    qo_indptr: X
    """[G + 1] first token of each grant; here and below, G includes empty grants."""
    kv_indptr: X
    """[G + 1] first page of each grant."""
    page_shifts: X
    """[G] add it to the index of a page within the step to get the page's place in the page table."""
    last_page_len: X
    """[G] positions in the last page of each grant."""
    kv_lens: X
    """[G] positions that each grant attends to."""
    states: X
    """[2G] without empty grants: the place of the state that each reads, and of that which it leaves; [0] if no layer
    is recurrent."""
    state_saves: X
    """[T] place that gets a copy of the state behind each token; -1: no place. [0] if no layer is recurrent."""
    wanted: X
    """[max(S, 1)] tokens whose logits are needed; at least one, because kernels do not accept an empty array. Where
    tokens are divided among ranks by request, all that are needed of those of this rank."""
    gathered: X
    """[max(S, 1) + R + K] where the states of the sampled, scored and pooled tokens are among those of all ranks; [0]
    where tokens are not divided."""
    scored: X
    """[R] prompt tokens before a reported token."""
    pooled: X
    """[K] tokens of prompts whose hidden states are added up, then those that are only reported."""
    targets: X
    """[2S] int64 viewed as int32, place in the token table for each sampled token."""
    sampling: X
    """[NUM_SAMPLING_COLUMNS * S], see `SamplingArrays.flat`."""
    drawn_positions: X
    """[S] position of the token that each sampled grant draws."""

    def words(self) -> dict[str, X]:
        """Return all arrays by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def of_words(cls, words: Mapping[str, X]) -> StepArrays[X]:
        """Return the `StepArrays` whose words are among `words`."""
        return cls(**{field.name: words[field.name] for field in fields(cls)})


def step_arrays(
    batch: Batch, tables: TableShape, *, num_padding: int = 0, num_empty: int = 0, all_wanted: bool = False
) -> StepArrays[Int32]:
    """Return the arrays of a batch.

    Args:
        batch: what to compute.
        tables: of the device.
        num_padding: grants of one token to add, which read the last row of the tables.
        num_empty: grants without tokens and pages to add after those.
        all_wanted: whether the logits of all tokens are needed, not only those of the sampled grants.
    """
    padding = np.zeros(num_padding, np.int32)
    rows = np.concatenate([batch.rows, padding + tables.max_rows])
    starts = np.concatenate([batch.starts, padding])
    counts = np.concatenate([batch.counts, padding + 1])
    offsets = offsets_of(counts)
    grants = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
    positions = np.arange(offsets[-1], dtype=np.int32) + (starts - offsets[:-1])[grants]
    kv_lens = starts + counts
    pages = PageArrays.of(kv_lens, page_size=tables.page_size)
    ends = (batch.starts + batch.counts)[batch.sampled]
    last = offsets[1:][batch.sampled] - 1
    wanted = np.arange(offsets[-1], dtype=np.int32) if all_wanted else last
    return StepArrays(
        **updates(batch, tables),
        sources=(rows * np.int32(tables.tokens_per_row))[grants] + positions,
        positions=positions,
        grants=grants,
        qo_indptr=extended(offsets, num_empty, offsets[-1]),
        kv_indptr=extended(pages.kv_indptr, num_empty, pages.kv_indptr[-1]),
        page_shifts=extended(rows * np.int32(tables.pages_per_row) - pages.kv_indptr[:-1], num_empty, 0),
        last_page_len=extended(pages.last_page_len, num_empty, 1),
        kv_lens=extended(kv_lens, num_empty, 0),
        states=places_of_states(batch, tables, num_padding),
        state_saves=state_saves(batch.state_copies, starts, counts) if tables.num_states else _EMPTY,
        wanted=wanted if len(wanted) else np.zeros(1, np.int32),
        gathered=np.empty(0, np.int32),
        scored=scored_tokens(batch, offsets),
        pooled=pooled_tokens(batch, offsets),
        targets=wide(batch.rows[batch.sampled] * np.int32(tables.tokens_per_row) + ends),
        sampling=batch.sampling.flat(),
        drawn_positions=ends,
    )


def places_of_states(batch: Batch, tables: TableShape, num_padding: int) -> Int32:
    """Return `StepArrays.states` of a batch and of `num_padding` grants more."""
    if not tables.num_states:
        return _EMPTY
    padding = np.full((num_padding, 2), (-1, tables.num_states - 1), np.int32)
    return np.concatenate([batch.states, padding]).ravel()


def scored_tokens(batch: Batch, offsets: Int32) -> Int32:
    """Return the tokens before a reported prompt token; `offsets` has the first token of each grant."""
    firsts = [np.arange(num, dtype=np.int32) + offsets[grant] for grant, num, _ in batch.scored.tolist()]
    return np.concatenate(firsts) if firsts else np.empty(0, np.int32)


def updates(batch: Batch, tables: TableShape) -> dict[str, Int32]:
    """Return what a batch changes in the tables of the device, under the names of `StepArrays`."""
    rows = batch.page_rows
    if tables.num_tables > 1:  # a row for padding is behind those of each group
        rows = rows + rows // np.int32(tables.max_rows)
    return {
        "page_places": wide(rows * np.int32(tables.pages_per_row) + batch.page_columns),
        "page_ids": batch.page_ids,
        "token_places": wide(batch.token_rows * np.int32(tables.tokens_per_row) + batch.token_positions),
        "token_ids": batch.token_ids,
        "shifted_rows": wide(batch.rows[batch.admitted] if len(batch.is_long) else batch.is_long),
        "shifts": batch.is_long * np.int32(tables.long_shift),
        "adapted_rows": wide(batch.rows[batch.admitted] if len(batch.adapters) else batch.adapters[:, 0]),
        "adapter_slots": batch.adapters[:, 0],
        "adapter_starts": batch.adapters[:, 2],
    }


def wide(places: Int32) -> Int32:
    """Return places as int64, viewed as int32."""
    return places.astype(np.int64).view(np.int32)


def extended(array: Int32, count: int, value: int | np.int32) -> Int32:
    """Return `array` with `value` appended `count` times."""
    return np.concatenate([array, np.full(count, value, np.int32)]) if count else array
