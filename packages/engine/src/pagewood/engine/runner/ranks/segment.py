"""The memory that the ranks of a model share. It has no name, so nothing of it is left when the last one has ended."""

# pyright: basic
# numpy's memory by address has no types.

from __future__ import annotations

import itertools
import mmap
import os
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.runner.cpu.compiled.exchange import LINE, NUM_LANES, PIECE, count_step, wait_for_all
from pagewood.engine.runner.cpu.program.exchange import Exchange

Int64 = NDArray[np.int64]
NUM_KEPT = 64
"""Steps whose digests are there: far more than a rank can be behind another one."""
MAX_RANKS = 64
_TEXT_BYTES = 512
_LOOK_S = 0.01


def shared_memory(num_bytes: int) -> int:
    """Return the descriptor of new memory without a name, which other processes get by inheritance."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("pagewood-ranks")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_bytes)
    return descriptor


def mapped(descriptor: int) -> NDArray[np.uint8]:
    """Return all of the memory of a descriptor, which may be closed then; it is unmapped with the last view of it."""
    return np.frombuffer(mmap.mmap(descriptor, os.fstat(descriptor).st_size), np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """What ranks share: the places of exchanges, signs of life, and what each rank says about its steps.

    Legend: R ranks, L lanes of an exchange.
    """

    places: NDArray[np.float32]
    """[R, L, 2, PIECE], see `compiled.exchange`."""
    arrivals: Int64
    """[R, L, LINE], see `compiled.exchange`."""
    beats: Int64
    """[R, LINE], in the first of each line a number that a living rank changes."""  # written by: pulse
    launched: Int64
    """[R, LINE], in the first of each line how many steps the rank has begun to launch."""
    # written by: following, ranked_runner
    steps: Int64
    """[R, LINE], in the first of each line how many steps the rank has ended."""
    digests: Int64
    """[R, NUM_KEPT, 2], of each of the latest steps: a digest of what was computed, and one of the tables, or 0."""
    ended: Int64
    """[LINE], first 1 + the rank that has ended the group, or 0 while it lives."""
    reason: NDArray[np.uint8]
    """[_TEXT_BYTES], why the group has ended, UTF-8, as long as `ended[1]`."""

    @classmethod
    def in_memory(cls, memory: NDArray[np.uint8], count: int) -> Segment:
        """Return the segment of `count` ranks in memory of at least `segment_bytes(count)`, zeros at first."""
        parts: dict[str, Any] = {}
        at = 0
        for name, (shape, dtype) in _shapes(count).items():
            size = _num_bytes((shape, dtype))
            parts[name] = memory[at : at + size].view(dtype).reshape(shape)
            at += size
        for kernel in (count_step, wait_for_all):
            kernel.compile()
        return cls(**parts)

    @property
    def count(self) -> int:
        """R."""
        return len(self.places)

    @staticmethod
    def beats_at(rank: int, count: int) -> int:
        """Return the place of a rank's beats in the memory, in words of eight bytes."""
        before = itertools.takewhile(lambda one: one[0] != "beats", _shapes(count).items())
        return sum(map(_num_bytes, (shape for _, shape in before))) // 8 + rank * LINE

    def end_step(self, rank: int) -> None:
        """Count a step that a rank has ended; its digests are there."""
        count_step(self.steps.reshape(-1), rank)

    def agree(self, number: int) -> None:
        """Wait until all ranks have ended step `number`, counted from 1, and end the group if they differ.

        If the group ends before that, nothing is compared.
        """
        if wait_for_all(self.steps.reshape(-1), self.count, number, self.ended):
            digests = self.digests[:, number % NUM_KEPT]
            for column, what in enumerate(("tokens or hidden states", "tables of rows")):
                for rank in range(1, self.count):
                    if digests[rank, column] != digests[0, column]:
                        self.end(rank, f"rank {rank} has other {what} than rank 0 after step {number}")

    def end(self, rank: int, reason: str) -> None:
        """End the group because of a rank, unless it has ended; every rank stops waiting for the others."""
        if self.ended[0] == 0:
            text = reason.encode()[:_TEXT_BYTES]
            self.reason[: len(text)] = np.frombuffer(text, np.uint8)
            self.ended[1] = len(text)
            self.ended[0] = 1 + rank

    @property
    def end_reason(self) -> str | None:
        """Why the group has ended; None: it has not."""
        if self.ended[0] == 0:
            return None
        return self.reason[: self.ended[1]].tobytes().decode(errors="replace")

    def wait_for_end(self, limit_s: float) -> str | None:
        """Return why the group has ended, as soon as it ends; None: it lives after `limit_s`."""
        ends_s = time.monotonic() + limit_s
        while self.end_reason is None and time.monotonic() < ends_s:
            time.sleep(_LOOK_S)
        return self.end_reason

    def exchange(self, rank: int) -> Exchange:
        """Return what the program of a rank needs of it."""
        return Exchange(rank=rank, count=self.count, places=self.places, arrivals=self.arrivals, ended=self.ended)


def segment_bytes(count: int) -> int:
    """Return the size of the segment of `count` ranks."""
    return sum(map(_num_bytes, _shapes(count).values()))


def _num_bytes(array: tuple[tuple[int, ...], type]) -> int:
    shape, dtype = array
    return int(np.prod(shape)) * np.dtype(dtype).itemsize


def _shapes(count: int) -> dict[str, tuple[tuple[int, ...], type]]:
    """Return shape and dtype of each field; every one begins at a multiple of two cache lines."""
    return {
        "places": ((count, NUM_LANES, 2, PIECE), np.float32),
        "arrivals": ((count, NUM_LANES, LINE), np.int64),
        "beats": ((count, LINE), np.int64),
        "launched": ((count, LINE), np.int64),
        "steps": ((count, LINE), np.int64),
        "digests": ((count, NUM_KEPT, 2), np.int64),
        "ended": ((LINE,), np.int64),
        "reason": ((_TEXT_BYTES,), np.uint8),
    }
