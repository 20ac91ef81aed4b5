"""A step that is written once and run many times: its instructions, and the memory of their intermediate results.

Legend: T tokens of a scope, W tokens whose logits are wanted, S sampled grants, K tokens whose last
hidden state is wanted, N instructions.
"""

# pyright: basic
# numba's kernels have no types.

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from ctypes import c_int32
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.runner.cpu.compiled.instruction import (
    COUNT,
    IN_SCOPE,
    OPERANDS,
    PLAIN,
    REAL,
    ROWS,
    Instruction,
    rows_of_part,
)
from pagewood.engine.runner.cpu.compiled.layout import NUM_KINDS, NUM_SCOPE_COLUMNS, Column
from pagewood.engine.runner.cpu.compiled.step import COUNTER_STRIDE, StepKernel

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]
Made = TypeVar("Made")

_LINE = 16  # elements of a cache line, on which every matrix starts


@dataclass(frozen=True, slots=True)
class Rows:
    """What a matrix has rows for. How many there are is known when a program is run."""

    index: int
    """In the counts of a run; below 0, from their end: an instruction writes this count."""
    scope: Scope
    """Whose tokens, wanted tokens or sampled grants they are."""


@dataclass(frozen=True, slots=True)
class Scope:
    """A group of tokens that go through a model together, with their own numbers of rows, positions and pages."""

    index: int

    @property
    def tokens(self) -> Rows:
        """[T]."""
        return Rows(NUM_KINDS * self.index, self)

    @property
    def wanted(self) -> Rows:
        """[W], tokens whose logits are wanted."""
        return Rows(NUM_KINDS * self.index + 1, self)

    @property
    def sampled(self) -> Rows:
        """[S], grants that yield tokens."""
        return Rows(NUM_KINDS * self.index + 2, self)

    @property
    def kept(self) -> Rows:
        """[K], tokens whose last hidden state is wanted: the wanted ones, and behind them those that are pooled."""
        return Rows(NUM_KINDS * self.index + 3, self)


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """A matrix of four-byte elements on a tape; it has memory from its first use to its last."""

    tape: Tape
    rows: Rows
    size: int
    """Elements of a row."""
    whole: Buffer | None = None
    """The matrix whose first rows it is; None: it has memory of its own."""

    def first(self, rows: Rows) -> Buffer:
        """Return the first rows of this matrix, without a copy; there are never more `rows` than it has."""
        return Buffer(self.tape, rows, self.size, self)


