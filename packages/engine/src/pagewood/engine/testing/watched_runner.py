"""Checks that a runner keeps the promises of its handles, without checking its results."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from pagewood.engine.core.loop import ConstrainedHandle, Runner, StepHandle
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.result import StepResult

_NUM_KEPT = 4
"""Results that must not change when later steps are computed."""


class WatchedRunner:
    """A runner whose results are read twice, and kept for some steps; satisfies `core.loop.Runner`."""

    def __init__(self, inner: Runner) -> None:
        self._inner = inner
        self._kept: deque[tuple[Int32, Int32]] = deque(maxlen=_NUM_KEPT)
        """Tokens of the latest results, and copies of them."""  # contents written by: watched_runner
        self._broken = ""
        """The first promise that was broken."""  # written by: watched_runner

    def launch(self, batch: Batch) -> StepHandle:
        """Launch a step."""
        handle = self._inner.launch(batch)
        return _WatchedConstrained(handle, self) if isinstance(handle, ConstrainedHandle) else _Watched(handle, self)

    def close(self) -> None:
        """Close the runner, twice."""
        self._note_overwritten()
        self._inner.close()

    def check(self) -> None:
        """Raise an AssertionError if a promise was broken."""
        assert not self._broken, self._broken

    def waited(self, handle: StepHandle) -> StepResult:
        """Wait for a step, twice."""
        result, again = handle.wait(), handle.wait()
        if isinstance(result, StepResult) and isinstance(result.tokens, np.ndarray):  # pyright: ignore[reportUnnecessaryIsInstance]
            is_same = isinstance(again, StepResult) and np.array_equal(result.tokens, again.tokens)  # pyright: ignore[reportUnnecessaryIsInstance]
            if not is_same:
                self._note(f"a second call of wait must return the result again, {result}, got {again}")
            self._note_overwritten()
            self._kept.append((result.tokens, result.tokens.copy()))
        return result

    def _note_overwritten(self) -> None:
        for tokens, before in self._kept:
            if not np.array_equal(tokens, before):
                self._note(f"no later step may write to the arrays of a result, got {tokens} where there was {before}")

    def _note(self, message: str) -> None:
        self._broken = self._broken or message


class _Watched:
    def __init__(self, handle: StepHandle, runner: WatchedRunner) -> None:
        self._handle = handle
        self._runner = runner

    def wait(self) -> StepResult:
        return self._runner.waited(self._handle)


class _WatchedConstrained:
    def __init__(self, handle: ConstrainedHandle, runner: WatchedRunner) -> None:
        self._handle = handle
        self._runner = runner

    def drafts(self) -> Sequence[Sequence[int]]:
        return self._handle.drafts()

    def constrain(self, masks: Int32) -> None:
        self._handle.constrain(masks)

    def wait(self) -> StepResult:
        return self._runner.waited(self._handle)
