"""What the engine asks of prefix caches, and the one that is always empty."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, runtime_checkable

import numpy as np

from pagewood.engine.core.cache_keys import Key
from pagewood.engine.core.messages.arrays import Int32


class Match(Protocol):
    """The longest cached prefix of some tokens."""

    @property
    def num_tokens(self) -> int:
        """Its length, whole pages."""
        ...

    @property
    def pages(self) -> Int32:
        """[num_tokens / page_size] page ids; owned by the cache."""
        ...

    @property
    def node(self) -> Any:
        """Handle for `lock`."""
        ...


class Insertion(Protocol):
    """What the cache did with offered pages."""

    @property
    def num_existing(self) -> int:
        """Leading pages that the cache already had; the caller still owns its duplicates of them."""
        ...

    @property
    def node(self) -> Any:
        """Handle of the whole prefix, for `lock`; the one that unlocks it, if it is locked."""
        ...


class PrefixCache(Protocol):
    """Maps token prefixes to page ids. Owns the pages that it has adopted."""

    @property
    def num_pages(self) -> int:
        """Pages it owns."""
        ...

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` can give back now."""
        ...

    @property
    def num_locked(self) -> int:
        """Pages on a locked path."""
        ...

    def match(self, tokens: Int32, namespace: Key = None) -> Match:
        """Return the longest cached prefix; this counts as a use."""
        ...

    def peek(self, tokens: Int32, namespace: Key = None) -> Match:
        """Return the longest cached prefix; this does not count as a use."""
        ...

    def insert(
        self, tokens: Int32, pages: Int32, namespace: Key = None, *, after: Any = None, relock: bool = False
    ) -> Insertion:
        """Adopt the pages that the cache lacks; tokens and pages are those that follow the locked prefix `after`.

        With `relock`, the whole prefix is locked then instead of `after`.
        """
        ...

    def lock(self, node: Any) -> Any:
        """Keep a prefix from eviction; return the handle that unlocks it."""
        ...

    def unlock(self, node: Any) -> None:
        """Undo one lock."""
        ...

    def evict(self, num_pages: int) -> Int32:
        """Remove up to `num_pages` unlocked pages and return them; the caller owns them."""
        ...


@runtime_checkable
class TieredCache(PrefixCache, Protocol):
    """A prefix cache that keeps evicted pages in lower tiers (host memory, disk) and brings them back."""

    def recall(self, tokens: Int32, namespace: Key = None, *, priority: int = 0) -> Any | None:
        """Start to copy back what lower tiers have of these tokens; None: lower tiers have nothing.

        Its copies go before those of lower priority that have not begun.
        """
        ...

    def advance(
        self,
        recall: Any,
        take: Callable[[int], Int32 | None],
        *,
        take_state: Callable[[], int | None] | None = None,
        priority: int | None = None,
    ) -> bool:
        """Continue without waiting; return whether to call again later.

        `take` gives pages to the cache, or None, and `take_state` the place of a state.
        """
        ...

    def cancel(self, recall: Any) -> None:
        """End a recall, finished or not."""
        ...

    def poll(self) -> None:
        """Register finished copies and start new ones."""
        ...

    def clear(self) -> Int32:
        """Drop what is not in use from device and host, and return the device's pages; the caller owns them."""
        ...

    def close(self) -> None:
        """Store what must survive the process, and end."""
        ...


@runtime_checkable
class SharedCache(PrefixCache, Protocol):
    """A prefix cache with lower tiers, some of which other engines may use too."""

    def probe(self, tokens: Int32, namespace: Key = None) -> Any:
        """Ask how much of these tokens the device and all tiers have; copies nothing."""
        ...

    def num_found(self, probe: Any) -> int | None:
        """Return the tokens that a probe has found; None: a tier may still answer."""
        ...

    def num_near(self, tokens: Int32, namespace: Key = None) -> int:
        """Return how many leading tokens the device and the nearest tiers have, of which the latter answer at once."""
        ...

    def keys_of(self, tokens: Int32, namespace: Key = None) -> list[bytes]:
        """Return the keys of the whole pages of these tokens."""
        ...

    def unstored(self) -> set[bytes]:
        """Return the keys of the pages that are on their way to tiers that other engines may use."""
        ...


@runtime_checkable
class KeepingCache(PrefixCache, Protocol):
    """A prefix cache with lower tiers, to which parts of pages can be copied before they are given up."""

    def keep(self, pages: Int32) -> None:
        """Copy cached pages that are going to lose a part of what they hold."""
        ...

    def finish_copies(self) -> None:
        """Wait for the copies from the device that have begun."""
        ...


@runtime_checkable
class ReleasingCache(PrefixCache, Protocol):
    """A prefix cache that can drop a branch that is not needed any more."""

    def release(self, node: Any, *, keeps_longer: bool = False) -> Int32:
        """Remove the unlocked pages that only this prefix needs, unless longer ones follow; the caller owns them."""
        ...


class FoundPrefix(Protocol):
    """Why a cached prefix is not longer."""

    @property
    def cause(self) -> Enum:
        """One of COMPLETE, PAGE_ROUNDING, EVICTED, OTHER_NAMESPACE and NEVER_SEEN."""
        ...

    @property
    def num_tokens(self) -> int:
        """Length of the cached prefix, whole pages."""
        ...

    @property
    def first_difference(self) -> int:
        """Position of the first token after it that differs from everything cached there in the namespace."""
        ...

    @property
    def num_possible_tokens(self) -> int:
        """Its length without the cause."""
        ...

    @property
    def evicted_by(self) -> str | None:
        """What evicted it; None for other causes."""
        ...

    @property
    def evicted_at_s(self) -> float | None:
        """When, in seconds of the cache's clock; None for other causes."""
        ...


@runtime_checkable
class ExplainingCache(Protocol):
    """A prefix cache that knows why a cached prefix is not longer."""

    def explain(
        self, tokens: Int32, namespace: Key = None, *, searches_others: bool, needs_snapshot: bool = ...
    ) -> FoundPrefix:
        """Return why the cached prefix of these tokens is not longer; this does not count as a use."""
        ...


@runtime_checkable
class CountingTiers(Protocol):
    """A cache with lower tiers that counts the pages it copies."""

    @property
    def counters(self) -> Any:
        """A dataclass of counts."""
        ...


@dataclass(frozen=True, slots=True)
class _NoMatch:
    num_tokens: int
    pages: Int32
    node: None


@dataclass(frozen=True, slots=True)
class _NothingAdopted:
    num_existing: int
    node: None


class NoPrefixCache:
    """A prefix cache that is always empty, for engines without prefix caching."""

    num_pages = 0
    num_evictable = 0
    num_locked = 0

    def match(self, tokens: Int32, namespace: Key = None) -> _NoMatch:
        """Find nothing."""
        return _NoMatch(0, np.empty(0, np.int32), None)

    peek = match

    def insert(
        self,
        tokens: Int32,
        pages: Int32,
        namespace: Key = None,
        *,
        after: object = None,
        relock: bool = False,
    ) -> _NothingAdopted:
        """Adopt nothing."""
        return _NothingAdopted(len(pages), None)

    def lock(self, node: object) -> None:
        """Do nothing."""

    def unlock(self, node: object) -> None:
        """Do nothing."""

    def evict(self, num_pages: int) -> Int32:
        """Return nothing."""
        return np.empty(0, np.int32)
