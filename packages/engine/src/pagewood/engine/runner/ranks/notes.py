"""What a rank says about each step that it has ended, so that ranks that differ are noticed."""

# pyright: basic
# numba's kernels have no types.

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.runner.ranks.segment import NUM_KEPT, Segment

TABLES_EVERY = 16
"""Steps after which the tables are compared; NUM_KEPT is a multiple of it."""


class StepNotes:
    """Writes digests of the steps of one rank to the shared memory. Used by the thread that computes them, in order.

    The digest of a step covers the tokens that it yields and the bits of its last hidden states. So it finds a rank
    that adds in another order, although all ranks draw from the same logits. That of the tables, every some steps,
    finds a rank with other pages or lengths of rows. Tokens of the host are not in it: other ones make other states.

    Args:
        segment: of the group.
        rank: this one.
    """

    __slots__ = ("_number", "_rank", "_segment", "states")

    def __init__(self, segment: Segment, rank: int) -> None:
        self._segment = segment
        self._rank = rank
        self._number = 0  # written by: note
        self.states: NDArray[np.int64] = np.zeros(1, np.int64)
        """[1], the sum of the bits of the last hidden states; 0 in steps that compute none."""
        # contents written by: the program, note

    def note(self, result: StepResult | None, tables: tuple[Int32, ...]) -> None:
        """Note the end of a step.

        Args:
            result: of the step; None: it has failed.
            tables: of rows, small ones.
        """
        self._number += 1
        found = 1 if result is None else zlib.crc32(result.counts.tobytes(), zlib.crc32(result.tokens.tobytes()))
        own = self._segment.digests[self._rank, self._number % NUM_KEPT]
        own[0] = (found << 31) ^ int(self.states[0] & 0x7FFF_FFFF_FFFF)
        own[1] = _digest(tables) if self._number % TABLES_EVERY == 0 else 0
        self.states[0] = 0
        self._segment.end_step(self._rank)


def _digest(tables: tuple[Int32, ...]) -> int:
    """Return a digest other than 0; sums take a tenth of the time of a checksum."""
    return zlib.crc32(np.array([table.sum(dtype=np.int64) for table in tables]).tobytes()) + 1
