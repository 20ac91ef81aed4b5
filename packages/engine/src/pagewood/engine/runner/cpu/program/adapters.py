"""Adapters of projections as instructions on a tape, and what the slots of a runner hold.

Legend: T tokens, K inputs, N outputs, S slots, P projections of a model that adapters may change.
"""

# pyright: basic
# numba's kernels have no types.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.adapters.low_rank import AdapterWeights, Change
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.models.ops import Linear, Projection
from pagewood.engine.runner.cpu.compiled import adapters
from pagewood.engine.runner.cpu.compiled.adapters import (
    MOST_COMPONENTS,
    NUM_COMPONENT_COLUMNS,
    NUM_RUN_COLUMNS,
    NUM_SITE_COLUMNS,
    ComponentColumn,
    SiteColumn,
)
from pagewood.engine.runner.cpu.compiled.products.tile import NARROW, WIDTH
from pagewood.engine.runner.cpu.program.experts import Grouping
from pagewood.engine.runner.cpu.program.tape import Buffer, Rows

Float32 = NDArray[np.float32]
Numbers = NDArray[np.float32 | np.uint16]
"""float32, or bfloat16 as uint16."""
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grouping:
    """The rows of a pass, by slot."""

    slots: Buffer
    """`[T] int32`, see `group_tokens`; this and the next two."""
    order: Buffer
    runs: Buffer
    num_runs: Rows


@dataclass(slots=True, kw_only=True, weakref_slot=True)
class PackedAdapter:
    """An adapter in the layout of the products. Invariant: `rows` refers to nothing but `kept`."""

    rows: Int64
    """[P, NUM_SITE_COLUMNS], what a slot with it says of each projection."""
    kept: Sequence[Numbers]
    """The arrays that `rows` has the addresses of."""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self.rows.nbytes + sum(one.nbytes for one in self.kept)


