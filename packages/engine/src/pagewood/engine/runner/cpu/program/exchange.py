"""What a program needs to exchange values with the other ranks of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.runner.cpu.compiled import exchange
from pagewood.engine.runner.cpu.compiled.instruction import Instruction
from pagewood.engine.runner.cpu.program.tape import Buffer, Rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exchange:
    """The memory that the ranks of a model share while they compute; see `compiled.exchange`."""

    rank: int
    count: int
    """R, at least 2."""
    places: NDArray[np.float32]
    """[R, L, 2, PIECE]"""
    arrivals: NDArray[np.int64]
    """[R, L, LINE]"""
    ended: NDArray[np.int64]
    """[>= 1], the first other than 0 when the group has ended: nothing is waited for any more."""

    def sum_ranks(self, x: Buffer) -> Buffer:
        """Write the instruction that replaces `x` by its sum over the ranks, added in their order."""
        x.tape.write(
            exchange.sum_ranks, x.rows, x=x, size=x.size, rank=self.rank, count=self.count, places=self.places,
            arrivals=self.arrivals, ended=self.ended,
        )  # fmt: skip
        return x

    def gather_ranks(self, x: Buffer, size: int) -> Buffer:
        """Write the instruction that puts the columns of all ranks side by side; return the first `size` of them."""
        out = x.tape.buffer(x.rows, size)
        x.tape.write(
            exchange.gather_ranks, x.rows, x=x, out=out, size=x.size, out_size=size, rank=self.rank, count=self.count,
            places=self.places, arrivals=self.arrivals, ended=self.ended,
        )  # fmt: skip
        return out

    def gather_rows(self, x: Buffer, owners: Buffer) -> Buffer:
        """Write the instruction that puts the rows of all ranks together; return them.

        `owners` `[T, 2] int32` says whose each row is; see `compiled.exchange.gather_rows`.
        """
        out = x.tape.buffer(owners.rows, x.size)
        self._write_rows(exchange.gather_rows, x, owners, out)
        return out

    def sum_rows(self, x: Buffer, owners: Buffer, own: Rows) -> Buffer:
        """Write the instruction that adds the parts of all ranks; return the sums of the rows of this rank, `own`."""
        out = x.tape.buffer(own, x.size)
        self._write_rows(exchange.sum_rows, x, owners, out)
        return out

    def _write_rows(self, instruction: Instruction, x: Buffer, owners: Buffer, out: Buffer) -> None:
        x.tape.write(
            instruction, owners.rows, x=x, owners=owners, out=out, size=x.size, rank=self.rank, count=self.count,
            places=self.places, arrivals=self.arrivals, ended=self.ended,
        )  # fmt: skip


class StepWatch(Protocol):
    """Gets what a rank has computed, so that ranks can be compared."""

    @property
    def states(self) -> NDArray[np.int64]:
        """[1], to which the program adds the sum of the bits of the last hidden states, 0 before each step; [3] in a
        stage."""
        ...

    def note(self, result: StepResult | None, tables: tuple[Int32, ...]) -> None:
        """Note the end of a step, on the thread that computes.

        Args:
            result: of the step; None: it has failed.
            tables: lengths and pages of rows.
        """
        ...
