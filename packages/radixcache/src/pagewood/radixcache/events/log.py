"""The recent history of a cache, for any number of consumers."""

import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from pagewood.radixcache.arrays import Int32
from pagewood.radixcache.cache import RadixCache
from pagewood.radixcache.events.event import AllBlocksCleared, BlockRemoved, BlockStored, Event
from pagewood.radixcache.events.names import BlockNames
from pagewood.radixcache.events.update import EventBatch, Position, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """What `EventLog.stored` was told."""

    namespace: str | None
    parent_page: int | None
    tokens: Int32
    pages: Int32


@dataclass(frozen=True, slots=True, kw_only=True)
class _Removed:
    """What `EventLog.removed` was told."""

    pages: Int32


_Change: TypeAlias = _Stored | _Removed | AllBlocksCleared


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """A change and the names of its pages; a fifth of the memory of the event that is made of it."""

    change: _Change
    parent_block_hash: bytes | None
    block_hashes: list[bytes]


class EventLog:
    """Follows a cache, and tells whoever asks what has happened to its blocks since they last asked.

    Invariant: `_named` and then `_changes` are all that happened after epoch `_first`, and `_names` has the pages that
    were cached just before `_changes`. Without names there are no changes either, and `_first` is now.

    What is not used costs next to nothing. A change is kept as the cache tells it, and its blocks are named when
    somebody reads it. Where nobody does, the log forgets its changes when they are too many, and only counts from then
    on. Whoever asks for what it does not remember is given a snapshot. Like the cache, it is for one thread.

    Args:
        cache: what to follow from now on; it may hold something already.
        max_pages: how many pages the changes may have that it remembers, and how many those that nobody has read yet.
            One takes about 100 bytes, and 4 for each of its tokens.
        clock: seconds since 1970.

    Raises:
        ValueError: `max_pages` is less than 1.
    """

    __slots__ = (
        "_cache", "_changes", "_clock", "_epoch", "_first", "_log_id", "_max_pages", "_named", "_names",
        "_num_changed_pages", "_num_named_pages",
    )  # fmt: skip

    def __init__(self, cache: RadixCache, *, max_pages: int = 100_000, clock: Callable[[], float] = time.time) -> None:
        if max_pages < 1:
            raise ValueError(f"max_pages must be >= 1, got {max_pages}")
        self._cache = cache
        self._max_pages = max_pages
        self._clock = clock
        self._log_id = uuid.uuid4().hex
        self._epoch = 0  # written by: _record
        self._first = 0  # written by: _record, _forget, _name_changes
        self._named: deque[_Named] = deque()  # written by: _forget, _name_changes
        self._num_named_pages = 0  # written by: _forget, _name_changes
        self._changes: list[_Change] = []  # written by: _record, _forget, _name_changes
        self._num_changed_pages = 0  # written by: _record, _forget, _name_changes
        self._names: BlockNames | None = None  # written by: snapshot, _forget
        cache.observe(self)

    @property
    def position(self) -> Position:
        """Where the cache is now."""
        return Position(log_id=self._log_id, epoch=self._epoch)

    def read(self, position: Position | None = None) -> EventBatch | Snapshot:
        """Return what has happened since `position`, or a snapshot if the log does not remember all of it.

        The cost is that of the events, and of a hash for each block that nobody has read of before.

        Args:
            position: how far the reader is, `RemoteIndex.position`; None if it knows nothing yet.
        """
        if position is not None and position.log_id == self._log_id:
            self._name_changes()
            if self._first <= position.epoch <= self._epoch:
                newest_first = islice(reversed(self._named), self._epoch - position.epoch)
                events = [_event_of(named, self._cache.page_size) for named in newest_first]
                return EventBatch(start=position, events=events[::-1], ts=self._clock())
        return self.snapshot()

    def snapshot(self) -> Snapshot:
        """Return all that is cached; it costs a hash for each block that nobody has read of before."""
        self._name_changes()
        page_size = self._cache.page_size
        if self._names is None:
            self._names = BlockNames(page_size)
            for run in self._cache.runs():
                self._names.store(run.namespace, run.parent_page, run.tokens, run.pages)
        events = [
            BlockStored(
                block_hashes=self._names.of(run.pages),
                parent_block_hash=self._names.of_parent(run.parent_page),
                token_ids=run.tokens.tolist(),
                block_size=page_size,
                namespace=run.namespace,
            )
            for run in self._cache.runs()
        ]
        return Snapshot(end=self.position, events=events, block_size=page_size, ts=self._clock())

    def stored(self, namespace: str | None, parent_page: int | None, tokens: Int32, pages: Int32) -> None:
        """Take note, as an `Observer`, that pages have become cached."""
        self._record(_Stored(namespace=namespace, parent_page=parent_page, tokens=tokens, pages=pages))

    def removed(self, namespace: str | None, pages: Int32) -> None:
        """Take note, as an `Observer`, that pages are not cached any more."""
        self._record(_Removed(pages=pages))

    def cleared(self, namespace: str | None) -> None:
        """Take note, as an `Observer`, that a namespace was cleared, if nothing at all is left."""
        if not self._cache.num_pages:
            self._record(AllBlocksCleared())

    def _record(self, change: _Change) -> None:
        self._epoch += 1
        if self._names is None:  # nobody has asked since the last forgetting
            self._first = self._epoch
            return
        self._changes.append(change)
        self._num_changed_pages += _num_pages_of(change)
        if self._num_changed_pages > self._max_pages:
            self._forget()

    def _forget(self) -> None:
        """Remember nothing, and stop remembering until somebody wants a snapshot."""
        self._named.clear()
        self._changes.clear()
        self._num_named_pages = self._num_changed_pages = 0
        self._names = None
        self._first = self._epoch

    def _name_changes(self) -> None:
        """Name what the cache has told since the last time, and forget the oldest changes beyond `max_pages`."""
        if self._names is None:
            return
        for change in self._changes:
            self._named.append(_name(change, self._names))
        self._num_named_pages += self._num_changed_pages
        self._num_changed_pages = 0
        self._changes.clear()
        while self._num_named_pages > self._max_pages:
            self._num_named_pages -= _num_pages_of(self._named.popleft().change)
            self._first += 1


def _num_pages_of(change: _Change) -> int:
    return 1 if isinstance(change, AllBlocksCleared) else len(change.pages)


def _name(change: _Change, names: BlockNames) -> _Named:
    match change:
        case _Stored():
            parent = names.of_parent(change.parent_page)
            stored = names.store(change.namespace, change.parent_page, change.tokens, change.pages)
            return _Named(change=change, parent_block_hash=parent, block_hashes=stored)
        case _Removed():
            return _Named(change=change, parent_block_hash=None, block_hashes=names.remove(change.pages))
        case AllBlocksCleared():
            return _Named(change=change, parent_block_hash=None, block_hashes=[])


def _event_of(named: _Named, page_size: int) -> Event:
    match named.change:
        case _Stored() as stored:
            return BlockStored(
                block_hashes=named.block_hashes,
                parent_block_hash=named.parent_block_hash,
                token_ids=stored.tokens.tolist(),
                block_size=page_size,
                namespace=stored.namespace,
            )
        case _Removed():
            return BlockRemoved(block_hashes=named.block_hashes)
        case AllBlocksCleared() as cleared:
            return cleared
