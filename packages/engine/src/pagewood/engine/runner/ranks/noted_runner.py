"""A runner that says what each of its steps has computed, so that it can be a rank of a model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from pagewood.engine.core.loop import ConstrainedHandle, Runner, StepHandle
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.runner.ranks.notes import StepNotes


@runtime_checkable
class WitnessedHandle(StepHandle, Protocol):
    """A step that says which tables it has read."""

    @property
    def tables(self) -> Int32:
        """`[n]`, sums of what the step has read of the tables, known after `wait`."""
        ...


class NotedRunner:
    """Notes the tokens of each step when it has been waited for. Invariant: the caller waits in the order of launches.

    One thread may launch while another one waits.

    Args:
        runner: computes; its tables are compared with those of other ranks if its handles say what they have read.
        notes: of this rank.
        close: ends exchanges with the other ranks, after the runner.
    """

    __slots__ = ("_close", "_notes", "_runner")

    def __init__(self, runner: Runner, notes: StepNotes, *, close: Callable[[], None]) -> None:
        self._runner = runner
        self._notes = notes
        self._close = close

    def launch(self, batch: Batch) -> StepHandle:
        """Launch a step."""
        return _NotedHandle(self._runner.launch(batch), self._notes, needs_masks=len(batch.constrained) > 0)

    def close(self) -> None:
        """Close the runner."""
        self._runner.close()
        self._close()


class _NotedHandle:
    """A step whose end is noted once."""

    __slots__ = ("_handle", "_has_masks", "_is_noted", "_notes")

    def __init__(self, handle: StepHandle, notes: StepNotes, *, needs_masks: bool) -> None:
        self._handle = handle
        self._notes = notes
        self._is_noted = False  # written by: wait
        self._has_masks: threading.Event | None = threading.Event() if needs_masks else None

    def wait(self) -> StepResult:
        """Wait for the masks of the step and for the step; note what it has computed, or that it has failed."""
        if self._has_masks is not None:
            self._has_masks.wait()
        result: StepResult | None = None
        try:
            result = self._handle.wait()
            return result
        finally:
            if not self._is_noted:
                self._is_noted = True
                handle = self._handle
                tables = (handle.tables,) if result is not None and isinstance(handle, WitnessedHandle) else ()
                self._notes.note(result, tables)

    def drafts(self) -> Sequence[Sequence[int]]:
        """Return the drafts of the step."""
        assert isinstance(self._handle, ConstrainedHandle)
        return self._handle.drafts()

    def constrain(self, masks: Int32) -> None:
        """Give masks to the step."""
        assert isinstance(self._handle, ConstrainedHandle)
        self._handle.constrain(masks)
        if self._has_masks is not None:
            self._has_masks.set()
