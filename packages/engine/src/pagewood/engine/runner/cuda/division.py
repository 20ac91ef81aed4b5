"""How the rows of a step are divided among ranks by request, on devices: all ranks have arrays of one padded shape.

Rows of all ranks lie by rank, those of each padded to those of the rank with most. So a rank's own rows are a slice,
gathering them is one exchange, and graphs of one size fit all ranks.

Legend: R ranks, T tokens of a step in its order, M tokens that each rank is padded to, K the same of wanted tokens, G
grants, S sampled grants.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.runner.cuda.exchange import Exchange
from pagewood.engine.runner.cuda.pool import pooled_entries
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

    def gather_numbers(self, x: Tensor) -> Tensor:
        """Return the numbers of the rows of all ranks, `[R * padded]`."""
        return self.gather(x[:, None])[:, 0]

    def gather(self, x: Tensor) -> Tensor:
        """Return the rows of all ranks, `[R * padded, n]`."""
        missing = self.num_padded - len(x)
        return self.exchange.gather_ranks(functional.pad(x, (0, 0, 0, missing)) if missing else x).flatten(0, 1)

    def sum_own(self, x: Tensor) -> Tensor:
        """Return the sums over ranks of the rows of this rank; `x` are parts of all rows."""
        return self.own(self.exchange.sum_ranks(x))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnSampled:
    """The sampled grants of this rank in a step, for a head that reads the states of all of its tokens."""

    sampled: Int32
    """[S'] which of the S sampled grants are its own."""
    wanted: Int32
    """[max(S', 1)] the last token of each among its own tokens."""
    rows: DividedRows
    """Of the tokens of the step; the wanted ones are one of each sampled grant."""

    def words(self) -> dict[str, Int32]:
        """Return the arrays by name."""
        return {"own_sampled": self.sampled, "own_wanted": self.wanted}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnVerified:
    """What a rank has of a step that verifies."""

    batch: Batch
    """Its grants with their drafts, at least one; they change no table."""
    gathered: Int32
    """[V + Q + P] where the states of verified positions, and of scored and pooled tokens, are among those of all."""
    rows: DividedRows
    """Of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DividedGrants:
    """Some grants, of which a rank computes its own. A rank without any computes one token that means nothing."""

    own: Int32
    """[>= 1] which of the G grants are its own; G, if none is."""
    gathered: Int32
    """[G] where the wanted token of each is among those of all ranks; each grant has one."""
    rows: DividedRows
    """Of their tokens; the wanted ones are one of each grant."""

    def words(self) -> dict[str, Int32]:
        """Return the arrays by name."""
        return {"own": self.own, "gathered": self.gathered}

    def of(self, values: Int32, otherwise: int) -> Int32:
        """Return those of `values` `[G]` that are of own grants, or `otherwise` if none is."""
        return np.append(values, np.int32(otherwise))[self.own]


def of_own(values: Tensor, own: Tensor, otherwise: int) -> Tensor:
    """Return what `DividedGrants.of` does, on the device."""
    return torch.cat([values, values.new_full((1,), otherwise)]).index_select(0, own)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestDivision:
    """Which rows of the tables belong to which rank: every rank has the tables of all, and the pages of its own."""

    exchange: Exchange
    rank: int
    count: int
    """R."""
    num_pages: int
    """Pages of each rank; the ids of those of rank r begin at r times as many."""
    num_states: int = 0
    """Places of states of each rank, numbered as pages are; 0: no layer is recurrent."""
    owners: Int32
    """[rows], the rank of each row, which is that of its first page."""  # contents written by: note

    def note(self, batch: Batch) -> Batch:
        """Note whose the rows of a batch are; return it with pages and places of states in the memory of their rank."""
        is_first = batch.page_columns == 0
        self.owners[batch.page_rows[is_first]] = batch.page_ids[is_first] // np.int32(self.num_pages)
        pages = batch.page_ids % np.int32(self.num_pages)
        if not self.num_states:
            return replace(batch, page_ids=pages)
        copies = batch.state_copies.copy()
        copies[:, 2] %= self.num_states
        states = np.where(batch.states < 0, batch.states, batch.states % np.int32(self.num_states))
        return replace(batch, page_ids=pages, states=states, state_copies=copies)

    def is_own(self, rows: Int32) -> NDArray[np.bool_]:
        """Return which `rows` are this rank's."""
        return self.owners[rows] == self.rank

    def most_grants(self, batch: Batch) -> int:
        """Return how many grants the rank with most has."""
        return int(np.bincount(self.owners[batch.rows], minlength=self.count).max())

    def own(self, batch: Batch) -> Batch:
        """Return the grants of this rank, with nothing to draw or to report."""
        own = self.owners[batch.rows] == self.rank
        nothing = np.empty(0, np.int32)
        return replace(
            batch, rows=batch.rows[own], starts=batch.starts[own], counts=batch.counts[own], admitted=nothing,
            is_long=nothing, adapters=batch.adapters[:0], scored=batch.scored[:0], pooled=batch.pooled[:0],
            routed=batch.routed[:0], stated=batch.stated[:0], constrained=nothing, sampled=nothing,
            num_promised=nothing, sampling=batch.sampling.take(nothing), **self._states(batch),
        )  # fmt: skip

    def grants(self, rows: Int32, counts: Int32) -> DividedGrants:
        """Return how grants of `rows` `[G]` and of `counts` `[G]` tokens are divided."""
        owners = self.owners[rows]
        own = np.flatnonzero(owners == self.rank).astype(np.int32)
        num_tokens = np.bincount(owners, counts, minlength=self.count).astype(np.int32)
        gathered, most = self._placed(owners, None)
        return DividedGrants(
            own=own if len(own) else np.array([len(rows)], np.int32),
            gathered=gathered,
            rows=self.rows(max(1, int(num_tokens[self.rank])), max(1, int(num_tokens.max())), max(1, len(own)), most),
        )

    def token_places(self, batch: Batch) -> Int32:
        """Return the place of each token of a step without a graph among the padded tokens of all ranks, `[T]`."""
        return self._placed(np.repeat(self.owners[batch.rows], batch.counts), None)[0]

    def sampled(self, batch: Batch, rows: DividedRows) -> OwnSampled:
        """Return the sampled grants of this rank in a step whose tokens are divided like `rows`."""
        owners = self.owners[batch.rows]
        is_own, of_sampled = owners == self.rank, owners[batch.sampled]
        sampled = np.flatnonzero(of_sampled == self.rank).astype(np.int32)
        lasts = np.cumsum(batch.counts * is_own)[batch.sampled[sampled]] - 1
        counts = np.bincount(of_sampled, minlength=self.count)
        num_own, most = max(1, len(sampled)), max(1, int(counts.max()))
        return OwnSampled(
            sampled=sampled,
            wanted=lasts.astype(np.int32) if len(sampled) else np.zeros(1, np.int32),
            rows=self.rows(rows.num_own, rows.num_padded, num_own, most),
        )

    def verified(self, batch: Batch, tables: TableShape) -> OwnVerified:
        """Return what this rank has of a step that verifies, as `note` returns it."""
        owners = self.owners[batch.rows]
        grants, sampled = (np.flatnonzero(one == self.rank) for one in (owners, owners[batch.sampled]))
        numbers = np.cumsum(owners == self.rank, dtype=np.int32) - 1
        nothing = np.empty(0, np.int32)
        kept = {name: getattr(batch, name) for name in ("scored", "pooled", "routed", "stated")}
        kept = {name: one[owners[one[:, 0]] == self.rank] for name, one in kept.items()}
        kept = {name: np.concatenate([numbers[one[:, :1]], one[:, 1:]], 1) for name, one in kept.items()}
        is_idle = not len(grants)
        states = self._states(batch)
        if is_idle and tables.num_states:
            states["states"] = np.array([(-1, tables.num_states - 1)], np.int32)
        own = replace(
            batch, page_rows=nothing, page_columns=nothing, page_ids=nothing, token_rows=nothing,
            token_positions=nothing, token_ids=nothing, admitted=nothing, is_long=nothing,
            adapters=batch.adapters[:0], constrained=nothing,
            rows=np.array([tables.max_rows], np.int32) if is_idle else batch.rows[grants],
            starts=np.zeros(1, np.int32) if is_idle else batch.starts[grants],
            counts=np.ones(1, np.int32) if is_idle else batch.counts[grants],
            sampled=numbers[batch.sampled[sampled]], num_promised=batch.num_promised[sampled],
            sampling=batch.sampling.take(sampled), **states, **kept,
        )  # fmt: skip
        pooled = pooled_entries(batch)
        wanted = [
            np.repeat(owners[batch.sampled], batch.num_promised),
            np.repeat(owners[batch.scored[:, 0]], batch.scored[:, 1]),
            np.repeat(owners[pooled[:, 0]], pooled[:, 2]),
        ]
        gathered, most_kept = self._placed(np.concatenate(wanted), None)
        num_kept = sum(int((one == self.rank).sum()) for one in wanted)
        most = int(np.bincount(owners, batch.counts, minlength=self.count).max())
        rows = self.rows(own.num_tokens, most, max(1, num_kept), most_kept)
        return OwnVerified(batch=own, gathered=gathered, rows=rows)

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
            adapted_rows=whole.adapted_rows,
            adapter_slots=whole.adapter_slots,
            adapter_starts=whole.adapter_starts,
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

    def _states(self, batch: Batch) -> dict[str, Int32]:
        """Return what the grants of this rank read and leave of states, see `Batch`."""
        is_own, copies = self.owners[batch.rows] == self.rank, batch.state_copies
        numbers, copies = np.cumsum(is_own, dtype=np.int32) - 1, copies[is_own[copies[:, 0]]]
        copies = np.column_stack([numbers[copies[:, 0]], copies[:, 1:]])
        return {"states": batch.states[is_own] if len(batch.states) else batch.states, "state_copies": copies}

    def rows(self, num_own: int, most: int, num_kept: int, most_kept: int) -> DividedRows:
        """Return the division of tokens, and of wanted ones."""
        wanted = DividedRows(exchange=self.exchange, rank=self.rank, num_own=num_kept, num_padded=most_kept)
        return DividedRows(exchange=self.exchange, rank=self.rank, num_own=num_own, num_padded=most, wanted=wanted)

    def of_graph(self, size: int) -> DividedRows:
        """Return the division of a graph's tokens, `size` of each rank, all of which are wanted."""
        return DividedRows(exchange=self.exchange, rank=self.rank, num_own=size, num_padded=size)

    def _placed(self, owners: Int32, size: int | None) -> tuple[Int32, int]:
        """Return the place of each row among the padded rows of all ranks, and how many each rank is padded to."""
        counts = np.bincount(owners, minlength=self.count)
        most = max(1, int(counts.max())) if size is None else size
        places = np.empty(len(owners), np.int32)
        for rank in range(self.count):
            places[owners == rank] = rank * most + np.arange(counts[rank], dtype=np.int32)
        return places, most