class CPUAdapters:
    """The adapters of a runner. Invariant: a slot's arrays live as long as its row of the table names them.

    An adapter stays where it lies in memory; a slot has the addresses of its arrays. So a slot gets another adapter in
    some microseconds, on the worker, between two steps: no step that was launched before sees it.

    Args:
        num_slots: S.
        max_rank: of an adapter in a module.
        num_rows: rows of the runner.
    """

    __slots__ = (
        "_known",
        "_max_rank",
        "_num_added",
        "_numbers",
        "_projections",
        "_resident",
        "_row_slots",
        "_row_starts",
        "_table",
        "num_slots",
    )

    def __init__(self, *, num_slots: int, max_rank: int, num_rows: int) -> None:
        self.num_slots = num_slots
        """S."""
        self._max_rank = max_rank
        self._projections: list[Projection] = []  # contents written by: _added
        self._num_added = 0
        """Projections of the model that was loaded last."""  # written by: begin, _added
        self._row_slots: Int32 = np.full(num_rows, -1, np.int32)  # contents written by: admit
        self._row_starts: Int32 = np.zeros(num_rows, np.int32)  # contents written by: admit
        self._table: Int64 | None = None  # written by: table; contents written by: admit
        self._known: WeakValueDictionary[int, PackedAdapter] = WeakValueDictionary()
        """By number; each lives as long as the engine refers to it."""  # contents written by: keep
        self._resident: list[PackedAdapter | None] = [None] * num_slots  # contents written by: admit
        self._numbers: Int32 = np.full(num_slots, -1, np.int32)
        """Number of the adapter in each slot."""  # contents written by: admit

    @property
    def projections(self) -> Sequence[Projection]:
        """The projections of the model that adapters may change."""
        return self._projections

    @property
    def max_rank(self) -> int:
        """The largest rank of an adapter in a module."""
        return self._max_rank

    @property
    def table(self) -> Int64:
        """[S, P, NUM_SITE_COLUMNS], what each slot says of each projection; no further ones are added after that."""
        if self._table is None:
            self._table = np.zeros((self.num_slots, len(self._projections), NUM_SITE_COLUMNS), np.int64)
        return self._table

    def begin(self) -> None:
        """Let the projections of a model follow that is loaded again, because it could not be, or has other weights."""
        self._num_added = 0

    def add(self, linear: Linear[Buffer], projection: Projection) -> Linear[Buffer]:
        """Return a projection to which adapters add.

        Raises:
            ValueError: it consists of more modules than the instructions know.
        """
        return AdaptedLinear(linear, self._added([projection]))

    def add_experts(self, gate_up: Sequence[Projection], down: Sequence[Projection]) -> AdaptedExperts:
        """Return what adds to the projections of some experts; see `add` for errors."""
        return AdaptedExperts(self, self._added(gate_up), self._added(down))

    def _added(self, projections: Sequence[Projection]) -> _Site:
        """Add projections that are alike."""
        num_parts = len(projections[0].parts)
        if num_parts > MOST_COMPONENTS:
            raise ValueError(
                f"adapters need projections of at most {MOST_COMPONENTS} modules, got {num_parts} in "
                f"{projections[0].parts[0][0]}"
            )
        number = self._num_added
        self._num_added += len(projections)
        if self._table is None:
            self._projections[number:] = projections
        return _Site(self, number, projections[0], -(-num_parts * self._max_rank // WIDTH) * WIDTH)

    def pack(self, weights: AdapterWeights) -> PackedAdapter:
        """Lay an adapter out."""
        rows = np.zeros((len(self._projections), NUM_SITE_COLUMNS), np.int64)
        kept: list[Numbers] = []

        def place(array: Numbers) -> int:
            kept.append(np.ascontiguousarray(array))
            return kept[-1].ctypes.data

        for row, projection in zip(rows, self._projections, strict=True):
            changes = [weights.changes.get(name) for name, _ in projection.parts]
            if not any(changes):
                continue
            firsts, stacked = _stacked([None if one is None else one.a for one in changes])
            row[SiteColumn.SIZE] = len(stacked)
            if projection.part is not None:
                stacked = stacked[:, projection.part.start : projection.part.stop]
            if len(stacked) and projection.takes_tokens:
                row[SiteColumn.SHRINK] = place(stacked.T)
            elif len(stacked):
                panels = _panels(stacked, NARROW)
                row[SiteColumn.SHRINK], row[SiteColumn.IS_HALF] = place(panels), panels.dtype == np.uint16
            parts = zip(changes, firsts, projection.rows_here(), strict=True)
            for number, (change, first, own) in enumerate(parts):
                if change is not None:
                    columns = row[SiteColumn.COMPONENTS + number * NUM_COMPONENT_COLUMNS :]
                    for column, array in _arrays(change, own, adds_bias=projection.adds_bias).items():
                        columns[column] = place(array)
                        columns[ComponentColumn.IS_HALF] |= array.dtype == np.uint16
                    columns[ComponentColumn.FIRST] = first
                    columns[ComponentColumn.RANK] = 0 if change.a is None else len(change.a)
        return PackedAdapter(rows=rows, kept=kept)

    def keep(self, number: int, packed: PackedAdapter) -> None:
        """Make an adapter known by its number, as long as it is referred to."""
        self._known[number] = packed

    def admit(self, batch: Batch) -> None:
        """Note the slot of each admitted request, and load those that get another adapter; on the worker."""
        if not len(batch.adapters):
            return
        rows = batch.admitted_rows()
        self._row_slots[rows], self._row_starts[rows] = batch.adapters[:, 0], batch.adapters[:, 2]
        for slot, number, _ in batch.adapters.tolist():
            if slot < 0:
                continue
            packed = self._known[number]
            if self._resident[slot] is not packed:
                self.table[slot] = packed.rows
                self._resident[slot], self._numbers[slot] = packed, number

    def witness(self) -> Int32:
        """Return sums over the slots of rows and the adapters in slots, which are the same on all ranks of a model."""
        places = np.arange(1, 1 + max(len(self._row_slots), self.num_slots), dtype=np.int32)  # products wrap around
        tables = (self._row_slots, self._row_starts, self._numbers)
        return np.array([one @ places[: len(one)] for one in tables], np.int32)

    def grouping(self, x: Buffer) -> _Grouping:
        """Return the groups of the rows of `x`; the first call for these rows writes the instruction."""
        return x.tape.shared(("adapters", x.rows), lambda: self._group(x))

    def _group(self, x: Buffer) -> _Grouping:
        tape, rows, scope = x.tape, x.rows, x.rows.scope
        own = _Grouping(
            slots=tape.buffer(rows, 1),
            order=tape.buffer(rows, 1),
            runs=tape.buffer(rows, NUM_RUN_COLUMNS),
            num_runs=tape.counted(rows),
        )
        if rows == scope.tokens:
            tape.write(
                adapters.group_tokens, rows, scope=scope, row_slots=self._row_slots, row_starts=self._row_starts,
                slots=own.slots, order=own.order, runs=own.runs, num_slots=self.num_slots,
                num_sites=self.table.shape[1], num_runs=own.num_runs,
            )  # fmt: skip
            return own
        of_tokens = self.grouping(Buffer(tape, scope.tokens, 1))
        tape.write(
            adapters.group_kept, rows, scope=scope, slots=of_tokens.slots, kept_slots=own.slots, order=own.order,
            runs=own.runs, num_slots=self.num_slots, num_sites=self.table.shape[1], num_runs=own.num_runs,
        )  # fmt: skip
        return own


class _Site:
    """A projection, or the same one of several experts, whose numbers follow each other."""

    __slots__ = ("_adapters", "_inputs", "_most", "_sizes", "_takes_tokens", "number")

    def __init__(self, adapters: CPUAdapters, number: int, projection: Projection, most: int) -> None:
        """Take the first number, and what they are; an adapter has at most `most` columns of A for each."""
        self._adapters = adapters
        self.number = number
        self._inputs = projection.inputs if projection.part is None else len(projection.part)
        self._takes_tokens = projection.takes_tokens
        self._sizes: Int64 = np.array(projection.sizes_here(), np.int64)
        self._most = most

    def grouping(self, x: Buffer) -> _Grouping:
        """Return the groups of the rows of `x`."""
        return self._adapters.grouping(x)

    def adapt(self, x: Buffer, out: Buffer, grouping: _Grouping) -> None:
        """Write the instructions that add to `out` `[T, N]`, the result for `x` `[T, at least K]`, or for tokens."""
        tape = x.tape
        shrunk = tape.buffer(x.rows, self._most)
        own = {
            "table": self._adapters.table, "site": self.number, "order": grouping.order, "runs": grouping.runs,
            "most": self._most,
        }  # fmt: skip
        if self._takes_tokens:
            tape.write(adapters.pick, grouping.num_runs, **own, tokens=x, out=shrunk)
        else:
            tape.write(adapters.shrink, grouping.num_runs, **own, x=x, out=shrunk, x_size=x.size, size=self._inputs)
        tape.write(
            adapters.expand, grouping.num_runs, **own, x=shrunk, out=out, sizes=self._sizes,
            num_panels=int((-(-self._sizes // WIDTH)).sum()), size=out.size,
        )  # fmt: skip


class AdaptedLinear:
    """A projection to which adapters add. Invariant: rows without an adapter have the bits of the projection itself."""

    __slots__ = ("_linear", "_site")

    def __init__(self, linear: Linear[Buffer], site: _Site) -> None:
        self._linear = linear
        self._site = site

    def __call__(self, x: Buffer) -> Buffer:
        """Return `[T, N]` of `[T, K]`."""
        grouping = self._site.grouping(x)
        out = self._linear(x)
        self._site.adapt(x, out, grouping)
        return out


class AdaptedExperts:
    """What adapters add to the projections of experts. Invariant: the same as that of `AdaptedLinear`."""

    __slots__ = ("_adapters", "down", "gate_up")

    def __init__(self, adapters: CPUAdapters, gate_up: _Site, down: _Site) -> None:
        self._adapters = adapters
        self.gate_up = gate_up
        """What adapters add to the first product."""
        self.down = down
        """What adapters add to the second product."""

    def group(self, x: Buffer, experts: Grouping) -> _Grouping:
        """Write the instruction that groups the slots of `experts`, which are those of the rows of `x`."""
        tape, num_chosen, table = x.tape, experts.slots.size, self._adapters.table
        own = _Grouping(
            slots=tape.buffer(experts.num_slots, 1),
            order=tape.buffer(experts.num_slots, 1),
            runs=tape.buffer(x.rows, num_chosen * NUM_RUN_COLUMNS),
            num_runs=tape.counted(x.rows, times=num_chosen),
        )
        tape.write(
            adapters.group_experts, experts.num_runs, table=table, gate_up=self.gate_up.number,
            down=self.down.number, token_slots=self._adapters.grouping(x).slots, places=experts.places,
            expert_runs=experts.runs, slots=own.slots, order=own.order, runs=own.runs,
            num_slots=self._adapters.num_slots, num_sites=table.shape[1], num_chosen=num_chosen, num_runs=own.num_runs,
        )  # fmt: skip
        return own


def _stacked(matrices: Sequence[Float32 | None]) -> tuple[list[int], Float32]:
    """Return the first row of each matrix `[r, K]` where they lie below each other, and all, filled up to a multiple of
    16 rows.

    Modules that share one matrix, because they are stored as one, share its rows.
    """
    firsts, parts, places, total = [], [], dict[int, int](), 0
    for one in matrices:
        if one is None:
            firsts.append(0)
            continue
        if id(one) not in places:
            places[id(one)] = total
            parts.append(one)
            total += len(one)
        firsts.append(places[id(one)])
    if not parts:
        return firsts, np.empty((0, 0), np.float32)
    fill = np.zeros((-total % NARROW, parts[0].shape[1]), np.float32)
    return firsts, np.concatenate([*parts, fill])


def _panels(matrix: Float32, multiple: int) -> Numbers:
    """Return the panels `[K, 32]` of a matrix `[N, K]`, one after the other, as bfloat16 if that changes no number.

    Zeros fill its outputs up to a `multiple` of 16 or 32; the last panel may then be `[K, 16]`.
    """
    size, depth = matrix.shape
    padded = np.zeros((-(-size // multiple) * multiple, depth), np.float32)
    padded[:size] = matrix
    words = np.concatenate([padded[at : at + WIDTH].T.ravel() for at in range(0, len(padded), WIDTH)]).view(np.uint32)
    return words.view(np.float32) if (words & 0xFFFF).any() else (words >> 16).astype(np.uint16)


def _arrays(change: Change, order: NDArray[np.int64] | None, *, adds_bias: bool) -> Mapping[ComponentColumn, Numbers]:
    """Return the arrays of a component, its outputs in the order of the projection; of a part of a sum, parts of one
    that adds up."""

    def arranged(array: Float32) -> Float32:
        return array if order is None else array[order]

    found: dict[ComponentColumn, Numbers] = {}
    if change.b is not None:
        found[ComponentColumn.EXPAND] = _panels(arranged(change.b), WIDTH)
    if change.factors is not None:
        found[ComponentColumn.FACTORS] = arranged(change.factors)
    if change.bias is not None and adds_bias:
        found[ComponentColumn.BIAS] = arranged(change.bias)
    return found
