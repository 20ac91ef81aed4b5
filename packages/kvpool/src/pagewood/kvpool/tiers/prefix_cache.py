"""The interface that a tiered index requires of the device's prefix cache, and the handles that the index returns."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from pagewood.kvpool.tiers.pages.arrays import Int32
from pagewood.kvpool.tiers.pages.keys import Namespace


class Match(Protocol):
    """The longest cached prefix of some tokens."""

    @property
    def num_tokens(self) -> int:
        """Its length in tokens, whole pages."""
        ...

    @property
    def pages(self) -> Int32:
        """`[num_tokens / page_size] int32`, page ids; owned by the cache."""
        ...

    @property
    def node(self) -> Any:
        """Handle to lock it with."""
        ...


class Insertion(Protocol):
    """The result of offering pages to the cache."""

    @property
    def num_existing(self) -> int:
        """Number of leading pages that were already cached; the caller keeps the pages that it offered for them."""
        ...

    @property
    def node(self) -> Any:
        """Handle of the whole inserted prefix."""
        ...


class PrefixCache(Protocol):
    """Maps token prefixes to page ids, as `pagewood.radixcache.RadixCache` does. Owns the pages that it adopted."""

    @property
    def num_pages(self) -> int:
        """Number of pages that it owns."""
        ...

    @property
    def num_evictable(self) -> int:
        """Number of pages that `evict` can return now."""
        ...

    @property
    def num_locked(self) -> int:
        """Number of pages on a locked path."""
        ...

    def match(self, tokens: Int32, namespace: Namespace = None) -> Match:
        """Find the longest cached prefix; this counts as a use."""
        ...

    def peek(self, tokens: Int32, namespace: Namespace = None) -> Match:
        """Find the longest cached prefix; this does not count as a use."""
        ...

    def insert(self, tokens: Int32, pages: Int32, namespace: Namespace = None, *, after: Any = None) -> Insertion:
        """Adopt the pages that are not cached yet; tokens and pages follow the locked prefix `after`."""
        ...

    def lock(self, node: Any) -> Any:
        """Protect a prefix from eviction; return the handle that unlocks it."""
        ...

    def unlock(self, node: Any) -> None:
        """Undo one lock."""
        ...

    def evict(self, num_pages: int) -> Int32:
        """Disown up to `num_pages` unlocked pages and return them."""
        ...


@runtime_checkable
class SnapshotCache(PrefixCache, Protocol):
    """A prefix cache that owns places of states at the ends of prefixes, as `pagewood.radixcache.RadixCache` does."""

    @property
    def num_snapshots(self) -> int:
        """Number of places that it owns."""
        ...

    def match(self, tokens: Int32, namespace: Namespace = None, *, needs_snapshot: bool = False) -> Match:
        """Find the longest cached prefix, if need be with a state at its end; this counts as a use."""
        ...

    def peek(self, tokens: Int32, namespace: Namespace = None, *, needs_snapshot: bool = False) -> Match:
        """Find the same; this does not count as a use."""
        ...

    def attach(self, node: Any, snapshot: int) -> bool:
        """Adopt the place of the state at the end of a prefix; return False if the prefix has a state already."""
        ...

    def snapshot(self, node: Any) -> int | None:
        """Return the place of the state at the end of a prefix, or None."""
        ...

    def evict_snapshots(self, num_snapshots: int) -> Int32:
        """Disown the places of prefixes that are gone, and further ones up to `num_snapshots`, and return them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """Handle of a cached prefix.

    Attributes:
        handle: The cache's own handle.
        key: Key of the last page of the prefix.
        namespace: Its namespace.
    """

    handle: Any
    key: bytes
    namespace: Namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredMatch:
    """The part of some tokens that is on the device.

    Attributes:
        num_tokens: Its length in tokens, whole pages.
        pages: `[num_tokens / page_size] int32`, page ids; owned by the index.
        node: Handle to lock it with.
        inner: The match of the device's cache.
    """

    num_tokens: int
    pages: Int32
    node: Prefix
    inner: Any

    @property
    def partial(self) -> Any:
        """The cached page that shares the most tokens after the prefix, if the device's cache finds one."""
        return self.inner.partial


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredInsertion:
    """The result of offering pages to the index.

    Attributes:
        num_existing: Number of leading pages that were already cached; the caller keeps the pages that it offered for
            them.
        node: Handle of the whole inserted prefix.
        inner: The insertion of the device's cache.
    """

    num_existing: int
    node: Prefix
    inner: Any

    @property
    def pages(self) -> Int32:
        """The pages that the device's cache has for the inserted tokens, if it reports them; see `RadixCache`."""
        return self.inner.pages
