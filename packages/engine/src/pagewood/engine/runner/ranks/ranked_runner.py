"""A runner whose model is divided among ranks: rank 0 plans, and every rank computes its part of the same steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pagewood.engine.core.loop import ConstrainedHandle, Runner, RunnerLostError, StepHandle
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.codec import Masks, encode
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.observe.profiling import RANK, Span, profiled
from pagewood.engine.runner.ranks.messages import Constrain, Launch, Spans, StartSpans, TakeSpans, ToRank
from pagewood.engine.runner.ranks.segment import Segment


class Ranks(Protocol):
    """The group of a model, as rank 0 uses it in every step; see `Group`."""

    @property
    def segment(self) -> Segment:
        """What the ranks share."""
        ...

    def check(self) -> None:
        """Raise `RunnerLostError` if the group has ended."""
        ...

    def tell_all(self, message: ToRank) -> None:
        """Send a message to all other ranks."""
        ...

    def spans(self) -> Sequence[Spans]:
        """Wait for what each other rank has recorded."""
        ...

    def agree(self, number: int) -> None:
        """Wait until all ranks have ended a step, and raise `RunnerLostError` if they differ."""
        ...

    def end(self, rank: int, reason: str) -> None:
        """End the group because of a rank."""
        ...

    def close(self) -> None:
        """End all other ranks."""
        ...


class RankedRunner:
    """Gives every batch to all ranks. Invariant: a result is returned when all ranks have ended its step and agree.

    So pages that a step has written are complete in the memory of every rank when the step has been waited for.

    Args:
        runner: of this process, which is rank 0.
        group: all ranks.
    """

    __slots__ = ("_group", "_number", "_runner")

    def __init__(self, runner: Runner, group: Ranks) -> None:
        self._runner = runner
        self._group = group
        self._number = 0
        """Number of the step that was launched last."""  # written by: launch

    def launch(self, batch: Batch) -> StepHandle:
        """Give a batch to all ranks.

        Raises:
            RunnerLostError: the group has ended.
        """
        group, number = self._group, self._number + 1
        group.check()
        group.tell_all(Launch(number=number, batch=encode(batch)))
        group.segment.launched[0, 0] = number  # a launch may wait for the other ranks
        try:
            handle = self._runner.launch(batch)
        except BaseException as error:  # the other ranks wait for this one
            group.end(0, f"rank 0 could not launch a step: {error!r}")
            raise
        self._number = number
        return _RankedHandle(handle, group, number)

    def check(self) -> None:
        """Raise `RunnerLostError` if the group has ended."""
        self._group.check()

    def start_spans(self) -> None:
        """Record the steps of all ranks from now on."""
        self._group.tell_all(StartSpans())
        if (own := profiled(self._runner)) is not None:
            own.start_spans()

    def take_spans(self) -> tuple[Sequence[Span], int]:
        """Return what all ranks have recorded; the details of a span name its rank, unless that is rank 0."""
        own = profiled(self._runner)
        found, num_dropped = ((), 0) if own is None else own.take_spans()
        spans = list(found)
        self._group.tell_all(TakeSpans())
        for rank, answer in enumerate(self._group.spans(), 1):
            spans += [span._replace(details={**span.details, RANK: rank}) for span in answer.spans]
            num_dropped += answer.num_dropped
        return spans, num_dropped

    def close(self) -> None:
        """End all ranks."""
        self._group.close()
        self._runner.close()


class _RankedHandle:
    """A step that all ranks compute."""

    __slots__ = ("_group", "_handle", "_number")

    def __init__(self, handle: StepHandle, group: Ranks, number: int) -> None:
        self._handle = handle
        self._group = group
        self._number = number

    def wait(self) -> StepResult:
        """Wait for all ranks, and return the result."""
        try:
            result = self._handle.wait()
        except RunnerLostError:
            self._group.check()  # it knows on which host
            raise
        except Exception:
            self._group.agree(self._number)  # it has failed on all of them, or on this one only
            raise
        self._group.agree(self._number)
        return result

    def drafts(self) -> Sequence[Sequence[int]]:
        """Return the drafts of rank 0, which are those of all ranks."""
        assert isinstance(self._handle, ConstrainedHandle)
        return self._handle.drafts()

    def constrain(self, masks: Int32) -> None:
        """Give the masks to all ranks."""
        assert isinstance(self._handle, ConstrainedHandle)
        try:
            self._group.tell_all(Constrain(masks=encode(Masks(masks=masks))))
        finally:  # otherwise this rank would wait for ever
            self._handle.constrain(masks)
