"""The producer's side: the recent changes of a cache, for any number of consumers."""

import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeAlias

from pagewood.radixcache.arrays import Int32
from pagewood.radixcache.counts import require_count
from pagewood.radixcache.events.event import AllBlocksCleared, BlockRemoved, BlockStored, Event
from pagewood.radixcache.events.names import BlockNames
from pagewood.radixcache.events.update import EventBatch, Position, Snapshot
from pagewood.radixcache.namespaces import Namespace
from pagewood.radixcache.observer import Observer, Run


class ObservableCache(Protocol):
    """The cache that a log follows, such as `RadixCache`."""

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        ...

    @property
    def num_pages(self) -> int:
        """Number of cached pages."""
        ...

    def observe(self, observer: Observer) -> None:
        """Notify `observer` of every page that enters or leaves the cache."""
        ...

    def runs(self) -> Iterator[Run]:
        """Iterate over everything that is cached, parents first."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """The arguments of a call of `EventLog.stored`."""

    namespace: Namespace
    parent_page: int | None
    tokens: Int32
    pages: Int32


@dataclass(frozen=True, slots=True, kw_only=True)
class _Removed:
    """The arguments of a call of `EventLog.removed`."""

    pages: Int32


_Change: TypeAlias = _Stored | _Removed | AllBlocksCleared


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """A change and the names of its pages. It takes a fifth of the memory of the event that is made from it."""

    change: _Change
    parent_block_hash: bytes | None
    block_hashes: list[bytes]


class EventLog:
    """Records the changes of a cache, and returns to each consumer what has changed since its last position.

    Invariant: `_named` followed by `_changes` are all changes after epoch `_first`, and `_names` has the pages that
    were cached just before `_changes`. If `_names` is None, there are no changes and `_first` is the current epoch.

    An unused log costs very little. Changes are stored as the cache reports them; their blocks are named when a
    consumer reads them. If they are not read, the log drops its changes when there are too many, and from then on only
    counts. A consumer that asks for changes which the log no longer has gets a snapshot. Like the cache, it is not
    thread-safe.

    Args:
        cache: the cache to follow from now on; it need not be empty.
        max_pages: limit on the pages of the changes that the log keeps, and separately on the pages of changes that no
            consumer has read yet. A page takes about 100 bytes, plus 4 bytes for each of its tokens.
        clock: returns seconds since 1970.

    Raises:
        ValueError: `max_pages` is less than 1.
    """

    __slots__ = (
        "_cache", "_changes", "_clock", "_epoch", "_first", "_log_id", "_max_pages", "_named", "_names",
        "_num_changed_pages", "_num_named_pages",
    )  # fmt: skip

    def __init__(
        self, cache: ObservableCache, *, max_pages: int = 100_000, clock: Callable[[], float] = time.time
    ) -> None:
        self._cache = cache
        self._max_pages = require_count("max_pages", max_pages, least=1)
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
        """The current position of the cache."""
        return Position(log_id=self._log_id, epoch=self._epoch)

    def read(self, position: Position | None = None) -> EventBatch | Snapshot:
        """Return the events since `position`, or a snapshot if the log no longer has all of them.

        The cost is that of the events, plus a hash for each block that no consumer has read before.

        Args:
            position: how far the consumer is, see `RemoteIndex.position`; None if it knows nothing yet.
        """
        if position is not None and position.log_id == self._log_id:
            self._name_changes()
            if self._first <= position.epoch <= self._epoch:
                newest_first = islice(reversed(self._named), self._epoch - position.epoch)
                events = [_event_of(named, self._cache.page_size) for named in newest_first]
                return EventBatch(start=position, events=events[::-1], ts=self._clock())
        return self.snapshot()

    def snapshot(self) -> Snapshot:
        """Return everything that is cached, at the cost of a hash for each block that no consumer has read before."""
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

    def stored(self, namespace: Namespace, parent_page: int | None, tokens: Int32, pages: Int32) -> None:
        """Record that pages have been cached; part of `Observer`."""
        self._record(_Stored(namespace=namespace, parent_page=parent_page, tokens=tokens, pages=pages))

    def removed(self, namespace: Namespace, pages: Int32) -> None:
        """Record that pages are no longer cached; part of `Observer`."""
        self._record(_Removed(pages=pages))

    def cleared(self, namespace: Namespace) -> None:
        """Record that a namespace was cleared, if the whole cache is empty now; part of `Observer`."""
        if not self._cache.num_pages:
            self._record(AllBlocksCleared())

    def _record(self, change: _Change) -> None:
        self._epoch += 1
        if self._names is None:  # no snapshot was requested since the last `_forget`
            self._first = self._epoch
            return
        self._changes.append(change)
        self._num_changed_pages += _num_pages_of(change)
        if self._num_changed_pages > self._max_pages:
            self._forget()

    def _forget(self) -> None:
        """Drop all changes, and record none until a snapshot is requested."""
        self._named.clear()
        self._changes.clear()
        self._num_named_pages = self._num_changed_pages = 0
        self._names = None
        self._first = self._epoch

    def _name_changes(self) -> None:
        """Name the changes recorded since the last call, and drop the oldest changes beyond `max_pages`."""
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
