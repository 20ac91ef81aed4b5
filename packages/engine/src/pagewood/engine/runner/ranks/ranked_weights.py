"""New weights for a model that is divided among ranks: all of them read their parts, and change at the same step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from pagewood.engine.api import Refusal
from pagewood.engine.core.weights import ReadingWeights, ReadWeights
from pagewood.engine.runner.ranks.messages import (
    Answer,
    ExchangeWeights,
    FromRank,
    ReadNewWeights,
    ToRank,
    WeightsExchanged,
    WeightsRead,
)
from pagewood.engine.weight_commands import WeightCommand


class PartSource(Protocol):
    """Reads the part of one rank; see `core.weights.WeightSource`."""

    def read(self, command: WeightCommand) -> Future[ReadWeights | Refusal]:
        """Begin to read the weights of an update."""
        ...

    def exchange(self) -> str | None:
        """Compute later steps with what was read last; return why not, or None."""
        ...

    def close(self) -> None:
        """Read no more weights."""
        ...


class AnsweringGroup(Protocol):
    """The group of a model, as rank 0 uses it to change weights; see `Group`."""

    def tell_all(self, message: ToRank) -> None:
        """Send a message to all other ranks."""
        ...

    def has_answers(self, kind: type[FromRank], number: int = 0) -> bool:
        """Return whether `answers` would not wait."""
        ...

    def answers(self, kind: type[Answer], number: int = 0) -> list[Answer]:
        """Wait for an answer of each other rank."""
        ...

    def end(self, rank: int, reason: str) -> None:
        """End the group because of a rank."""
        ...

    def check(self) -> None:
        """Raise `RunnerLostError` if the group has ended."""
        ...


class RankedWeights:
    """The weights of all ranks; satisfies `core.weights.WeightSource`. Invariant: all compute with the same version.

    A rank that cannot change when others can ends the group.

    Args:
        source: reads the part of this process, which is rank 0.
        group: all ranks.
    """

    __slots__ = ("_group", "_source")

    def __init__(self, source: PartSource, group: AnsweringGroup) -> None:
        self._source = source
        self._group = group

    def read(self, command: WeightCommand) -> ReadingWeights:
        """Let all ranks begin to read their parts of an update."""
        self._group.tell_all(ReadNewWeights(command=command))
        return _Reading(self._source.read(command), self._group)

    def exchange(self) -> str | None:
        """Let all ranks compute later steps with what they have read; return why the old weights stay, or None."""
        self._group.tell_all(ExchangeWeights())
        own = self._source.exchange()
        found = [own, *(one.why_not for one in self._group.answers(WeightsExchanged))]
        failed = [rank for rank, why_not in enumerate(found) if why_not is not None]
        if 0 < len(failed) < len(found):
            self._group.end(failed[0], f"rank {failed[0]} could not exchange its weights: {found[failed[0]]}")
            self._group.check()
        return own

    def close(self) -> None:
        """Read no more weights."""
        self._source.close()


class _Reading:
    """Weights that all ranks are reading."""

    __slots__ = ("_group", "_own")

    def __init__(self, own: Future[ReadWeights | Refusal], group: AnsweringGroup) -> None:
        self._own = own
        self._group = group

    def done(self) -> bool:
        """Whether all ranks have read their parts, or cannot."""
        return self._own.done() and self._group.has_answers(WeightsRead)

    def result(self) -> ReadWeights | Refusal:
        """Return what is known of them, or why a rank cannot use them."""
        own = self._own.result()
        refusals = [one.refusal for one in self._group.answers(WeightsRead) if one.refusal is not None]
        return refusals[0] if refusals and not isinstance(own, Refusal) else own


class FollowedWeights:
    """The weights of a rank other than 0.

    Args:
        source: reads its part.
        talk: sends messages to rank 0, from any thread.
    """

    __slots__ = ("_source", "_talk")

    def __init__(self, source: PartSource, talk: Callable[[FromRank], None]) -> None:
        self._source = source
        self._talk = talk

    def read(self, command: WeightCommand) -> None:
        """Begin to read a part, and say later whether it can be used."""
        self._source.read(command).add_done_callback(self._say)

    def exchange(self) -> None:
        """Compute later steps with what was read last, and say so."""
        self._talk(WeightsExchanged(why_not=self._source.exchange()))

    def close(self) -> None:
        """Read no more weights."""
        self._source.close()

    def _say(self, found: Future[ReadWeights | Refusal]) -> None:
        if not found.cancelled():
            result = found.result()
            self._talk(WeightsRead(refusal=result if isinstance(result, Refusal) else None))
