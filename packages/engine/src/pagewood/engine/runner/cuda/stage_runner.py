"""The runner of one stage of a model on a device, as `ranks.staged_runner` drives it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from pagewood.engine.core.loop import StepHandle
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.runner.cpu.runner import KnownRows
from pagewood.engine.runner.cuda.runner import CUDARunner, CUDAStepHandle, first_yielded
from pagewood.engine.runner.ranks.staged_runner import StageWatch


class StageRunner:
    """Says what each step has sent and received. Invariant: the caller waits in the order of launches.

    Args:
        runner: computes.
        watch: gets what it has sent and received.
        close: ends what waits for other ranks, after the runner.
    """

    __slots__ = ("_close", "_pages", "_runner", "_watch")

    def __init__(self, runner: CUDARunner, watch: StageWatch, *, close: Callable[[], None]) -> None:
        self._runner = runner
        self._watch = watch
        self._close = close
        self._pages = np.empty((0, 0), np.int32)
        """[1, n], sums of the tables as the step that was waited for last has read them."""  # written by: note

    def launch(self, batch: Batch) -> StepHandle:
        """Launch a step."""
        return _StageHandle(self._runner.launch(batch), self, needs_masks=len(batch.constrained) > 0)

    def note(self, handle: CUDAStepHandle) -> None:
        """Note the end of a step, which may have failed."""
        self._watch.states[:2] = handle.passed
        self._watch.states[2] = handle.read
        self._watch.note(None, ())
        self._pages = handle.tables[None]

    def learn(self, batch: Batch, result: StepResult) -> KnownRows:
        """Take over the tokens of a step that the last stage has drawn; called after its wait."""
        self._runner.learn(batch, result)
        ends = first_yielded(batch) + result.counts
        return KnownRows(tokens=result.tokens, lengths=ends.astype(np.int32), pages=self._pages)

    def close(self) -> None:
        """Close the runner."""
        self._runner.close()
        self._close()


class _StageHandle:
    """A step whose end is noted once."""

    __slots__ = ("_handle", "_has_masks", "_is_noted", "_runner")

    def __init__(self, handle: CUDAStepHandle, runner: StageRunner, *, needs_masks: bool) -> None:
        self._handle = handle
        self._runner = runner
        self._is_noted = False  # written by: wait
        self._has_masks: threading.Event | None = threading.Event() if needs_masks else None

    def wait(self) -> StepResult:
        """Wait for the masks of the step, and for the step in this stage."""
        if self._has_masks is not None:
            self._has_masks.wait()
        try:
            return self._handle.wait()
        finally:
            if not self._is_noted:
                self._is_noted = True
                self._runner.note(self._handle)

    def drafts(self) -> Sequence[Sequence[int]]:
        """Return the drafts of the step."""
        return self._handle.drafts()

    def constrain(self, masks: Int32) -> None:
        """Give masks to the step."""
        self._handle.constrain(masks)
        if self._has_masks is not None:
            self._has_masks.set()