Operand = Buffer | NDArray[np.generic] | Scope | Rows | float | None
"""None: it is not there, which a kernel sees as 0."""
_TYPES: dict[str, tuple[type, ...]] = {
    PLAIN: (Buffer, np.ndarray, int, type(None)), REAL: (float, int), IN_SCOPE: (Scope,), COUNT: (Rows,),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    instruction: Instruction
    rows: Rows
    operands: Sequence[Operand]


class Tape:
    """A list of instructions, in the order in which they run."""

    __slots__ = ("_counted", "_lines", "_scopes", "_shared")

    def __init__(self) -> None:
        self._lines: list[_Line] = []  # written by: write
        self._scopes: list[dict[Column, Operand]] = []  # written by: scope, fill
        self._counted: list[tuple[Rows, int]] = []  # written by: counted
        self._shared: dict[Hashable, Any] = {}  # written by: shared

    def scope(self) -> Scope:
        """Return a new scope; `fill` gives it tables."""
        self._scopes.append({})
        return Scope(len(self._scopes) - 1)

    def fill(self, scope: Scope, columns: Mapping[Column, Operand]) -> None:
        """Set what is in the scope's row of the table of scopes. Buffers keep their memory throughout the program."""
        self._scopes[scope.index].update(columns)

    @property
    def num_row_kinds(self) -> int:
        """How many counts a run has."""
        return NUM_KINDS * len(self._scopes)

    @property
    def num_lines(self) -> int:
        """How many instructions there are."""
        return len(self._lines)

    def buffer(self, rows: Rows, size: int) -> Buffer:
        """Return a new matrix of `size` columns."""
        return Buffer(self, rows, size)

    def counted(self, most: Rows, *, times: int = 1) -> Rows:
        """Return rows whose number an instruction writes, never more than `times` as many as `most`.

        They are an operand of that instruction, and may be the rows of those behind it.
        """
        self._counted.append((most, times))
        return Rows(-len(self._counted), most.scope)

    def shared(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return what `make` has made for this key, which later instructions share; the first call makes it."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def write(self, instruction: Instruction, rows: Rows, /, **operands: Operand) -> None:
        """Add an instruction for some rows; its kernel says what the operands are. The program keeps arrays alive.

        Raises:
            ValueError: an operand is missing, unknown, or of another type.
        """
        kinds = instruction.operands
        if operands.keys() != kinds.keys():
            missing, unknown = kinds.keys() - operands.keys(), operands.keys() - kinds.keys()
            raise ValueError(
                f"{instruction.name} must have the operands {', '.join(kinds)}; "
                f"missing: {', '.join(sorted(missing)) or 'none'}; unknown: {', '.join(sorted(unknown)) or 'none'}"
            )
        values: list[Operand] = []
        for name, kind in kinds.items():
            operand = operands[name]
            if not isinstance(operand, _TYPES[kind]):
                types = " or ".join(one.__name__ for one in _TYPES[kind])
                raise ValueError(f"{name} of {instruction.name} must be {types}, got {operand!r}")
            values.append(float(operand) if kind == REAL and isinstance(operand, int) else operand)
        self._lines.append(_Line(instruction=instruction, rows=rows, operands=values))

    def program(
        self, kernel: StepKernel, capacity: Sequence[int], *, inputs: Sequence[Buffer], outputs: Sequence[Buffer]
    ) -> Program:
        """Return a program, in which every matrix has memory.

        Args:
            kernel: runs the instructions.
            capacity: the largest number of rows, by `Rows.index`; those of `counted` follow from it.
            inputs: the caller fills them before every run.
            outputs: the caller reads them after every run.
        """
        capacity = [*capacity, *(times * capacity[most.index] for most, times in reversed(self._counted))]
        spans = self._spans(inputs, outputs)
        sizes = {buffer: -(-capacity[buffer.rows.index] * buffer.size // _LINE) * _LINE for buffer in spans}
        places, total = _place(spans, sizes)
        memory = np.empty(total + _LINE, np.float32)
        memory = memory[-memory.ctypes.data // 4 % _LINE :]

        def value(operand: Operand) -> int:
            match operand:
                case Buffer():
                    return memory.ctypes.data + 4 * places[operand.whole or operand]
                case np.ndarray():
                    return operand.ctypes.data
                case Scope():
                    return operand.index
                case Rows():
                    return operand.index % len(capacity)
                case float():
                    return int(np.float64(operand).view(np.int64))
                case _:
                    return operand or 0

        width = OPERANDS + max((len(line.operands) for line in self._lines), default=0)
        instructions = np.zeros((len(self._lines), width), np.int64)
        for row, line in zip(instructions, self._lines, strict=True):
            sizes_of_rows = [operand.size for operand in line.operands if isinstance(operand, Buffer)]
            row[:OPERANDS] = [
                *kernel.place(line.instruction), value(line.rows), rows_of_part(max(sizes_of_rows, default=1)),
                line.instruction.is_ahead, line.instruction.rule,
            ]  # fmt: skip
            row[OPERANDS : OPERANDS + len(line.operands)] = list(map(value, line.operands))
        scopes = np.zeros((len(self._scopes), NUM_SCOPE_COLUMNS), np.int64)
        for index, columns in enumerate(self._scopes):
            most = capacity[NUM_KINDS * index :]
            scopes[index, [Column.MOST_TOKENS, Column.MOST_WANTED, Column.MOST_KEPT]] = most[0], most[1], most[3]
            for column, operand in columns.items():
                scopes[index, column] = value(operand)
        return Program(
            kernel=kernel,
            capacity=tuple(capacity),
            instructions=instructions,
            scopes=scopes,
            names=[line.instruction.name for line in self._lines],
            inputs=tuple(_view(memory, places[buffer], capacity, buffer) for buffer in inputs),
            outputs=tuple(_view(memory, places[buffer], capacity, buffer) for buffer in outputs),
            kept=[
                x
                for operands in (*(line.operands for line in self._lines), *(one.values() for one in self._scopes))
                for x in operands
                if isinstance(x, np.ndarray)
            ],
            memory=memory,
        )

    def _spans(self, inputs: Sequence[Buffer], outputs: Sequence[Buffer]) -> dict[Buffer, tuple[int, int]]:
        """Return the first and the last line that use each matrix."""
        spans: dict[Buffer, tuple[int, int]] = dict.fromkeys(inputs, (0, 0))
        for index, line in enumerate(self._lines):
            for operand in line.operands:
                if isinstance(operand, Buffer):
                    buffer = operand.whole or operand
                    spans[buffer] = (spans.get(buffer, (index, index))[0], index)
        for buffer in outputs:
            spans[buffer] = (spans[buffer][0], len(self._lines))
        for columns in self._scopes:
            for operand in columns.values():
                if isinstance(operand, Buffer):
                    spans[operand] = (0, len(self._lines))
        return spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Instructions whose matrices have memory. Invariant: a run ends before the next one starts."""

    kernel: StepKernel
    capacity: tuple[int, ...]
    """The largest number of rows, by `Rows.index`."""
    instructions: Int64
    """[N, columns], see `compiled.instruction`."""
    names: Sequence[str]
    """[N], of the instructions."""
    scopes: Int64
    """[scopes, NUM_SCOPE_COLUMNS], what is the same in every run; a run completes a copy."""
    inputs: tuple[Float32, ...]
    """[capacity, size] of each, to be filled."""
    outputs: tuple[Float32, ...]
    """[capacity, size] of each."""
    kept: Sequence[NDArray[np.generic]]
    """Arrays that the instructions and the scopes refer to by address."""
    memory: Float32
    """All matrices."""

    def start(self, counts: Int64, scopes: Int64, *, first: int = 0, last: int | None = None) -> Run:
        """Return a run; nothing is computed before `Run.work`.

        A thread may join a run late, when the next one has begun. So both arrays belong to this run.

        Args:
            counts: as many as in `capacity`, numbers of rows, by `Rows.index`, each at most that.
            scopes: a completed copy of `scopes`.
            first: first instruction to run.
            last: first instruction behind it that does not run; None: all run.
        """
        instructions = self.instructions[first:last]
        # numpy.zeros would give the interpreter's lock away, and this thread could get it back when a plan is made.
        counters = np.frombuffer(bytearray(8 * COUNTER_STRIDE * len(instructions)), np.int64)
        return Run(self.kernel, (instructions, counts, counters, scopes))

    def described(self, place: int, counts: Int64) -> tuple[str, dict[str, int]]:
        """Return the name of an instruction and facts about it, for profiles."""
        return self.names[place], {"instruction": place, "rows": int(counts[self.instructions[place, ROWS]])}


class MeasuredRun:
    """The same run as of a program, instruction by instruction, so that each can be timed.

    Threads that join it wait behind every instruction. So it takes longer, and its results are the same.
    """

    __slots__ = ("_note", "_runs")

    def __init__(self, runs: Sequence[Run], note: Callable[[list[float]], None]) -> None:
        """Prepare runs of one instruction each, in their order; `measure` calls `note` with their times."""
        self._runs = runs
        self._note = note

    def help(self, *, follows: bool = False) -> None:
        """Compute until the run is complete, as `Run.help` does."""
        for run in self._runs:
            run.help(follows=follows and run is self._runs[-1])

    def measure(self) -> None:
        """Compute until the run is complete; note its beginning and the end of every instruction, monotonic seconds."""
        times = [monotonic()]
        for run in self._runs:
            run.work()
            times.append(monotonic())
        self._note(times)


class Run:
    """One run of a program, which any number of threads may join at any time.

    When it is complete, all of them want the interpreter's lock; those that do not get it sleep, and wake late. So a
    thread whose work is less urgent waits outside the lock until the thread that makes the runs has begun the next one.
    """

    __slots__ = ("_arguments", "_kernel", "_place")

    def __init__(self, kernel: StepKernel, arguments: tuple[object, ...]) -> None:
        """Prepare a run of `kernel`; its arguments include the counters with which threads share the work."""
        self._kernel = kernel
        self._arguments = arguments
        self._place = 1 + kernel.num_begun
        """How many runs have begun when this one has."""

    def work(self) -> None:
        """Compute until the run is complete; only on the thread that makes the runs of this kernel."""
        self._kernel.run(*self._arguments)

    def help(self, *, follows: bool = False) -> None:
        """Compute until the run is complete. Safe to call from any thread and at any time, even after the end.

        Args:
            follows: whether to wait then, for some tenths of a millisecond at most, until the next run has begun.
        """
        self._kernel.help(*self._arguments, num_begun=self._place + 1 if follows else 0)


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
    rows = capacity[buffer.rows.index]
    return memory[place : place + rows * buffer.size].reshape(rows, buffer.size)


def floats_at(address: int | np.int64, size: int) -> Float32:
    """Return a view of `size` float32 in memory of the program."""
    return integers_at(address, size).view(np.float32)


def integers_at(address: int | np.int64, size: int) -> Int32:
    """Return a view of `size` int32 in memory of the program."""
    return np.ctypeslib.as_array((c_int32 * size).from_address(int(address)))
