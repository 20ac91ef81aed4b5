"""The memory that the stages of a model share behind that of their group: hidden states, results and witnesses."""

# pyright: basic
# numpy's views have no types.

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.runner.cpu.compiled.exchange import LINE, NUM_LANES, PIECE
from pagewood.engine.runner.cpu.compiled.hand_over import DEPTH, count, wait_for_count
from pagewood.engine.runner.cpu.program.exchange import Exchange
from pagewood.engine.runner.cpu.program.relay import Channel, ChannelRelay
from pagewood.engine.runner.ranks.segment import NUM_KEPT, Segment

Int64 = NDArray[np.int64]
RESULT_BYTES = 1 << 20
"""Bytes of results on their way; a longer one goes in parts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageMemory:
    """What ranks share because they are stages. Ranks of one stage have consecutive numbers.

    Legend: R ranks, N of them in a stage, S stages, L lanes, D places of a lane.
    """

    segment: Segment
    """Segment of the group."""
    places: NDArray[np.float32]
    """[R - N, L, D, PIECE], see `compiled.hand_over`: from each rank but those of the last stage."""
    sent: Int64
    """[R - N, L, LINE]"""
    taken: Int64
    """[R - N, L, LINE]"""
    witnesses: Int64
    """[R, NUM_KEPT, 4], of each of the latest steps: sums of the bits of what a rank has sent, of what it has received
    and of its tokens (0 where no model drafts), and a digest of its batch."""  # contents written by: staged_runner
    result_bytes: NDArray[np.uint8]
    """[RESULT_BYTES], see `ResultStream`."""  # contents written by: result_stream
    written: Int64
    """[LINE], in the first how many bytes of results were written."""
    read: Int64
    """[R, LINE], in the first of each line how many of them a rank has read."""
    num_stages: int
    """S, at least 2."""

    @classmethod
    def in_memory(cls, memory: NDArray[np.uint8], segment: Segment, num_stages: int) -> StageMemory:
        """Return it in memory of at least `stage_bytes`, zeros at first."""
        parts: dict[str, Any] = {}
        at = 0
        for name, (shape, dtype) in _shapes(segment.count, num_stages).items():
            size = _num_bytes((shape, dtype))
            parts[name] = memory[at : at + size].view(dtype).reshape(shape)
            at += size
        for kernel in (count, wait_for_count):
            kernel.compile()
        return cls(segment=segment, num_stages=num_stages, **parts)

    @property
    def num_in_stage(self) -> int:
        """N."""
        return self.segment.count // self.num_stages

    def exchange(self, rank: int) -> Exchange | None:
        """Return what a program needs to exchange values with the other ranks of its stage; None: there are none."""
        num, whole = self.num_in_stage, self.segment.exchange(rank)
        if num == 1:
            return None
        own = slice(rank // num * num, rank // num * num + num)
        return Exchange(
            rank=rank % num, count=num, places=whole.places[own], arrivals=whole.arrivals[own], ended=whole.ended
        )

    def relay(self, rank: int, states: Int64) -> ChannelRelay:
        """Return what the program of a rank needs to pass hidden states; `states` `[3]` gets their witnesses."""
        before = rank - self.num_in_stage
        return ChannelRelay(
            incoming=self._channel(before) if before >= 0 else None,
            outgoing=self._channel(rank) if rank < len(self.places) else None,
            ended=self.segment.ended,
            states=states,
        )

    def agree(self, number: int) -> None:
        """Compare batches, and what was sent with what was received, of a step that all have ended.

        If they differ, end the group. Ranks of a stage must have sent the same; those of the last one witness the
        states that they draw from.
        """
        num, found = self.num_in_stage, self.witnesses[:, number % NUM_KEPT]
        for rank in range(self.segment.count):
            first = rank // num * num
            if found[rank, 3] != found[0, 3]:
                self.segment.end(rank, f"rank {rank} has computed another batch than rank 0 in step {number}")
            if found[rank, 2] != found[0, 2]:
                self.segment.end(rank, f"rank {rank} has other tokens or drafts than rank 0 in step {number}")
            if found[rank, 0] != found[first, 0]:
                self.segment.end(rank, f"rank {rank} has other hidden states than rank {first} after step {number}")
            if first and found[rank, 1] != found[rank - num, 0]:
                self.segment.end(
                    rank, f"rank {rank} has received other hidden states than rank {rank - num} sent in step {number}"
                )

    def _channel(self, rank: int) -> Channel:
        return Channel(places=self.places[rank], sent=self.sent[rank], taken=self.taken[rank])


def stage_bytes(num_ranks: int, num_stages: int) -> int:
    """Return the size of what ranks share beside a segment; one stage shares nothing."""
    return 0 if num_stages == 1 else sum(map(_num_bytes, _shapes(num_ranks, num_stages).values()))


def _num_bytes(array: tuple[tuple[int, ...], type]) -> int:
    shape, dtype = array
    return int(np.prod(shape)) * np.dtype(dtype).itemsize


def _shapes(num_ranks: int, num_stages: int) -> dict[str, tuple[tuple[int, ...], type]]:
    """Return shape and dtype of each field; every one begins at a multiple of two cache lines."""
    num_senders = num_ranks - num_ranks // num_stages
    return {
        "places": ((num_senders, NUM_LANES, DEPTH, PIECE), np.float32),
        "sent": ((num_senders, NUM_LANES, LINE), np.int64),
        "taken": ((num_senders, NUM_LANES, LINE), np.int64),
        "witnesses": ((num_ranks, NUM_KEPT, 4), np.int64),
        "result_bytes": ((RESULT_BYTES,), np.uint8),
        "written": ((LINE,), np.int64),
        "read": ((num_ranks, LINE), np.int64),
    }
