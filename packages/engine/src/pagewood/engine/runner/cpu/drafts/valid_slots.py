"""Which slots of a drafter's KV memory are valid for a row."""

# pyright: basic
# torch and numba are typed in part only.

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.runner.cpu.compiled.drafting.chains import follow_rows
from pagewood.engine.runner.cpu.compiled.drafting.passes import tag
from pagewood.engine.runner.cpu.program.division import RequestDivision
from pagewood.engine.runner.cpu.program.passes import Pass, RowTables
from pagewood.engine.runner.storage import AnyLayout
from pagewood.kvpool import PageArray, StateLayout
from pagewood.kvpool.memory import PageMemory

_TAG_BYTES = 8


def tag_layout(page_size: int) -> StateLayout:
    """Return the layout of the tags of a page."""
    return StateLayout(num_layers=1, arrays=(PageArray(name="tags", dtype="int8", shape=(page_size, _TAG_BYTES)),))


def drafter_layouts(layout: AnyLayout) -> tuple[StateLayout, AnyLayout]:
    """Return the layouts of a drafter's part of a page: the tags, and the keys and values that they stand for.

    A page can be copied to the host while a pass writes its last slots, because the target's part is complete earlier.
    Tags are written last and copied first, so that a copy never has the tag of a slot without its keys and values.
    """
    return tag_layout(layout.page_size), layout


class ValidSlots:
    """The positions up to which the slots of each row have been followed, and the row's hash there.

    The compiled plans of drafters follow rows, and prepare the hashes with which the program goes on.

    Invariant: the slots before a row's position were valid for it when they were followed, except, if gaps are passed,
    some before `begins`. Pages of a running row do not change, so these slots are still valid.
    """

    __slots__ = ("begins", "chains", "page_size", "positions", "root", "tags", "work")

    def __init__(self, memory: PageMemory, rows: RowTables, *, root: int) -> None:
        """Follow the tags in `memory`, which has the layout `tag_layout`.

        Args:
            memory: of the tags.
            rows: of the runner.
            root: the hash of no tokens, 64 signed bits; it stands for the drafter's weights.
        """
        array = memory.array(0, "tags")
        num_rows = len(rows.lengths)
        self.page_size: int = array.shape[1]
        self.tags: NDArray[np.int64] = array.numpy().reshape(-1).view(np.int64)  # contents written by: the program
        self.root = root
        """The hash of no tokens of later requests."""  # written by: eagle
        self.chains: NDArray[np.int64] = np.full(num_rows, root, np.int64)  # contents written by: begin, follow, plans
        """Hash of the tokens of each row before its position."""
        self.work: NDArray[np.int64] = np.zeros(num_rows, np.int64)  # contents written by: plans, the program
        """The hashes from which the program tags the slots that it computes."""
        self.positions: Int32 = np.zeros(num_rows, np.int32)  # contents written by: begin, follow, plans
        self.begins: Int32 = np.zeros(num_rows, np.int32)  # contents written by: begin, gather_begins, plans
        """First position of each row behind the last slot that is not valid, if gaps are passed."""

    def follow(self, rows: Int32, tables: RowTables, division: RequestDivision) -> None:
        """Follow rows up to the first slot that is not valid, where each rank knows that of its own rows only.

        All ranks call this, and then know the positions of all rows.
        """
        follow_rows(
            rows, tables.lengths, tables.tokens, division.own_pages, self.tags, self.page_size, self.positions,
            self.chains, self.begins, division.owners(rows), division.exchange.rank,
        )  # fmt: skip
        places = rows.astype(np.intp)
        self.positions[places] = division.gather(self.positions[places], rows)

    def gather_begins(self, rows: Int32, division: RequestDivision) -> int:
        """Take over `begins` of some rows from the ranks that have them; return how many of other ranks have changed.

        All ranks call this, after each has followed its own rows.
        """
        places = rows.astype(np.intp)
        found = division.gather(self.begins[places], rows)
        num_changed = int(np.count_nonzero(found != self.begins[places]))
        self.begins[places] = found
        return num_changed

    def begin(self, row: int) -> None:
        """Note that a row has a new request."""
        self.chains[row] = self.root
        self.positions[row] = self.begins[row] = 0

    def record(self, one: Pass) -> None:
        """Write the instruction that tags the slots which a pass has computed: call it behind its layers."""
        scope = one.scope
        one.tokens.tape.write(
            tag, scope.sampled, scope=scope, tags=self.tags, page_size=self.page_size, chains=self.work
        )  # fmt: skip
