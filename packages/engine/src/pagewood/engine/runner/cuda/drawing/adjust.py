"""Changes the logits of rows with penalties, biases or bad words on a CUDA device, as the CPU runner does.

The text of a row is read from the token table, up to the token that is drawn. Drafts lie in that table too while they
are verified, so each verified position gets the changes of plain decoding.

Legend: N rows of logits, V vocab_size, J of the N whose requests have changes, L tokens of a row, M biases of a row,
K bad words of a row, T tokens of the longest bad word.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagewood.engine.core.messages.adjustments import Adjustments
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch

_NONE = -1  # no token of a bad word
_NOWHERE = -2  # no token of the text


def forbid(logits: Tensor, rows: NDArray[np.int64], masks: Int32) -> Tensor:
    """Return `logits` with no probability for tokens that a mask does not allow.

    Args:
        logits: `[N, V]`.
        rows: `[M]`, the rows of the N with a mask.
        masks: `[M, words of a mask]`, see `ConstrainedHandle.constrain`.
    """
    index = torch.from_numpy(rows).to(logits.device, non_blocking=True)
    words = torch.from_numpy(masks).to(logits.device, non_blocking=True)
    bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device)
    is_allowed = (bits & 1).flatten(1)[:, : logits.shape[1]] > 0
    chosen = logits.index_select(0, index).masked_fill(~is_allowed, -torch.inf)
    return logits.index_copy(0, index, chosen)


class RowAdjustments:
    """The changes for each row, on the device. A batch without such rows costs one check of a host array."""

    __slots__ = (
        "_ends", "_has_words", "_ids", "_is_on", "_num_prompt", "_penalties", "_tokens_per_row", "_values", "_words",
    )  # fmt: skip

    def __init__(self, *, max_rows: int, tokens_per_row: int, device: torch.device) -> None:
        """Allocate the tables, which grow with the longest lists of biases and bad words."""
        self._tokens_per_row = tokens_per_row
        self._is_on = np.zeros(max_rows, np.bool_)  # contents written by: admit
        self._penalties = torch.ones(max_rows, 3, device=device)
        self._num_prompt = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._ids = torch.zeros(max_rows, 1, dtype=torch.int64, device=device)
        """[rows, M]"""
        self._values = torch.zeros(max_rows, 1, device=device)
        self._ends = torch.zeros(max_rows, 1, dtype=torch.int32, device=device)
        self._has_words = np.zeros(max_rows, np.bool_)  # contents written by: _enter
        self._words = torch.full((max_rows, 1, 1), _NONE, dtype=torch.int32, device=device)
        """[rows, K, T], each bad word at the end of its last dimension."""

    def admit(self, batch: Batch) -> None:
        """Enter the changes of the admitted requests; call it before the step is queued."""
        if len(batch.admitted):
            self._is_on[batch.rows[batch.admitted]] = False
        if batch.adjustments is not None:
            self._enter(batch.adjustments)

    def apply(self, logits: Tensor, rows: Int32, places: Tensor, tokens: Tensor) -> Tensor:
        """Return the logits from which tokens are drawn; `logits` itself if nothing is changed.

        Args:
            logits: `[N, V]`.
            rows: `[N] int32`, row of each, on the host.
            places: `[N] int64`, where the drawn token goes in the token table, whose texts end there.
            tokens: `[rows * L] int32`, the token table.
        """
        which = np.flatnonzero(self._is_on[rows])
        if not len(which):
            return logits
        index = torch.from_numpy(which).to(logits.device, non_blocking=True)
        places = places.index_select(0, index)
        where, positions = places // self._tokens_per_row, (places % self._tokens_per_row)[:, None]
        chosen = logits.index_select(0, index).float()
        vocab_size = chosen.shape[1]

        text = tokens.view(-1, self._tokens_per_row).index_select(0, where).long()
        columns = torch.arange(self._tokens_per_row, device=logits.device)
        is_output = columns >= self._num_prompt.index_select(0, where)[:, None]
        # Tokens that do not count go to a column after the vocabulary.
        text = torch.where(columns < positions, text, vocab_size)
        empty = chosen.new_zeros(len(which), vocab_size + 1)
        occurs = empty.scatter(1, text, 1.0)[:, :-1] > 0
        counts = empty.scatter_add(1, torch.where(is_output, text, vocab_size), torch.ones_like(text).float())[:, :-1]
        repetition, frequency, presence = self._penalties.index_select(0, where)[:, :, None].unbind(1)
        repeated = torch.where(chosen > 0, chosen / repetition, chosen * repetition)
        chosen = torch.where(occurs, repeated, chosen)
        chosen = torch.where(counts > 0, chosen - frequency * counts - presence, chosen)

        ids, ends = self._ids.index_select(0, where), self._ends.index_select(0, where)
        values = torch.where(positions < ends, self._values.index_select(0, where), 0.0)
        chosen = chosen + empty.scatter_add(1, ids.clamp(max=vocab_size), values)[:, :-1]
        if self._has_words[rows[which]].any():
            chosen = self._without_bad_words(chosen, where, positions, tokens)
        return logits.index_copy(0, index, chosen.to(logits.dtype))

    def _without_bad_words(self, chosen: Tensor, where: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
        """Return `chosen` `[J, V]` with minus infinity for tokens that would complete a bad word.

        Args:
            chosen: logits.
            where: `[J] int64`, row of each.
            positions: `[J, 1] int64`, position of the drawn token.
            tokens: `[rows * L] int32`, the token table.
        """
        words, vocab_size = self._words.index_select(0, where), chosen.shape[1]
        before = positions - torch.arange(words.shape[2] - 1, 0, -1, device=chosen.device)  # [J, T - 1]
        text = tokens.view(-1, self._tokens_per_row).index_select(0, where).gather(1, before.clamp(min=0))
        text = torch.where(before >= 0, text, _NOWHERE)
        first, last = words[:, :, :-1], words[:, :, -1].long()
        is_met = ((first == text[:, None]) | (first == _NONE)).all(-1) & (last != _NONE)
        forbidden = torch.where(is_met, last, vocab_size).clamp(max=vocab_size)
        is_forbidden = chosen.new_zeros(len(where), vocab_size + 1).scatter(1, forbidden, 1.0)[:, :-1] > 0
        return chosen.masked_fill(is_forbidden, -torch.inf)

    def _enter(self, new: Adjustments) -> None:
        self._is_on[new.rows] = True
        most = max(new.num_biases.tolist())
        if most > self._ids.shape[1]:
            more = (1 << (most - 1).bit_length()) - self._ids.shape[1]
            self._ids, self._values, self._ends = (
                torch.nn.functional.pad(table, (0, more)) for table in (self._ids, self._values, self._ends)
            )
        ids = np.zeros((len(new.rows), self._ids.shape[1]), np.int64)
        values, ends = np.zeros(ids.shape, np.float32), np.zeros(ids.shape, np.int32)
        first = 0
        for i, num in enumerate(new.num_biases.tolist()):
            chosen = slice(first, first + num)
            ids[i, :num], values[i, :num], ends[i, :num] = new.ids[chosen], new.values[chosen], new.ends[chosen]
            first += num
        self._has_words[new.rows] = new.num_words > 0
        words = self._padded_words(new)
        rows = torch.from_numpy(new.rows.astype(np.int64)).to(self._ids.device)
        for table, entries in (
            (self._penalties, new.penalties), (self._num_prompt, new.num_prompt), (self._ids, ids),
            (self._values, values), (self._ends, ends), (self._words, words),
        ):  # fmt: skip
            table.index_copy_(0, rows, torch.from_numpy(entries).to(table.device))

    def _padded_words(self, new: Adjustments) -> NDArray[np.int32]:
        """Return the bad words in the form of the table, `[J, K, T]`; the table grows first if necessary."""
        needed = (max(new.num_words.tolist()), max(new.word_sizes.tolist(), default=0))
        more = [
            (1 << (size - 1).bit_length()) - had if size > had else 0
            for size, had in zip(needed, self._words.shape[1:], strict=True)
        ]
        if any(more):
            self._words = torch.nn.functional.pad(self._words, (more[1], 0, 0, more[0]), value=_NONE)
        words = np.full((len(new.rows), *self._words.shape[1:]), _NONE, np.int32)
        rest, sizes = new.words, iter(new.word_sizes.tolist())
        for i, num in enumerate(new.num_words.tolist()):
            for k in range(num):
                size = next(sizes)
                words[i, k, words.shape[2] - size :], rest = rest[:size], rest[size:]
        return words
