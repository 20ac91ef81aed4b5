"""A batch as the int32 arrays that one copy takes to a CUDA device.

Legend: U page updates, N token updates, T tokens, G grants (with those that pad a graph), S sampled grants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import numpy as np

from pagewood.engine.core.arrays import Int32
from pagewood.engine.core.batch import Batch
from pagewood.engine.runner.cuda.attention import PageArrays, offsets_of
from pagewood.engine.runner.splitmix import uniform

X = TypeVar("X")
"""An array of one place: numpy's on the host, torch's in pinned memory or on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableShape:
    """The device's tables, each with one row more than requests can hold: those that pad a graph read it."""

    max_rows: int
    tokens_per_row: int
    pages_per_row: int
    page_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays(Generic[X]):
    """What a step needs to know, all int32. A place is row * columns + column of a table.

    Where something is written to a table, places are int64 by their bits, because torch takes no others there.
    """

    page_places: X
    """[2U] int64 by its bits, in the page table."""
    page_ids: X
    """[U]"""
    token_places: X
    """[2N] int64 by its bits, in the token table."""
    token_ids: X
    """[N]"""
    sources: X
    """[T] where the token table holds each token."""
    positions: X
    """[T]"""
    grants: X
    """[T] the grant of each token."""
    qo_indptr: X
    """[G + 1] first token of each grant; G counts the empty ones here and below."""
    kv_indptr: X
    """[G + 1] first page of each grant."""
    page_shifts: X
    """[G] what is added to the number of a page in the step to get its place in the page table."""
    last_page_len: X
    """[G]"""
    kv_lens: X
    """[G] positions that each grant sees."""
    wanted: X
    """[max(S, 1)] the tokens whose logits are wanted; at least one, because kernels do not take none."""
    targets: X
    """[2S] int64 by its bits, where the token table takes each sampled token."""
    sampling: Mapping[str, X]
    """[S] of each, by their bits: the fields of `SamplingArrays`, without the seeds, which `uniforms` come from."""
    uniforms: X
    """[2S] float64 by its bits, see `uniform`."""

    def words(self) -> dict[str, X]:
        """Return all arrays by name; those of `sampling` after a dot."""
        own = {name: getattr(self, name) for name in _OWN}
        return own | {_SAMPLING + name: array for name, array in self.sampling.items()}

    @classmethod
    def of_words(cls, words: Mapping[str, X]) -> StepArrays[X]:
        """Undo `words`."""
        own = {name: words[name] for name in _OWN}
        sampling = {name[len(_SAMPLING) :]: words[name] for name in words if name.startswith(_SAMPLING)}
        return cls(sampling=sampling, **own)


_SAMPLING = "sampling."
_OWN = [field.name for field in fields(StepArrays) if field.name != "sampling"]


def step_arrays(
    batch: Batch, tables: TableShape, *, num_padding: int = 0, num_empty: int = 0, all_wanted: bool = False
) -> StepArrays[Int32]:
    """Return the arrays of a batch.

    Args:
        batch: what to compute.
        tables: the device's.
        num_padding: grants to add, of one token each, that read the tables' last row.
        num_empty: grants to add after them, of no token and no page.
        all_wanted: whether the logits of all tokens are wanted, and not only of those that are sampled from.
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
    sampling = batch.sampling
    draws = bool((sampling.temperatures > 0).any())
    last = offsets[1:][batch.sampled] - 1
    wanted = np.arange(offsets[-1], dtype=np.int32) if all_wanted else last
    return StepArrays(
        page_places=_wide(batch.page_rows * np.int32(tables.pages_per_row) + batch.page_columns),
        page_ids=batch.page_ids,
        token_places=_wide(batch.token_rows * np.int32(tables.tokens_per_row) + batch.token_positions),
        token_ids=batch.token_ids,
        sources=(rows * np.int32(tables.tokens_per_row))[grants] + positions,
        positions=positions,
        grants=grants,
        qo_indptr=_extended(offsets, num_empty, offsets[-1]),
        kv_indptr=_extended(pages.kv_indptr, num_empty, pages.kv_indptr[-1]),
        page_shifts=_extended(rows * np.int32(tables.pages_per_row) - pages.kv_indptr[:-1], num_empty, 0),
        last_page_len=_extended(pages.last_page_len, num_empty, 1),
        kv_lens=_extended(kv_lens, num_empty, 0),
        wanted=wanted if len(wanted) else np.zeros(1, np.int32),
        targets=_wide(batch.rows[batch.sampled] * np.int32(tables.tokens_per_row) + ends),
        sampling={name: array.view(np.int32) for name, array in sampling.fields().items() if name != "seeds"},
        uniforms=(uniform(sampling.seeds, ends) if draws else np.zeros(len(ends))).view(np.int32),
    )


def _wide(places: Int32) -> Int32:
    return places.astype(np.int64).view(np.int32)


def _extended(array: Int32, count: int, value: int | np.int32) -> Int32:
    return np.concatenate([array, np.full(count, value, np.int32)]) if count else array
