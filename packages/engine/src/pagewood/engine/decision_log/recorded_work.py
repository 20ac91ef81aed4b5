"""Work beside the steps, such as reading an adapter: what records its end and result, and what repeats them.

A replay cannot compute when another thread has ended, so that is an input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from pagewood.engine.api import Image, Refusal
from pagewood.engine.core.adapter import LoadedAdapter
from pagewood.engine.core.images import ImageEncoder, PromptImages
from pagewood.engine.core.memory.adapters import AdapterSource
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.weights import ReadWeights, WeightSource
from pagewood.engine.decision_log.turn import Turn
from pagewood.engine.weight_commands import WeightCommand

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

Values = Mapping[str, Any]
"""What decisions depend on of a result, by name; of a refusal, its `code` and `param`."""


class Recording(Protocol):
    """What a recorder is for the parts of an engine that it wraps."""

    @property
    def turn(self) -> Turn:
        """The turn that is not over yet."""
        ...

    def begin(self) -> int:
        """Return the number of work that begins."""
        ...


class Work(Protocol[R_co]):
    """Work that has begun."""

    def done(self) -> bool:
        """Return whether there is a result."""
        ...

    def result(self) -> R_co | Refusal:
        """Return the result, or why there is none; call it only when done."""
        ...


class RecordedWork(Generic[R]):
    """Work whose result is kept when the engine takes it.

    Args:
        inner: the work.
        recording: keeps it.
        values_of: returns what decisions depend on of a result.
    """

    def __init__(self, inner: Work[R], recording: Recording, values_of: Callable[[R], Values]) -> None:
        self._inner = inner
        self._recording = recording
        self._values_of = values_of
        self.number = recording.begin()
        """The number of this work in the log."""
        self.done = inner.done

    def result(self) -> R | Refusal:
        """Return the result, or why there is none."""
        found = self._inner.result()
        values = {"code": found.code, "param": found.param} if isinstance(found, Refusal) else self._values_of(found)
        self._recording.turn.ends.append((self.number, values))
        return found


class LoggedWork:
    """The work of a log, whose results become known while it is replayed."""

    def __init__(self) -> None:
        self._num_begun = 0  # written by: begin
        self.results: dict[int, Values] = {}
        """Those that are known, by number."""  # contents written by: replay

    def begin(self) -> int:
        """Return the number of work that begins."""
        self._num_begun += 1
        return self._num_begun - 1


class ReplayedWork(Generic[R]):
    """Work that ends as in the log.

    Args:
        logged: has its result.
        made: returns a result from what the log has of it.
    """

    def __init__(self, logged: LoggedWork, made: Callable[[Values], R]) -> None:
        self._logged = logged
        self._made = made
        self.number = logged.begin()
        """The number of this work in the log."""

    def done(self) -> bool:
        """Whether the log has its result by now."""
        return self.number in self._logged.results

    def result(self) -> R | Refusal:
        """Return the result, or a refusal with the same code."""
        values = self._logged.results[self.number]
        if "code" in values:
            return Refusal(message="as in the log", code=values["code"], param=values["param"])
        return self._made(values)


class RecordedAdapters:
    """A source of adapters whose results are kept."""

    def __init__(self, inner: AdapterSource, recording: Recording) -> None:
        self._inner = inner
        self._recording = recording
        self.keep, self.forget_unused, self.close = inner.keep, inner.forget_unused, inner.close

    def load(self, folder: str) -> RecordedWork[LoadedAdapter]:
        """Begin to read a folder."""
        return RecordedWork(self._inner.load(folder), self._recording, _adapter_values)


class ReplayedAdapters:
    """A source of adapters as they are in a log.

    Args:
        logged: the work of the log.
    """

    def __init__(self, logged: LoggedWork) -> None:
        self._logged = logged

    def load(self, folder: str) -> ReplayedWork[LoadedAdapter]:
        """Return an adapter that is read as in the log."""
        return ReplayedWork(self._logged, _loaded_adapter)

    def keep(self, number: int, weights: object) -> None:
        """Do nothing."""

    def forget_unused(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class RecordedWeights:
    """A source of weights whose results are kept, and whether each could be computed with."""

    def __init__(self, inner: WeightSource, recording: Recording) -> None:
        self._inner = inner
        self._recording = recording
        self.close = inner.close

    def read(self, command: WeightCommand) -> RecordedWork[ReadWeights]:
        """Begin to carry out a command."""
        return RecordedWork(self._inner.read(command), self._recording, lambda found: {"digest": found.digest})

    def exchange(self) -> str | None:
        """Let later steps compute with the weights that were read last; return why not, or None."""
        why_not = self._inner.exchange()
        self._recording.turn.exchanges.append(why_not is None)
        return why_not


class ReplayedWeights:
    """A source of weights as they are in a log.

    Args:
        logged: the work of the log.
        next_exchange: returns whether the next weights could be computed with.
    """

    def __init__(self, logged: LoggedWork, next_exchange: Callable[[], bool]) -> None:
        self._logged = logged
        self._next_exchange = next_exchange

    def read(self, command: WeightCommand) -> ReplayedWork[ReadWeights]:
        """Return weights that are read as in the log."""
        return ReplayedWork(self._logged, lambda values: ReadWeights(digest=values["digest"]))

    def exchange(self) -> str | None:
        """Compute with them, if that was possible."""
        return None if self._next_exchange() else "as in the log"

    def close(self) -> None:
        """Do nothing."""


class RecordedImages:
    """An encoder of images whose results are kept, and the versions of its tower when they are read."""

    def __init__(self, inner: ImageEncoder, recording: Recording) -> None:
        self._inner = inner
        self._recording = recording
        self.refusal, self.close = inner.refusal, inner.close

    @property
    def version(self) -> int:
        """How often the tower has changed."""
        found = self._inner.version
        self._recording.turn.towers.append(found)
        return found

    def encode(
        self, prompt: Int32, images: Sequence[Image], *, namespace: str | None, is_wanted: Callable[[], bool]
    ) -> RecordedWork[PromptImages]:
        """Begin to encode images."""
        inner = self._inner.encode(prompt, images, namespace=namespace, is_wanted=is_wanted)
        return RecordedWork(inner, self._recording, _image_values)


class ReplayedImages:
    """An encoder of images as they are in a log.

    Args:
        logged: the work of the log.
        next_version: returns the version of the tower that was read next.
    """

    def __init__(self, logged: LoggedWork, next_version: Callable[[], int]) -> None:
        self._logged = logged
        self._next_version = next_version

    @property
    def version(self) -> int:
        """How often the tower had changed."""
        return self._next_version()

    def refusal(self, prompt: Int32, images: Sequence[Image]) -> Refusal | None:
        """Return None: what was refused for its images is no request in the log."""
        return None

    def encode(
        self, prompt: Int32, images: Sequence[Image], *, namespace: str | None, is_wanted: Callable[[], bool]
    ) -> ReplayedWork[PromptImages]:
        """Return images that are encoded as in the log."""
        return ReplayedWork(self._logged, lambda values: _prompt_images(values, tuple(images)))

    def close(self) -> None:
        """Do nothing."""


def _image_values(images: PromptImages) -> Values:
    return {
        "spans": images.spans,
        "digests": images.digests,
        "see_each_other": images.see_each_other,
        "version": images.version,
    }


def _prompt_images(values: Values, sources: tuple[Image, ...]) -> PromptImages:
    spans = tuple((start, end) for start, end in values["spans"])
    return PromptImages(
        spans=spans,
        features=tuple(np.empty((end - start, 0), np.float32) for start, end in spans),
        digests=tuple(values["digests"]),
        positions=np.empty((3, 0), np.int32),
        see_each_other=values["see_each_other"],
        sources=sources,
        version=values["version"],
    )


def _adapter_values(adapter: LoadedAdapter) -> Values:
    return {"version": adapter.version, "invocation": adapter.invocation, "is_bound": adapter.is_bound}


def _loaded_adapter(values: Values) -> LoadedAdapter:
    return LoadedAdapter(
        version=values["version"],
        weights=None,
        invocation=tuple(values["invocation"]),
        is_bound=values["is_bound"],
    )
