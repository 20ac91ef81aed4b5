"""How the rows of a step are divided among ranks by request, on the tape and in each step.

Legend: T tokens of all ranks, K kept tokens of all ranks.
"""

# pyright: basic
# numba's kernels have no types.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.runner.cpu.compiled import exchange, rows
from pagewood.engine.runner.cpu.compiled.layout import Column
from pagewood.engine.runner.cpu.program.attention import AnyCPUAttention
from pagewood.engine.runner.cpu.program.exchange import Exchange
from pagewood.engine.runner.cpu.program.passes import Pass, Rotations, RowTables
from pagewood.engine.runner.cpu.program.tape import Buffer, Operand, Rows, Tape

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
    num_states: int
    """Places of states of each rank, numbered as pages are; 0: no layer is recurrent."""
    pages: Int32
    """[rows, pages of a row], their ids."""  # contents written by: cpu.runner
    own_pages: Int32
    """[rows, pages of a row], the numbers of the pages in the memory of their rank."""
    # contents written by: note_pages

    @classmethod
    def over(cls, exchange: Exchange, tables: RowTables, *, num_pages: int, num_states: int = 0) -> RequestDivision:
        """Return the division of the rows of some tables."""
        return cls(
            exchange=exchange,
            num_pages=num_pages,
            num_states=num_states,
            pages=tables.pages,
            own_pages=np.zeros_like(tables.pages),
        )

    def note_pages(self, table_rows: Int32, columns: Int32, pages: Int32) -> None:
        """Note new pages of rows, `[n]` each."""
        self.own_pages[table_rows, columns] = pages % np.int32(self.num_pages)

    def owners(self, rows: Int32) -> Int32:
        """Return the rank of each of some rows, `[n]`; they have pages."""
        return self.pages[rows.astype(np.intp), 0] // np.int32(self.num_pages)

    def own(self, rows: Int32) -> NDArray[np.intp]:
        """Return which of some rows, `[n]`, belong to this rank, ascending."""
        return np.flatnonzero(self.owners(rows) == self.exchange.rank)

    def gather(self, values: Int32, rows: Int32) -> Int32:
        """Return `values` `[n]` of some rows, each as the rank knows it that has the row; all ranks call this."""
        one, gathered = self.exchange, values.copy()
        exchange.gather_values(
            gathered, self.owners(rows), one.rank, one.count, one.places.ctypes.data, one.arrivals.ctypes.data,
            one.ended.ctypes.data,
        )  # fmt: skip
        return gathered


def add_pass(
    tape: Tape,
    tables: RowTables,
    attention: AnyCPUAttention,
    rotations: Rotations,
    division: RequestDivision | None,
    *,
    vocab_size: int,
    has_states: bool = False,
) -> tuple[Pass, Pass, DividedPass | None]:
    """Add a pass to a tape; return that of all rows, that of this rank's rows, and their division.

    Without a division, both passes are the same. For the arguments see `Pass`.
    """
    whole = Pass(tape, tables, attention, rotations, vocab_size=vocab_size, has_states=has_states)
    if division is None:
        return whole, whole, None
    own = replace(tables, pages=division.own_pages)
    part = Pass(tape, own, attention, rotations, vocab_size=vocab_size, has_states=has_states)
    tokens, kept = (
        _Kind(whole=all_rows, part=some, owners=tape.buffer(all_rows, 2), places=tape.buffer(some, 1))
        for all_rows, some in ((whole.scope.tokens, part.scope.tokens), (whole.scope.kept, part.scope.kept))
    )
    columns: Mapping[Column, Operand] = {
        Column.OWNERS: tokens.owners,
        Column.KEPT_OWNERS: kept.owners,
        Column.PLACES: tokens.places,
        Column.KEPT_PLACES: kept.places,
    }
    tape.fill(part.scope, columns)
    divided = DividedPass(division=division, whole=whole, part=part, kinds=(tokens, kept))
    divided_on(tape).append(divided)
    return whole, part, divided


def divided_on(tape: Tape) -> list[DividedPass]:
    """Return the divided passes of a tape, in the order in which they were added."""
    return tape.shared(RequestDivision, list[DividedPass])


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
    whole: Pass
    """With the rows of all ranks."""
    part: Pass
    """With those of this rank."""
    kinds: Sequence[_Kind]
    """Tokens and kept tokens."""

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

    def keep_others(self, tape: Tape) -> None:
        """Write the instruction that divides kept tokens again, after others of the same grants are kept."""
        one, scope = self.division.exchange, self.whole.scope
        tape.write(
            exchange.divide_kept, scope.kept, whole=scope, scope=self.part.scope, rank=one.rank, count=one.count
        )  # fmt: skip

    def lay_out(self, scopes: Int64, counts: Int64) -> None:
        """Fill the scope of this rank's rows from that of the whole pass, which is laid out.

        Args:
            scopes: of the run, written.
            counts: of the run, written.
        """
        one, num_states = self.division.exchange, self.division.num_states
        exchange.divide(
            scopes, counts, self.whole.scope.index, self.part.scope.index, self.division.num_pages, num_states,
            one.rank, one.count,
        )  # fmt: skip

    def _kind(self, x: Buffer) -> _Kind:
        """Return the kind of rows that a matrix has, of this rank or of all."""
        return next(one for one in self.kinds if x.rows in (one.whole, one.part))
