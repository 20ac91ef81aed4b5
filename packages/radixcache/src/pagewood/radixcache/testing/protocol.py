"""The Protocol of a prefix cache, which the conformance machine tests."""

from typing import Protocol, TypeVar

from pagewood.radixcache.arrays import Int32
from pagewood.radixcache.namespaces import Namespace

N = TypeVar("N")
NodeT_co = TypeVar("NodeT_co", covariant=True)


class MatchLike(Protocol[NodeT_co]):
    """The result of `match` and `peek`."""

    @property
    def num_tokens(self) -> int:
        """Length of the matched prefix."""
        ...

    @property
    def pages(self) -> Int32:
        """`[num_tokens / page_size] int32`, page ids."""
        ...

    @property
    def node(self) -> NodeT_co:
        """Handle of the matched prefix."""
        ...


class InsertionLike(Protocol[NodeT_co]):
    """The result of `insert`."""

    @property
    def num_existing(self) -> int:
        """Number of leading pages that still belong to the caller."""
        ...

    @property
    def node(self) -> NodeT_co:
        """Handle of the inserted prefix."""
        ...


class PrefixCache(Protocol[N]):
    """A cache of token prefixes; `RadixCache` documents each method. `N` is the type of its handles."""

    @property
    def num_pages(self) -> int:
        """Number of pages that the cache owns."""
        ...

    @property
    def num_locked(self) -> int:
        """Number of pages of locked prefixes."""
        ...

    @property
    def num_evictable(self) -> int:
        """Number of pages that `evict` can return."""
        ...

    def num_pages_in(self, namespace: Namespace = None) -> int:
        """Return the number of pages that the cache owns in one namespace."""
        ...

    def match(self, tokens: Int32, namespace: Namespace = None) -> MatchLike[N]:
        """Return the longest cached prefix, and count it as used."""
        ...

    def peek(self, tokens: Int32, namespace: Namespace = None) -> MatchLike[N]:
        """Return the longest cached prefix without changing anything."""
        ...

    def root(self, namespace: Namespace = None) -> N:
        """Return the handle of the empty prefix."""
        ...

    def insert(
        self, tokens: Int32, pages: Int32, namespace: Namespace = None, *, after: N | None = None
    ) -> InsertionLike[N]:
        """Adopt the missing pages, and count the prefix as used."""
        ...

    def lock(self, node: N) -> N:
        """Lock a prefix, and return the handle to keep."""
        ...

    def unlock(self, node: N) -> None:
        """Undo one lock, and count the prefix as used."""
        ...

    def evict(self, num_pages: int) -> Int32:
        """Evict the pages that are first in order."""
        ...

    def clear(self, namespace: Namespace = None) -> Int32:
        """Remove the unlocked pages of a namespace."""
        ...

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        ...
