"""Adapters of a model that is divided among ranks: all of them read their parts, and rank 0 says which are kept.

A batch says which adapter lies in which slot, so slots need no messages.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol
from weakref import ref

from pagewood.engine.api import Refusal
from pagewood.engine.core.adapter import LoadedAdapter
from pagewood.engine.runner.ranks.messages import (
    AdapterRead,
    DropAdapter,
    FromRank,
    KeepAdapter,
    ReadAdapter,
)
from pagewood.engine.runner.ranks.ranked_weights import AnsweringGroup


class PartSource(Protocol):
    """Reads the part of one rank; see `core.memory.adapters.AdapterSource`."""

    def load(self, folder: str) -> Future[LoadedAdapter | Refusal]:
        """Begin to read a folder."""
        ...

    def keep(self, number: int, weights: object) -> None:
        """Let the runner find the weights of an adapter by its number, as long as they are referred to."""
        ...

    def close(self) -> None:
        """Read no more folders."""
        ...


@dataclass(slots=True, kw_only=True, weakref_slot=True)
class _Parts:
    """An adapter on all ranks. The others keep their parts as long as rank 0 refers to this."""

    load: int
    """Number of the load that has read it."""
    own: object
    """The part of rank 0."""


class RankedAdapters:
    """Lets all ranks read adapters; satisfies `core.memory.adapters.AdapterSource`.

    Invariant: every rank has its part of an adapter before a step names it, and until the last such step has ended.

    Args:
        source: reads the part of this process, which is rank 0.
        group: all ranks.
    """

    __slots__ = ("_group", "_held", "_num_loads", "_source")

    def __init__(self, source: PartSource, group: AnsweringGroup) -> None:
        self._source = source
        self._group = group
        self._num_loads = 0  # written by: load
        self._held: dict[int, ref[_Parts]] = {}
        """What ranks have read, by the number of the load."""  # contents written by: hold, forget_unused

    def load(self, folder: str) -> Reading:
        """Let all ranks begin to read a folder."""
        self._num_loads += 1
        self._group.tell_all(ReadAdapter(number=self._num_loads, folder=folder))
        return Reading(self._source.load(folder), self._group, self._num_loads, self.hold)

    def keep(self, number: int, weights: object) -> None:
        """Let the runner of each rank find its part by the number of the adapter."""
        assert isinstance(weights, _Parts)
        self._group.tell_all(KeepAdapter(load=weights.load, number=number))
        self._source.keep(number, weights.own)

    def hold(self, parts: _Parts) -> None:
        """Let the other ranks keep their parts of what was read, as long as `parts` is referred to."""
        self._held[parts.load] = ref(parts)

    def forget_unused(self) -> None:
        """Let the other ranks drop what nothing refers to any more, so that no step in flight or later one names it."""
        for load in [load for load, parts in self._held.items() if parts() is None]:
            del self._held[load]
            self._group.tell_all(DropAdapter(load=load))

    def close(self) -> None:
        """Read no more folders."""
        self._source.close()


class Reading:
    """An adapter that all ranks are reading; satisfies `core.memory.adapters.Loading`."""

    __slots__ = ("_group", "_hold", "_load", "_own")

    def __init__(
        self,
        own: Future[LoadedAdapter | Refusal],
        group: AnsweringGroup,
        load: int,
        hold: Callable[[_Parts], None],
    ) -> None:
        """Wait for `own` part and those of the others; `hold` gets what was read."""
        self._own = own
        self._group = group
        self._load = load
        self._hold = hold

    def done(self) -> bool:
        """Whether all ranks have read their parts, or cannot."""
        return self._own.done() and self._group.has_answers(AdapterRead, self._load)

    def result(self) -> LoadedAdapter | Refusal:
        """Return the adapter, or why a rank cannot use it.

        Raises:
            RunnerLostError: the group has ended.
        """
        own, others = self._own.result(), self._group.answers(AdapterRead, self._load)
        parts = _Parts(load=self._load, own=None if isinstance(own, Refusal) else own.weights)
        self._hold(parts)
        if isinstance(own, Refusal):
            return own
        for rank, other in enumerate(others, 1):
            if other.refusal is not None:
                return Refusal(message=f"rank {rank}: {other.refusal.message}", code=other.refusal.code)
            if other.version != own.version:
                message = (
                    f"the folder of an adapter must have the same contents for all ranks, got others on rank {rank}"
                )
                return Refusal(message=message, code="adapter_invalid")
        return replace(own, weights=parts)


class FollowedAdapters:
    """The adapters of a rank other than 0.

    Args:
        source: reads its part.
        talk: sends messages to rank 0, from any thread.
    """

    __slots__ = ("_parts", "_source", "_talk")

    def __init__(self, source: PartSource, talk: Callable[[FromRank], None]) -> None:
        self._source = source
        self._talk = talk
        self._parts: dict[int, Future[LoadedAdapter | Refusal]] = {}
        """By the number of the load."""  # contents written by: read, drop

    def read(self, number: int, folder: str) -> None:
        """Begin to read a part, and say later whether it can be used."""
        self._parts[number] = self._source.load(folder)
        self._parts[number].add_done_callback(lambda found: self._say(number, found))

    def keep(self, load: int, number: int) -> None:
        """Let the runner find a part by the number of its adapter; it has been read."""
        loaded = self._parts[load].result()
        assert isinstance(loaded, LoadedAdapter)
        self._source.keep(number, loaded.weights)

    def drop(self, load: int) -> None:
        """Forget a part."""
        del self._parts[load]

    def close(self) -> None:
        """Read no more folders."""
        self._source.close()

    def _say(self, number: int, found: Future[LoadedAdapter | Refusal]) -> None:
        if found.cancelled():
            return
        loaded = found.result()
        if isinstance(loaded, Refusal):
            self._talk(AdapterRead(number=number, version=None, refusal=loaded))
        else:
            self._talk(AdapterRead(number=number, version=loaded.version, refusal=None))
