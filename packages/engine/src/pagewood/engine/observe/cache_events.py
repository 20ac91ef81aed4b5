"""The changes of an engine's prefix cache and of its lower tiers, as batches of events for routers."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from pagewood.kvpool.tiers import PagesRemoved, PagesStored, TieredIndex, TierLog
from pagewood.kvpool.tiers.tier_log import Tier
from pagewood.radixcache.arrays import Int32
from pagewood.radixcache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventLog,
    Position,
    Snapshot,
    router_events,
)
from pagewood.radixcache.events.hashing import chain_hashes, root_hash
from pagewood.radixcache.events.log import ObservableCache
from pagewood.radixcache.events.router import Form, Medium
from pagewood.radixcache.namespaces import Namespace

_MEDIA: dict[Tier, Medium] = {"host": "CPU", "disk": "STORAGE"}


class CacheEvents:
    """Reads the changes of a prefix cache since the last read; used in the engine's thread.

    If the cache has a host or a disk tier, their events follow those of the device, under the same names of blocks and
    with the medium "CPU" or "STORAGE". A store that engines share is left out: all engines can fetch its pages, and it
    reports no evictions.

    Invariant: a reader that applies all batches in order knows what was cached at the last read, in each medium. A
    batch that starts from scratch begins with `AllBlocksCleared`, which concerns all media.

    Args:
        cache: returns the prefix cache of this moment; an engine may replace it.
        form: of the events, see `router_events`.

    Raises:
        ValueError: the cache does not report its changes.
    """

    __slots__ = ("_cache", "_followed", "_form", "_log", "_page_size", "_position", "_tiers")

    def __init__(self, cache: Callable[[], object], *, form: Form = "map") -> None:
        self._cache = cache
        self._form: Form = form
        self._tiers: TierLog | None = None  # written by: _follow
        self._follow(cache())

    def read(self) -> list[object]:
        """Return the events since the last read as plain data; the first time, those of the whole cache."""
        cache = self._cache()
        if cache is not self._followed:
            self._follow(cache)
        update = None if self._position == self._log.position else self._log.read(self._position)
        is_anew = isinstance(update, Snapshot)
        events: list[Event] = [AllBlocksCleared()] if is_anew else []
        if update is not None:
            self._position = update.end
            # A cleared device has named all removed blocks, and the tiers still have them.
            events += [e for e in update.events if self._tiers is None or not isinstance(e, AllBlocksCleared)]
        plain = router_events(events, form=self._form)
        if self._tiers is not None:
            plain += self._tier_events(self._tiers.snapshot() if is_anew else self._tiers.read())
        return plain

    def begin_anew(self) -> None:
        """Let the next batch have the whole cache: its reader has lost some."""
        self._position = None

    def _tier_events(self, changes: list[PagesStored | PagesRemoved]) -> list[object]:
        return [
            plain
            for change in changes
            for plain in router_events([self._event_of(change)], form=self._form, medium=_MEDIA[change.tier])
        ]

    def _event_of(self, change: PagesStored | PagesRemoved) -> Event:
        if isinstance(change, PagesRemoved):
            return BlockRemoved(block_hashes=change.names)
        return BlockStored(
            block_hashes=change.names,
            parent_block_hash=change.parent,
            token_ids=change.tokens.tolist(),
            block_size=self._page_size,
            namespace=change.namespace,
        )

    def _follow(self, cache: object) -> None:
        if not hasattr(cache, "observe"):
            raise ValueError(f"cache must report its changes to be followed, got {type(cache).__name__}")
        self._followed = cache  # written by: _follow
        observable = cast("ObservableCache", cache)
        self._page_size = observable.page_size  # written by: _follow
        self._log = EventLog(observable)  # written by: _follow
        self._position: Position | None = None  # written by: _follow, read, begin_anew
        if not hasattr(cache, "follow_tiers"):
            return
        if self._tiers is None:  # the tiers outlive a cache, and so do the names of their pages
            self._tiers = TierLog(_BlockNames(self._page_size), page_size=self._page_size)
        cast("TieredIndex", cache).follow_tiers(self._tiers)


class _BlockNames:
    """Names the pages of tiers as the events of the device's cache do; satisfies `tier_log.Names`."""

    __slots__ = ("_page_size",)

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size

    def root(self, namespace: Namespace) -> bytes:
        """Return the name that the first block of a sequence follows."""
        return root_hash(namespace)

    def extend(self, parent: bytes, tokens: Int32) -> list[bytes]:
        """Return the names of the blocks of `tokens`."""
        return list(chain_hashes(parent, tokens, self._page_size))
