"""The results of steps, which the last stage of a model writes and all stages before it read."""

# pyright: basic
# numba's kernels have no types.

from __future__ import annotations

import struct

from pagewood.engine.core.loop import RunnerLostError
from pagewood.engine.core.messages.codec import decode, encode
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.runner.cpu.compiled.exchange import LINE
from pagewood.engine.runner.cpu.compiled.hand_over import count, wait_for_count
from pagewood.engine.runner.ranks.stage_memory import RESULT_BYTES, StageMemory

_HEAD = struct.Struct("<qq")
"""Number of the step, bytes of the result; no bytes: the step has failed."""


class ResultStream:
    """One end of a stream of bytes in shared memory. Invariant: results are written and read in the order of steps.

    The first rank of the last stage writes; all ranks of other stages read. A result goes in parts if it is longer than
    the memory, which those that read it give free.

    Args:
        memory: of the group.
        rank: this one.
    """

    __slots__ = ("_memory", "_position", "_rank", "_readers")

    def __init__(self, memory: StageMemory, rank: int) -> None:
        self._memory = memory
        self._rank = rank
        self._readers = range(memory.segment.count - memory.num_in_stage)
        self._position = 0
        """Bytes that this rank has written or read."""  # written by: write, _take

    @property
    def writes(self) -> bool:
        """Whether this rank writes the results."""
        return self._rank == self._readers.stop

    @property
    def reads(self) -> bool:
        """Whether it reads them."""
        return self._rank in self._readers

    def write(self, number: int, result: StepResult | None) -> None:
        """Write the result of a step.

        Args:
            number: of the step.
            result: None: the step has failed.

        Raises:
            RunnerLostError: the group ends while this waits.
        """
        data = b"" if result is None else encode(result)
        rest = memoryview(_HEAD.pack(number, len(data)) + data)
        memory, read = self._memory, self._memory.read.reshape(-1)
        while rest:
            at = self._position % RESULT_BYTES
            num = min(len(rest), RESULT_BYTES - at)
            for rank in self._readers:
                self._wait(read, LINE * rank, self._position + num - RESULT_BYTES)
            memory.result_bytes[at : at + num] = rest[:num]
            self._position += num
            count(memory.written, 0, num)
            rest = rest[num:]

    def take(self, number: int) -> StepResult | None:
        """Wait for the result of a step; those of earlier steps are passed over. None: the step has failed.

        Raises:
            RunnerLostError: the group ends before that, or the last stage has not computed the step.
        """
        while True:
            found, size = _HEAD.unpack(self._take(_HEAD.size))
            data = self._take(size)
            if found == number:
                break
            if found > number:
                memory = self._memory
                memory.segment.end(self._readers.stop, f"rank {self._readers.stop} has not computed step {number}")
                raise RunnerLostError(memory.segment.end_reason or "")
        if not data:
            return None
        result = decode(data)
        assert isinstance(result, StepResult)
        return result

    def _take(self, size: int) -> bytes:
        memory, parts, left = self._memory, [], size
        while left:
            at = self._position % RESULT_BYTES
            num = min(left, RESULT_BYTES - at)
            self._wait(memory.written, 0, self._position + num)
            parts.append(memory.result_bytes[at : at + num].tobytes())
            self._position += num
            count(memory.read.reshape(-1), LINE * self._rank, num)
            left -= num
        return b"".join(parts)

    def _wait(self, counters: object, at: int, wanted: int) -> None:
        if not wait_for_count(counters, at, wanted, self._memory.segment.ended):
            raise RunnerLostError(self._memory.segment.end_reason or "the group has ended")
