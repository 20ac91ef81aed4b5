"""Keeps the penalties and biases of rows where the program finds them."""

# pyright: basic
# numba's kernels have no types.

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.batch import Batch
from pagewood.engine.runner.cpu.compiled.layout import Adjustment


class RowAdjustments:
    """Invariant: the addresses in the table are those of arrays that are kept here."""

    __slots__ = ("_kept", "_table")

    def __init__(self, table: NDArray[np.int64]) -> None:
        """Write to `table`, that of `RowTables`."""
        self._table = table
        self._kept: dict[int, tuple[NDArray[np.float32], NDArray[np.int32]]] = {}  # written by: begin

    def begin(self, batch: Batch) -> None:
        """Enter what the admitted requests of a step have, in place of their rows' former requests."""
        if self._kept:
            for row in batch.admitted_rows():
                if self._kept.pop(row, None) is not None:
                    self._table[row] = 0
        new = batch.adjustments
        if new is None:
            return
        first = 0
        for row, penalties, num_prompt, num in zip(
            new.rows.tolist(), new.penalties.copy(), new.num_prompt.tolist(), new.num_biases.tolist(), strict=True
        ):
            biases = np.empty((num, 3), np.int32)
            chosen = slice(first, first + num)
            biases[:, 0], biases[:, 1] = new.ids[chosen], new.ends[chosen]
            biases.view(np.float32)[:, 2] = new.values[chosen]
            first += num
            entry = self._table[row]
            entry[Adjustment.IS_ON], entry[Adjustment.NUM_PROMPT] = 1, num_prompt
            entry[Adjustment.PENALTIES] = penalties.ctypes.data if penalties.tolist() != [1.0, 0.0, 0.0] else 0
            entry[Adjustment.BIASES], entry[Adjustment.NUM_BIASES] = biases.ctypes.data, num
            self._kept[row] = penalties, biases
