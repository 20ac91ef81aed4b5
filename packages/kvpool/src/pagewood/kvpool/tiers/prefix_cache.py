"""What a tiered index needs of the cache whose pages lie on the device."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from pagewood.kvpool.tiers.arrays import Int32


class Match(Protocol):
    """The longest cached prefix of some tokens."""

    @property
    def num_tokens(self) -> int:
        """Its length, whole pages."""
        ...

    @property
    def pages(self) -> Int32:
        """`[num_tokens / page_size] int32`, page ids; owned by the cache."""
        ...

    @property
    def node(self) -> Any:
        """Handle to lock it by."""
        ...


class Insertion(Protocol):
    """What the cache did with offered pages."""

    @property
    def num_existing(self) -> int:
        """Leading pages that it had already: the offered ones stay the caller's."""
        ...

    @property
    def node(self) -> Any:
        """Handle of the whole inserted prefix."""
        ...


class PrefixCache(Protocol):
    """Token prefix to page ids, such as `pagewood.radixcache.RadixCache`. Owns the pages that it adopted."""

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

    def match(self, tokens: Int32, namespace: str | None = None) -> Match:
        """Find the longest cached prefix; it counts as a use."""
        ...

    def peek(self, tokens: Int32, namespace: str | None = None) -> Match:
        """Find the longest cached prefix; it does not count as a use."""
        ...

    def insert(self, tokens: Int32, pages: Int32, namespace: str | None = None, *, after: Any = None) -> Insertion:
        """Adopt the pages that are lacking; tokens and pages are those that follow the locked prefix `after`."""
        ...

    def lock(self, node: Any) -> Any:
        """Keep a prefix from eviction; return the handle that unlocks it."""
        ...

    def unlock(self, node: Any) -> None:
        """Undo one lock."""
        ...

    def evict(self, num_pages: int) -> Int32:
        """Disown up to num_pages unlocked pages and return them."""
        ...


@runtime_checkable
class WatchedCache(PrefixCache, Protocol):
    """A prefix cache with live matches, such as `pagewood.radixcache.RadixCache`."""

    def watch_group(self) -> Any:
        """Return a group of live matches, none yet."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """Handle of a cached prefix: the cache's own, and the key of the prefix's last page."""

    handle: Any
    key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredMatch:
    """What is on the device of some tokens.

    Attributes:
        num_tokens: its length, whole pages.
        pages: `[num_tokens / page_size] int32`, page ids; owned by the index.
        node: handle to lock it by.
    """

    num_tokens: int
    pages: Int32
    node: Prefix


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredInsertion:
    """What the index did with offered pages.

    Attributes:
        num_existing: leading pages that it had already: the offered ones stay the caller's.
        node: handle of the whole inserted prefix.
    """

    num_existing: int
    node: Prefix
