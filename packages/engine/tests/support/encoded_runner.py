"""A runner that gets every batch and gives every result as bytes, as if it were in another process."""

from __future__ import annotations

from collections.abc import Sequence

from pagewood.engine.core.loop import ConstrainedHandle, Runner, StepHandle
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.codec import Drafts, Masks, decode, encode
from pagewood.engine.core.messages.result import StepResult


class EncodedRunner:
    """Passes on what has been encoded and decoded."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def launch(self, batch: Batch) -> StepHandle:
        sent = decode(encode(batch))
        assert isinstance(sent, Batch)
        return _EncodedHandle(self._runner.launch(sent))

    def close(self) -> None:
        self._runner.close()


class _EncodedHandle:
    def __init__(self, handle: StepHandle) -> None:
        self._handle = handle

    def wait(self) -> StepResult:
        found = decode(encode(self._handle.wait()))
        assert isinstance(found, StepResult)
        return found

    def drafts(self) -> Sequence[Sequence[int]]:
        assert isinstance(self._handle, ConstrainedHandle)
        found = decode(encode(Drafts.of(self._handle.drafts())))
        assert isinstance(found, Drafts)
        return found.by_grant()

    def constrain(self, masks: Int32) -> None:
        assert isinstance(self._handle, ConstrainedHandle)
        sent = decode(encode(Masks(masks=masks)))
        assert isinstance(sent, Masks)
        self._handle.constrain(sent.masks)
