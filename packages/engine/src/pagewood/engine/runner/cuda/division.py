"""How the rows of a step are divided among ranks by request, on devices: all ranks have arrays of one padded shape.

Rows of all ranks lie by rank, those of each padded to those of the rank with most. So a rank's own rows are a slice,
gathering them is one exchange, and graphs of one size fit all ranks.

Legend: R ranks, T tokens of a step in its order, M tokens that each rank is padded to, K the same of wanted tokens.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor
from torch.nn import functional

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.runner.cuda.exchange import Exchange
from pagewood.engine.runner.cuda.step_arrays import StepArrays, TableShape, step_arrays


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedRows:
    """Rows of some kind; satisfies `models.ops.RowDivision`. A rank without rows has one that means nothing."""

    exchange: Exchange
    rank: int
    num_own: int
    """Rows of this rank, at least 1."""
    num_padded: int
    """Rows that each rank is padded to, at least as many."""
    wanted: DividedRows | None = None
    """Wanted rows; None: these are the wanted ones."""

    @property
    def kept(self) -> DividedRows:
        """The rows that are wanted."""
        return self if self.wanted is None else self.wanted

    def own(self, x: Tensor) -> Tensor:
        """Return the rows of this rank, in the memory of those of all."""
        first = self.rank * self.num_padded
        return x[first : first + self.num_own]

    def gather(self, x: Tensor) -> Tensor:
        """Return the rows of all ranks, `[R * padded, n]`."""
        missing = self.num_padded - len(x)
        return self.exchange.gather_ranks(functional.pad(x, (0, 0, 0, missing)) if missing else x).flatten(0, 1)

    def sum_own(self, x: Tensor) -> Tensor:
        """Return the sums over ranks of the rows of this rank; `x` are parts of all rows."""
        return self.own(self.exchange.sum_ranks(x))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestDivision:
    """Which rows of the tables belong to which rank: every rank has the tables of all, and the pages of its own."""

    exchange: Exchange
    rank: int
    count: int
    """R."""
    num_pages: int
    """Pages of each rank; the ids of those of rank r begin at r times as many."""
    owners: Int32
    """[rows], the rank of each row, which is that of its first page."""  # contents written by: note

    def note(self, batch: Batch) -> Batch:
        """Note whose the rows of a batch are; return it with the numbers of pages in the memory of their rank."""
        is_first = batch.page_columns == 0
        self.owners[batch.page_rows[is_first]] = batch.page_ids[is_first] // np.int32(self.num_pages)
        return replace(batch, page_ids=batch.page_ids % np.int32(self.num_pages))

    def most_grants(self, batch: Batch) -> int:
        """Return how many grants the rank with most has."""
        return int(np.bincount(self.owners[batch.rows], minlength=self.count).max())

    def own(self, batch: Batch) -> Batch:
        """Return the grants of this rank, with nothing to draw or to report."""
        own = self.owners[batch.rows] == self.rank
        nothing = np.empty(0, np.int32)
        return replace(
            batch, rows=batch.rows[own], starts=batch.starts[own], counts=batch.counts[own], admitted=nothing,
            is_long=nothing, scored=batch.scored[:0], pooled=batch.pooled[:0], constrained=nothing, sampled=nothing,
            num_promised=nothing, sampling=batch.sampling.take(nothing),
        )  # fmt: skip

    def arrays(
        self, batch: Batch, tables: TableShape, *, size: int | None = None, num_empty: int = 0
    ) -> tuple[StepArrays[Int32], DividedRows]:
        """Return the arrays of a step, whose attention is that of the rank's own grants, and how rows are divided.

        Args:
            batch: of all ranks, as `note` returns it.
            tables: of the device.
            size: grants of a graph, which each rank's are padded to, and of which all are wanted; None: no graph.
            num_empty: see `step_arrays`.
        """
        own = self.own(batch)
        whole = step_arrays(batch, tables)
        token_owners = np.repeat(self.owners[batch.rows], batch.counts)
        places, most = self._placed(token_owners, size)
        num_own = len(own.rows)
        padding = max(0, 1 - num_own) if size is None else size - num_own
        arrays = step_arrays(own, tables, num_padding=padding, num_empty=num_empty)
        wanted = np.concatenate([whole.wanted, whole.scored, whole.pooled])
        kept, most_kept = self._placed(token_owners[wanted], size)
        gathered, own_wanted = kept, (places[wanted] % np.int32(most))[token_owners[wanted] == self.rank]
        if size is not None:  # all tokens of a graph are wanted
            gathered, own_wanted = places[wanted], np.arange(size, dtype=np.int32)
        sources = np.full(self.count * most, tables.max_rows * tables.tokens_per_row, np.int32)
        sources[places] = whole.sources
        arrays = replace(
            arrays,
            shifted_rows=whole.shifted_rows,
            shifts=whole.shifts,
            sources=sources,
            wanted=own_wanted if len(own_wanted) else np.zeros(1, np.int32),
            gathered=gathered,
            scored=places[whole.scored],
            pooled=places[whole.pooled],
            targets=whole.targets,
            sampling=whole.sampling,
            drawn_positions=whole.drawn_positions,
        )
        return arrays, self.rows(len(arrays.positions), most, len(arrays.wanted), most_kept)

    def rows(self, num_own: int, most: int, num_kept: int, most_kept: int) -> DividedRows:
        """Return the division of tokens, and of wanted ones."""
        wanted = DividedRows(exchange=self.exchange, rank=self.rank, num_own=num_kept, num_padded=most_kept)
        return DividedRows(exchange=self.exchange, rank=self.rank, num_own=num_own, num_padded=most, wanted=wanted)

    def _placed(self, owners: Int32, size: int | None) -> tuple[Int32, int]:
        """Return the place of each row among the padded rows of all ranks, and how many each rank is padded to."""
        counts = np.bincount(owners, minlength=self.count)
        most = max(1, int(counts.max())) if size is None else size
        places = np.empty(len(owners), np.int32)
        for rank in range(self.count):
            places[owners == rank] = rank * most + np.arange(counts[rank], dtype=np.int32)
        return places, most
