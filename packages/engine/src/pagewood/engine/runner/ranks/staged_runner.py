"""The runner of a rank whose model is cut into stages: a step ends when it knows the tokens of the last stage."""

# pyright: basic
# numpy's scalars have no types.

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.loop import ConstrainedHandle, Runner, RunnerLostError, StepHandle
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.observe.profiling import Span, profiled
from pagewood.engine.runner.cpu.runner import KnownRows
from pagewood.engine.runner.ranks.notes import StepNotes
from pagewood.engine.runner.ranks.result_stream import ResultStream
from pagewood.engine.runner.ranks.segment import NUM_KEPT
from pagewood.engine.runner.ranks.stage_memory import StageMemory

Learn = Callable[[Batch, StepResult], KnownRows]
"""Takes over the tokens of a step, and returns what is known then of the rows that yield tokens in it."""


class StageWatch:
    """Keeps what a stage has sent and received in each step, until the step is noted; a `StepWatch`.

    One thread computes, and another one notes.
    """

    __slots__ = ("_seen", "states")

    def __init__(self) -> None:
        self.states: NDArray[np.int64] = np.zeros(3, np.int64)
        """[3], sums of the bits of what was sent, or of the last hidden states, of what was received, and of the tokens
        where a model drafts."""
        # contents written by: the program, note, cuda.stage_runner
        self._seen: deque[tuple[NDArray[np.int64], tuple[Int32, ...]]] = deque()  # contents written by: note, take

    def note(self, result: StepResult | None, tables: tuple[Int32, ...]) -> None:
        """Keep the sums of the step that has just been computed, and those of its tables that only this thread has."""
        del result
        self._seen.append((self.states.copy(), tables[2:]))
        self.states[:] = 0

    def take(self) -> tuple[NDArray[np.int64], tuple[Int32, ...]]:
        """Return the sums of the oldest step that was not taken, and those tables."""
        return self._seen.popleft()


class StagedRunner:
    """Gives each step the result of the last stage. Invariant: the caller waits in the order of launches.

    One thread may launch while another one waits.

    Args:
        runner: computes the layers of this stage.
        learn: of that runner.
        watch: of that runner.
        memory: of the group.
        rank: this one.
    """

    __slots__ = ("_learn", "_memory", "_notes", "_number", "_rank", "_results", "_runner", "_watch")

    def __init__(self, runner: Runner, learn: Learn, watch: StageWatch, memory: StageMemory, rank: int) -> None:
        self._runner = runner
        self._learn = learn
        self._watch = watch
        self._memory = memory
        self._rank = rank
        self._notes = StepNotes(memory.segment, rank)
        self._results = ResultStream(memory, rank)
        self._number = 0  # written by: launch

    def launch(self, batch: Batch) -> StepHandle:
        """Launch a step."""
        handle = self._runner.launch(batch)
        self._number += 1
        return _StagedHandle(self, handle, batch, self._number)

    def result_of(self, handle: StepHandle, batch: Batch, number: int) -> StepResult:
        """Wait for the step in this stage and in the last one, take over its tokens, and note its end.

        Args:
            handle: of the step in this stage.
            batch: of the step.
            number: of the step.

        Raises:
            RunnerLostError: the group has ended.
            Exception: the step has failed.
        """
        results = self._results
        try:
            result = handle.wait()
        except Exception:
            if results.writes:
                results.write(number, None)
            self._note(number, batch, None, ())
            raise
        if results.writes:
            results.write(number, result)
        elif results.reads:
            found = results.take(number)
            if found is None:
                self._note(number, batch, None, ())
                raise RuntimeError("the last stage could not compute the step")
            result = found
        known = self._learn(batch, result)
        self._note(number, batch, replace(result, tokens=known.tokens), (known.lengths, known.pages))
        return result

    def start_spans(self) -> None:
        """Record the steps of this stage from now on."""
        if (own := profiled(self._runner)) is not None:
            own.start_spans()

    def take_spans(self) -> tuple[Sequence[Span], int]:
        """Return what was recorded."""
        own = profiled(self._runner)
        return ((), 0) if own is None else own.take_spans()

    def close(self) -> None:
        """Close the runner of this stage."""
        self._runner.close()

    def _note(self, number: int, batch: Batch, result: StepResult | None, tables: tuple[Int32, ...]) -> None:
        own = self._memory.witnesses[self._rank, number % NUM_KEPT]
        own[:3], others = self._watch.take()
        own[3] = zlib.crc32(np.concatenate([batch.rows, batch.starts, batch.counts]).tobytes())
        self._notes.note(result, (*tables, *others))


class _StagedHandle:
    """A step of a stage, whose result is found once."""

    __slots__ = ("_batch", "_error", "_handle", "_number", "_result", "_runner")

    def __init__(self, runner: StagedRunner, handle: StepHandle, batch: Batch, number: int) -> None:
        self._runner = runner
        self._handle = handle
        self._batch = batch
        self._number = number
        self._result: StepResult | None = None  # written by: wait
        self._error: Exception | None = None  # written by: wait

    def wait(self) -> StepResult:
        """Wait for the last stage."""
        if self._error is not None:
            raise self._error
        if self._result is None:
            try:
                self._result = self._runner.result_of(self._handle, self._batch, self._number)
            except RunnerLostError:
                raise
            except Exception as error:
                self._error = error
                raise
        return self._result

    def drafts(self) -> Sequence[Sequence[int]]:
        """Return the drafts of the step."""
        assert isinstance(self._handle, ConstrainedHandle)
        return self._handle.drafts()

    def constrain(self, masks: Int32) -> None:
        """Give masks to the step."""
        assert isinstance(self._handle, ConstrainedHandle)
        self._handle.constrain(masks)
