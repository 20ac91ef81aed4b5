"""How the rows of a step are divided among ranks by request, on the tape and in each step.

Legend: T tokens of all ranks, K kept tokens of all ranks, G grants.
"""

# pyright: basic
# numba's kernels have no types.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.runner.cpu.compiled import exchange, rows
from pagewood.engine.runner.cpu.compiled.layout import Column, Outcome
from pagewood.engine.runner.cpu.program.attention import AnyCPUAttention
from pagewood.engine.runner.cpu.program.exchange import Exchange
from pagewood.engine.runner.cpu.program.passes import Grants, Pass, Rotations, RowTables
from pagewood.engine.runner.cpu.program.processing import integers_at
from pagewood.engine.runner.cpu.program.tape import Buffer, Rows, Tape

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestDivision:
    """Which rows of the tables belong to this rank, because it has their pages.

    Every rank has the page tables of all rows. The ids of the pages of rank r are those from r times `num_pages` on, so
    a row belongs to the rank of its first page, and no message says it a second time.
    """

    exchange: Exchange
    num_pages: int
    """Pages of each rank."""
    own_pages: Int32
    """[rows, pages of a row], the numbers of the pages in the memory of their rank."""
    # contents written by: note_pages

    @classmethod
    def over(cls, exchange: Exchange, tables: RowTables, *, num_pages: int) -> RequestDivision:
        """Return the division of the rows of some tables."""
        return cls(exchange=exchange, num_pages=num_pages, own_pages=np.zeros_like(tables.pages))

    def note_pages(self, table_rows: Int32, columns: Int32, pages: Int32) -> None:
        """Note new pages of rows, `[n]` each."""
        self.own_pages[table_rows, columns] = pages % np.int32(self.num_pages)

    def owners(self, tables: RowTables, grants: Grants) -> Int32:
        """Return the rank of each grant, `[G]`."""
        return tables.pages[grants.rows, 0] // np.int32(self.num_pages)

    def write(
        self,
        tape: Tape,
        whole: Pass,
        tables: RowTables,
        attention: AnyCPUAttention,
        rotations: Rotations,
        *,
        vocab_size: int,
    ) -> DividedPass:
        """Add the pass of the rank's own rows to a tape; see `Pass`. `whole` is that of all rows."""
        part = Pass(tape, replace(tables, pages=self.own_pages), attention, rotations, vocab_size=vocab_size)
        pairs = ((whole.scope.tokens, part.scope.tokens), (whole.scope.kept, part.scope.kept))
        kinds = [
            _Kind(whole=all_rows, part=own, owners=tape.buffer(all_rows, 2), places=tape.buffer(own, 1))
            for all_rows, own in pairs
        ]
        return DividedPass(division=self, tables=tables, whole=whole, part=part, kinds=kinds)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Kind:
    """A kind of rows that is divided."""

    whole: Rows
    """Rows of all ranks, T or K."""
    part: Rows
    """Rows of this rank."""
    owners: Buffer
    """[T, 2] int32, whose each is; see `compiled.exchange.gather_rows`."""
    places: Buffer
    """[rows of this rank, 1] int32, their places among all."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DividedPass:
    """A pass whose rows are divided among ranks; satisfies `models.ops.RowDivision`.

    Invariant: all ranks exchange the same rows, those of the whole pass, also one that has none of them.
    """

    division: RequestDivision
    tables: RowTables
    whole: Pass
    """With the rows of all ranks."""
    part: Pass
    """With those of this rank."""
    kinds: Sequence[_Kind]
    """Tokens and kept tokens."""

    @property
    def inputs(self) -> tuple[Buffer, ...]:
        """What `lay_out` fills."""
        return tuple(buffer for kind in self.kinds for buffer in (kind.owners, kind.places))

    @property
    def kept(self) -> DividedPass:
        """This: a matrix says whether its rows are tokens or kept ones."""
        return self

    def own(self, x: Buffer) -> Buffer:
        """Return the rows of this rank."""
        kind = self._kind(x)
        out = x.tape.buffer(kind.part, x.size)
        x.tape.write(rows.take, out.rows, x=x, places=kind.places, out=out, size=x.size)
        return out

    def gather(self, x: Buffer) -> Buffer:
        """Return the rows of all ranks."""
        return self.division.exchange.gather_rows(x, self._kind(x).owners)

    def sum_own(self, x: Buffer) -> Buffer:
        """Return the sums over ranks of the rows of this rank."""
        kind = self._kind(x)
        return self.division.exchange.sum_rows(x, kind.owners, kind.part)

    def lay_out(self, inputs: Sequence[Float32], scopes: Int64, counts: Int64, grants: Grants) -> Outcome:
        """Fill the inputs and the scope of this rank's rows, behind those of the whole pass.

        Args:
            inputs: views of `inputs` in the memory of a program.
            scopes: of the run, written.
            counts: of the run, written.
            grants: of all ranks.
        """
        division, num_own = self.division, np.zeros(2, np.int64)
        rank, owners = division.exchange.rank, division.owners(self.tables, grants)
        of_tokens, places, of_kept, kept_places = (one.view(np.int32) for one in inputs)
        whole, part = self.whole.scope, self.part.scope
        kept = integers_at(scopes[whole.index, Column.WANTED], int(counts[whole.kept.index]))
        own_kept = integers_at(scopes[part.index, Column.WANTED], len(kept))
        exchange.divide_rows(
            owners, grants.counts, kept, rank, division.exchange.count, of_tokens, of_kept, places.ravel(),
            kept_places.ravel(), own_kept, num_own,
        )  # fmt: skip
        are_own, nothing = owners == rank, np.empty(0, np.int32)
        own = Grants(
            rows=grants.rows[are_own],
            starts=grants.starts[are_own],
            counts=grants.counts[are_own],
            sampled=nothing,
            promised=nothing,
            sampling=grants.sampling.take(nothing),
        )
        outcome = self.part.lay_out(scopes, counts, own)
        counts[part.kept.index] = num_own[1]
        return outcome

    def _kind(self, x: Buffer) -> _Kind:
        """Return the kind of rows that a matrix has, of this rank or of all."""
        return next(one for one in self.kinds if x.rows in (one.whole, one.part))
