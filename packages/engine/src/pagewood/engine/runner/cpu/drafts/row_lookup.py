"""A lookup drafter among the rows of the runner: which text it has not read yet, and its drafts for a step."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.runner.cpu.compiled.drafting.chains import select, shrink
from pagewood.engine.runner.cpu.drafts.drafting import LookupDrafter
from pagewood.engine.runner.cpu.program.passes import Grants, RowTables


class RowLookup:
    """Calls a lookup for the rows of each step. A drafter that follows the text reads it when a step drafts.

    Invariant: such a drafter has read all tokens of a row before that row gets another request. Use it from the worker.
    """

    __slots__ = ("_drafter", "_follows", "_rows", "_selected", "_unread")

    def __init__(self, drafter: LookupDrafter, rows: RowTables) -> None:
        """Compile what is called for each step.

        Args:
            drafter: reads and writes `rows.tokens`.
            rows: of the runner.
        """
        select.compile()
        shrink.compile()
        self._drafter = drafter
        self._follows = drafter.follows
        self._rows = rows
        num_rows = len(rows.lengths)
        self._unread: NDArray[np.bool_] = np.zeros(num_rows, np.bool_)  # contents written by: RowLookup
        """Rows that may have tokens which the drafter has not been given."""
        self._selected: Int32 = np.zeros((4, num_rows), np.int32)  # contents written by: draft
        """Row, known tokens, most drafts and drafts found of each grant with drafts; see `select`."""

    def before_update(self, batch: Batch) -> None:
        """Let the drafter read the rows that the batch gives to other requests."""
        if self._follows and len(batch.admitted) > 0:
            self._read(batch.rows[batch.admitted.astype(np.intp)])

    def draft(self, batch: Batch, grants: Grants) -> None:
        """Draft for the grants that promise more than one token, and shrink them to the drafts that were found."""
        lengths = self._rows.lengths
        if self._follows and len(batch.admitted) > 0:
            for row, namespace in zip(batch.admitted_rows(), batch.namespaces.tolist(), strict=True):
                self._drafter.begin(row, namespace, int(lengths[row]))
        if not grants.is_drafting:
            return
        if self._follows:
            self._read(np.flatnonzero(self._unread))
        selected = self._selected
        num = select(grants.rows, grants.counts, grants.sampled, grants.promised, lengths, selected)
        self._drafter.draft(selected[0, :num], selected[1, :num], selected[2, :num], selected[3, :num])
        shrink(grants.counts, grants.sampled, grants.promised, selected)

    def after_step(self, grants: Grants) -> None:
        """Note that the rows of a step may have new tokens."""
        if self._follows:
            self._unread[grants.rows.astype(np.intp)] = True

    def _read(self, rows: NDArray[np.integer[Any]]) -> None:
        """Give the drafter the new tokens of these rows; others wait until a step drafts, or their rows end."""
        places = rows.astype(np.intp)  # with other indices numpy gives the interpreter's lock away
        places = places[self._unread[places]]
        if len(places) > 0:
            self._drafter.advance(places.astype(np.int32), self._rows.lengths[places])
            self._unread[places] = False
