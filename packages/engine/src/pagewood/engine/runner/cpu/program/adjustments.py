"""Keeps the penalties, biases and bad words of rows, and which rows are reported, where the program finds them."""

# pyright: basic
# numba's kernels have no types.

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.messages.adjustments import Adjustments
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.runner.cpu.compiled.layout import Adjustment


class RowAdjustments:
    """Invariant: the addresses in the table are those of arrays that are kept here."""

    __slots__ = ("_kept", "_table", "_used")

    def __init__(self, table: NDArray[np.int64]) -> None:
        """Write to `table`, that of `RowTables`."""
        self._table = table
        self._kept: dict[int, tuple[NDArray[np.generic], ...]] = {}  # written by: begin
        self._used: set[int] = set()
        """Rows of the table that are not zero."""  # written by: begin

    def begin(self, batch: Batch) -> None:
        """Enter what the admitted requests of a step have, in place of their rows' former requests."""
        if self._used:
            for row in self._used.intersection(batch.admitted_rows()):
                self._used.remove(row)
                self._kept.pop(row, None)
                self._table[row] = 0
        reports = batch.reports
        if reports is not None:
            self._table[reports.rows, Adjustment.REPORTED] = 1 + reports.num_top
            self._table[reports.rows, Adjustment.IS_PROCESSED] = reports.is_processed
            self._table[reports.rows, Adjustment.HAS_RANGE] = reports.has_kept
            self._used.update(reports.rows.tolist())
        new = batch.adjustments
        if new is None:
            return
        first = 0
        all_words = np.split(_with_sizes(new.words, new.word_sizes), _ends(new))
        for row, penalties, num_prompt, num, words, num_words in zip(
            new.rows.tolist(), new.penalties.copy(), new.num_prompt.tolist(), new.num_biases.tolist(), all_words,
            new.num_words.tolist(), strict=True,
        ):  # fmt: skip
            biases = np.empty((num, 3), np.int32)
            chosen = slice(first, first + num)
            biases[:, 0], biases[:, 1] = new.ids[chosen], new.ends[chosen]
            biases.view(np.float32)[:, 2] = new.values[chosen]
            first += num
            entry = self._table[row]
            entry[Adjustment.IS_ON], entry[Adjustment.NUM_PROMPT] = 1, num_prompt
            entry[Adjustment.PENALTIES] = penalties.ctypes.data if penalties.tolist() != [1.0, 0.0, 0.0] else 0
            entry[Adjustment.BIASES], entry[Adjustment.NUM_BIASES] = biases.ctypes.data, num
            entry[Adjustment.WORDS], entry[Adjustment.NUM_WORDS] = words.ctypes.data, num_words
            self._kept[row] = penalties, biases, words
            self._used.add(row)


def _with_sizes(words: NDArray[np.int32], sizes: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the words with the size of each before its first token."""
    return np.insert(words, np.cumsum(sizes) - sizes, sizes)


def _ends(new: Adjustments) -> NDArray[np.int64]:
    """Return where the words of each row but the last end, in the result of `_with_sizes`."""
    numbers = np.concatenate([[0], np.cumsum(new.word_sizes + 1)])
    return numbers[np.cumsum(new.num_words)[:-1]]
