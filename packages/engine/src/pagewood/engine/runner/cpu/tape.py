"""A step that is written once and run many times: its instructions, and the memory of their intermediate results.

Legend: T tokens of a step, W tokens whose logits are wanted, N instructions.
"""

# pyright: basic
# numba's kernels have no types.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.arrays import Int32
from pagewood.engine.runner.cpu.compiled.kernel import Kernel
from pagewood.engine.runner.cpu.compiled.step import COUNTER_STRIDE, NUM_COLUMNS, Operation

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]

_LINE = 16  # elements of a cache line, on which every matrix starts


class Rows(IntEnum):
    """Which of a step's two sizes is a matrix's number of rows; the sizes are known when a step is run."""

    TOKENS = 0
    WANTED = 1


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """A matrix of four-byte elements on a tape; it has memory from its first use to its last."""

    tape: Tape
    rows: Rows
    size: int
    """Elements of a row."""


Operand = Buffer | NDArray[np.generic] | int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    operation: Operation
    rows: Rows
    operands: Sequence[Operand]
    number: float


class Tape:
    """A list of instructions, in the order in which they run."""

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines: list[_Line] = []  # written by: emit

    def buffer(self, rows: Rows, size: int) -> Buffer:
        """Return a new matrix of `size` columns."""
        return Buffer(self, rows, size)

    def emit(self, operation: Operation, rows: Rows, *operands: Operand, number: float = 0.0) -> None:
        """Add an instruction; see `Operation` for its operands. The program keeps arrays alive."""
        self._lines.append(_Line(operation=operation, rows=rows, operands=operands, number=number))

    def program(
        self, kernel: Kernel, capacity: Sequence[int], *, inputs: Sequence[Buffer], outputs: Sequence[Buffer]
    ) -> Program:
        """Return a program, in which every matrix has memory.

        Args:
            kernel: runs the instructions.
            capacity: the largest number of rows, by `Rows`.
            inputs: the caller fills them before every run.
            outputs: the caller reads them after every run.
        """
        spans = self._spans(inputs, outputs)
        sizes = {buffer: -(-capacity[buffer.rows] * buffer.size // _LINE) * _LINE for buffer in spans}
        places, total = _place(spans, sizes)
        memory = np.empty(total + _LINE, np.float32)
        memory = memory[-memory.ctypes.data // 4 % _LINE :]

        def value(operand: Operand) -> int:
            if isinstance(operand, Buffer):
                return memory.ctypes.data + 4 * places[operand]
            return operand if isinstance(operand, int) else operand.ctypes.data

        instructions = np.zeros((len(self._lines), NUM_COLUMNS), np.int64)
        for row, line in zip(instructions, self._lines, strict=True):
            row[: 2 + len(line.operands)] = [line.operation, line.rows, *map(value, line.operands)]
        return Program(
            kernel=kernel,
            capacity=tuple(capacity),
            instructions=instructions,
            numbers=np.array([line.number for line in self._lines]),
            inputs=tuple(_view(memory, places[buffer], capacity, buffer) for buffer in inputs),
            outputs=tuple(_view(memory, places[buffer], capacity, buffer) for buffer in outputs),
            kept=[x for line in self._lines for x in line.operands if isinstance(x, np.ndarray)],
        )

    def _spans(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> dict[Buffer, tuple[int, int]]:
        """Return the first and the last line that use each matrix."""
        spans: dict[Buffer, tuple[int, int]] = dict.fromkeys(inputs, (0, 0))
        for index, line in enumerate(self._lines):
            for operand in line.operands:
                if isinstance(operand, Buffer):
                    spans[operand] = (spans.get(operand, (index, index))[0], index)
        for buffer in outputs:
            spans[buffer] = (spans[buffer][0], len(self._lines))
        return spans


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTables:
    """The positions and pages of a step's tokens, for the instructions that use them."""

    page_table: Int32
    """[rows, pages of a row]"""
    rows: Int32
    """[G] row of each grant in the page table."""
    starts: Int32
    """[G] first position of each grant."""
    offsets: Int32
    """[G + 1] first token of each grant in the step."""
    items: Int32
    """[items, 4], see `compiled.attention.cut`."""
    memory_size: int
    """Elements of a layer's KV memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Instructions whose matrices have memory. Invariant: a run ends before the next one starts."""

    kernel: Kernel
    capacity: tuple[int, ...]
    """The largest number of rows, by `Rows`."""
    instructions: Int64
    """[N, NUM_COLUMNS]"""
    numbers: NDArray[np.float64]
    """[N], the floating point operand of each."""
    inputs: tuple[Float32, ...]
    """[capacity, size] of each, to be filled."""
    outputs: tuple[Float32, ...]
    """[capacity, size] of each."""
    kept: Sequence[NDArray[np.generic]]
    """Arrays that the instructions refer to by address."""

    def start(self, counts: Sequence[int], tables: StepTables) -> Run:
        """Return a run; nothing is computed before `Run.work`.

        Args:
            counts: numbers of rows, by `Rows`, each at most `capacity`.
            tables: the positions and pages of the tokens.
        """
        return Run(
            kernel=self.kernel,
            arguments=(
                self.instructions, self.numbers, np.array(counts, np.int64),
                np.zeros(len(self.instructions) * COUNTER_STRIDE, np.int64),
                tables.page_table, tables.rows, tables.starts, tables.offsets, tables.items, tables.memory_size,
            ),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a program, which any number of threads may join at any time."""

    kernel: Kernel
    arguments: tuple[object, ...]
    """Arguments of the kernel, including the counters with which threads share the work."""

    def work(self) -> None:
        """Compute until the run is complete. Safe to call from any thread and at any time, even after the end."""
        self.kernel(*self.arguments)


def _place(spans: dict[Buffer, tuple[int, int]], sizes: dict[Buffer, int]) -> tuple[dict[Buffer, int], int]:
    """Return a place for each matrix, so that matrices in use at the same time do not overlap, and the end of all."""
    places: dict[Buffer, int] = {}
    for buffer, (born, dead) in sorted(spans.items(), key=lambda item: item[1][0]):
        others = sorted(
            (places[other], places[other] + sizes[other])
            for other in places
            if spans[other][1] >= born and spans[other][0] <= dead
        )
        place = 0
        for first, last in others:
            if place + sizes[buffer] <= first:
                break
            place = max(place, last)
        places[buffer] = place
    return places, max(places[buffer] + sizes[buffer] for buffer in places)


def _view(memory: Float32, place: int, capacity: Sequence[int], buffer: Buffer) -> Float32:
    rows = capacity[buffer.rows]
    return memory[place : place + rows * buffer.size].reshape(rows, buffer.size)
