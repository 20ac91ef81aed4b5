"""Which slots of a drafter's KV memory are valid for a row."""

# pyright: basic
# torch and numba are typed in part only.

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.arrays import Int32
from pagewood.engine.runner.cpu.compiled.drafting import follow
from pagewood.engine.runner.cpu.compiled.step import Operation
from pagewood.engine.runner.cpu.passes import Pass, RowTables
from pagewood.kvpool import MultiHeadLayout, PageArray, StateLayout
from pagewood.kvpool.memory import PageMemory

_TAG_BYTES = 8


def tag_layout(page_size: int) -> StateLayout:
    """Return the layout of the tags of a page."""
    return StateLayout(num_layers=1, arrays=(PageArray(name="tags", dtype="int8", shape=(page_size, _TAG_BYTES)),))


def drafter_layouts(layout: MultiHeadLayout) -> tuple[MultiHeadLayout, StateLayout]:
    """Return the layouts of a drafter's part of a page: its keys and values, and their tags."""
    return layout, tag_layout(layout.page_size)


class ValidSlots:
    """The positions up to which the slots of each row have been followed, and the row's hash there.

    Invariant: the slots before a row's position were valid for it when they were followed, except, if gaps are passed,
    some before `begins`. Pages of a running row keep what they hold, so they still are.
    """

    __slots__ = ("_chains", "_page_size", "_root", "_rows", "_tags", "_work", "begins", "positions")

    def __init__(self, memory: PageMemory, rows: RowTables, *, root: int) -> None:
        """Follow the tags in `memory`, which has the layout `tag_layout`.

        Args:
            memory: of the tags.
            rows: of the runner.
            root: the hash of no tokens, 64 signed bits; it stands for the drafter's weights.
        """
        array = memory.array(0, "tags")
        num_rows = len(rows.lengths)
        self._page_size = array.shape[1]
        self._tags: NDArray[np.int64] = array.numpy().reshape(-1).view(np.int64)  # contents written by: the program
        self._rows = rows
        self._root = root
        self._chains: NDArray[np.int64] = np.full(num_rows, root, np.int64)  # contents written by: begin, follow
        self._work: NDArray[np.int64] = np.zeros(num_rows, np.int64)  # contents written by: start, the program
        self.positions: Int32 = np.zeros(num_rows, np.int32)  # contents written by: begin, follow
        self.begins: Int32 = np.zeros(num_rows, np.int32)  # contents written by: begin, follow
        """First position of each row behind the last slot that is not valid, if gaps are passed."""

    def begin(self, rows: Int32) -> None:
        """Note that `rows` have new requests."""
        self._chains[rows] = self._root
        self.positions[rows] = self.begins[rows] = 0

    def follow(self, rows: Int32, ends: Int32, *, passes_gaps: bool) -> None:
        """Follow `rows` from their positions to the first slot that is not valid, or past all of them, to `ends`."""
        follow(
            rows, ends, self._rows.tokens, self._rows.pages, self._tags, self._page_size, self.positions, self._chains,
            self.begins, int(passes_gaps),
        )  # fmt: skip

    def start(self, rows: Int32) -> None:
        """Let the program tag slots of `rows` from their positions on."""
        self._work[rows] = self._chains[rows]

    def record(self, one: Pass) -> None:
        """Write the instruction that tags the slots which a pass computes."""
        scope = one.scope
        one.tokens.tape.emit(Operation.TAG, scope.sampled, scope.index, self._tags, self._page_size, self._work)
