"""A group whose other ranks are threads: real messages and a real segment, and any runner, without a start-up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from pagewood.engine.core.loop import ConstrainedHandle, Runner, RunnerLostError, StepHandle
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.runner.ranks.following import follow
from pagewood.engine.runner.ranks.link import Link
from pagewood.engine.runner.ranks.messages import Close, Spans, ToRank, from_rank, send
from pagewood.engine.runner.ranks.notes import StepNotes
from pagewood.engine.runner.ranks.pulse import Pulse
from pagewood.engine.runner.ranks.segment import Segment, segment_bytes

_HEARTBEAT_S = 30.0
"""All ranks are in one process, so none is silent; but a machine may be busy with something else."""


class NotedRunner:
    """A runner whose steps are noted when they are waited for, as a rank of a group must note them."""

    def __init__(self, runner: Runner, notes: StepNotes) -> None:
        self._runner = runner
        self._notes = notes
        self._turn = threading.Lock()
        """An echo runner is used by one thread at a time."""

    def launch(self, batch: Batch) -> StepHandle:
        with self._turn:
            return _Noted(self._runner.launch(batch), self._notes, self._turn, waits=len(batch.constrained) > 0)

    def close(self) -> None:
        self._runner.close()


class _Noted:
    def __init__(self, handle: StepHandle, notes: StepNotes, turn: threading.Lock, *, waits: bool) -> None:
        self._handle = handle
        self._notes = notes
        self._turn = turn
        self._is_noted = False
        self._has_masks = threading.Event()
        if not waits:
            self._has_masks.set()

    def wait(self) -> StepResult:
        self._has_masks.wait()
        result: StepResult | None = None
        try:
            with self._turn:
                result = self._handle.wait()
            return result
        finally:
            if not self._is_noted:
                self._is_noted = True
                self._notes.note(result, ())

    def drafts(self) -> Sequence[Sequence[int]]:
        assert isinstance(self._handle, ConstrainedHandle)
        return self._handle.drafts()

    def constrain(self, masks: np.ndarray) -> None:
        assert isinstance(self._handle, ConstrainedHandle)
        with self._turn:
            self._handle.constrain(masks)
        self._has_masks.set()


class ThreadRanks:
    """Satisfies `Ranks`: each other rank follows rank 0 in a thread, with a runner of its own.

    Args:
        count: of ranks.
        make_runner: (segment, rank) -> a runner that notes its steps.
        heartbeat_s: after this time, a rank is found that does not take part in a step; None: `_HEARTBEAT_S`.
    """

    def __init__(
        self, count: int, make_runner: Callable[[Segment, int], Runner], *, heartbeat_s: float | None = None
    ) -> None:
        self.segment = Segment.in_memory(np.zeros(segment_bytes(count), np.uint8), count)
        self.runner = make_runner(self.segment, 0)
        """Of rank 0."""
        self._pulses = [
            Pulse(self.segment, rank, heartbeat_s=heartbeat_s or _HEARTBEAT_S, on_end=lambda: None)
            for rank in range(count)
        ]
        self._links: list[Link] = []
        self._others: list[Link] = []
        self._threads: list[threading.Thread] = []
        for rank in range(1, count):
            own, other = Link.pair()
            self._links.append(own)
            self._others.append(Link(other))
            arguments = (
                self._others[-1],
                make_runner(self.segment, rank),
                self.segment,
                rank,
            )
            self._threads.append(
                threading.Thread(target=follow, args=arguments, kwargs={"leave": lambda: None}, daemon=True)
            )
            self._threads[-1].start()

        for pulse in self._pulses:
            pulse.begin()

    def check(self) -> None:
        if self.segment.end_reason is not None:
            raise RunnerLostError(self.segment.end_reason)

    def tell_all(self, message: ToRank) -> None:
        for link in self._links:
            send(link, message)

    def spans(self) -> Sequence[Spans]:
        found = [from_rank(link.receive()) for link in self._links]
        assert all(isinstance(one, Spans) for one in found)
        return [one for one in found if isinstance(one, Spans)]

    def agree(self, number: int) -> None:
        self.segment.agree(number)
        self.check()

    def end(self, rank: int, reason: str) -> None:
        self.segment.end(rank, reason)

    def close(self) -> None:
        self.tell_all(Close())
        for thread in self._threads:
            thread.join()
        for pulse in self._pulses:
            pulse.stop()
        for link in (*self._links, *self._others):
            link.close()
