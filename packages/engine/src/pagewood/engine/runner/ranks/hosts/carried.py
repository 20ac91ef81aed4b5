"""What the ranks of one host write into their segment and those of another host read: where it is, in one order."""

# pyright: basic
# numpy's addresses have no types.

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.runner.cpu.compiled.exchange import NUM_LANES
from pagewood.engine.runner.cpu.compiled.hand_over import DEPTH
from pagewood.engine.runner.ranks.segment import NUM_KEPT, Segment
from pagewood.engine.runner.ranks.stage_memory import StageMemory

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Carried:
    """Places in the segment of one host. Invariant: both hosts list the same things in the same order.

    Legend: N lanes, M counters, R ranks.
    """

    writers: range
    """Ranks that write."""
    lanes: Int64
    """[N, 3], of each lane whose pieces are read there: address of its places, address of its line, which has the
    count of pieces and then the elements of the latest ones, and how many places it has."""
    counters: Int64
    """[M], addresses of words that only grow."""
    results: Int64
    """[2], addresses of the bytes of results, and of their count; zeros: they are not read there."""
    steps: Int64
    """[R * LINE], see `Segment`, and so is the next one."""
    digests: Int64
    """[R, NUM_KEPT, 2]"""
    witnesses: Int64
    """[R, NUM_KEPT, 4], see `StageMemory`; [R, NUM_KEPT, 0]: there is one stage."""
    ended: Int64
    """[>= 1], other than 0 when the group has ended."""

    @classmethod
    def between(cls, segment: Segment, stages: StageMemory | None, writers: range, readers: range) -> Carried:
        """Return what `writers` write and `readers`, who are on another host, need to know.

        Args:
            segment: of this host.
            stages: likewise; None: the model has one stage.
            writers: ranks of one host.
            readers: ranks of another one.
        """
        num = segment.count if stages is None else stages.num_in_stage
        lanes: list[tuple[int, int, int]] = []
        counters: list[int] = []
        results = np.zeros(2, np.int64)
        for rank in writers:
            counters += [_address(segment.beats[rank]), _address(segment.launched[rank])]
            if any(reader // num == rank // num for reader in readers):  # they exchange
                lanes += _lanes(segment.places[rank], segment.arrivals[rank], 2)
            if stages is None:
                continue
            if rank + num in readers:
                lanes += _lanes(stages.places[rank], stages.sent[rank], DEPTH)
            if rank - num in readers:
                counters += map(_address, stages.taken[rank - num])
            first_of_last = segment.count - num
            if rank < first_of_last and first_of_last in readers:
                counters.append(_address(stages.read[rank]))
            if rank == first_of_last and any(reader < first_of_last for reader in readers):
                results[:] = _address(stages.result_bytes), _address(stages.written)
        return cls(
            writers=writers,
            lanes=np.array(lanes, np.int64).reshape(-1, 3),
            counters=np.array(counters, np.int64),
            results=results,
            steps=segment.steps.reshape(-1),
            digests=segment.digests,
            witnesses=np.zeros((segment.count, NUM_KEPT, 0), np.int64) if stages is None else stages.witnesses,
            ended=segment.ended,
        )


def _lanes(places: NDArray[np.float32], lines: Int64, depth: int) -> Iterable[tuple[int, int, int]]:
    return ((_address(places[lane]), _address(lines[lane]), depth) for lane in range(NUM_LANES))


def _address(array: NDArray[np.generic]) -> int:
    return int(array.ctypes.data)
