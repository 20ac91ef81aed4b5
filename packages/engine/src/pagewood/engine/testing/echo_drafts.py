"""The memory of a drafter beside the echo model: KV of its own in the target's pages, which falls behind the text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_UInt64 = NDArray[np.uint64]


class EchoDrafts:
    """The KV of a drafter, slot by slot, and how far each row has been compared with it.

    It computes nothing in steps that do not draft. So its KV is missing or out of date for all positions computed
    meanwhile: by chunks, cache hits, plain decoding, rejected drafts and earlier rows. A draft that is made from such
    KV is wrong. Invariant: the slots of a row before its end, as far as it still sees them, hold the KV of its
    text.
    """

    def __init__(self, *, num_rows: int, num_slots: int) -> None:
        self._kv: _UInt64 = np.zeros(num_slots, np.uint64)
        self._tags: _UInt64 = np.zeros(num_slots, np.uint64)
        """[num_slots], the sum of the KV of all tokens up to that of each slot, for which it was computed."""
        self._ends = np.zeros(num_rows, np.int64)
        """[num_rows], positions of each row whose slots have been compared."""

    def begin(self, rows: Sequence[int]) -> None:
        """Note that rows have new requests."""
        self._ends[rows] = 0

    def catch_up(self, row: int, kv: _UInt64, slots: NDArray[np.int64]) -> tuple[_UInt64, int, int]:
        """Compute the missing KV before a draft.

        Args:
            row: to draft for.
            kv: `[n] uint64`, the KV of its n known tokens but the last.
            slots: `[<= n]`, where that lies which the next position sees, the last of them.

        Returns:
            The KV in the slots, the sum of `kv`, and the number of positions that were missing.
        """
        begin = len(kv) - len(slots)
        first = max(min(int(self._ends[row]), len(kv)), begin)
        tags = np.cumsum(kv, dtype=np.uint64)
        is_stale = self._tags[slots[first - begin :]] != tags[first:]
        places = first + np.flatnonzero(is_stale)
        self._kv[slots[places - begin]], self._tags[slots[places - begin]] = kv[places], tags[places]
        self._ends[row] = len(kv)
        return self._kv[slots], int(tags[-1]) if len(tags) else 0, len(places)

    def note(self, slot: int, kv: int, total: int) -> None:
        """Write the KV of a draft, or of the token before the first; `total` is the sum of the KV up to it."""
        self._kv[slot], self._tags[slot] = kv, total % 2**64
