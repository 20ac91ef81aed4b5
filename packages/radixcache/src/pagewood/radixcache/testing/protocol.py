"""What a prefix cache is: the Protocol that the conformance machine drives."""

from typing import Protocol, TypeVar

from pagewood.radixcache.arrays import Int32

N = TypeVar("N")
NodeT_co = TypeVar("NodeT_co", covariant=True)


class MatchLike(Protocol[NodeT_co]):
    """What `match` and `peek` return."""

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
    """What `insert` returns."""

    @property
    def num_existing(self) -> int:
        """Leading pages that stay the caller's."""
        ...

    @property
    def node(self) -> NodeT_co:
        """Handle of the inserted prefix."""
        ...


class PrefixCache(Protocol[N]):
    """A cache of token prefixes, as `RadixCache` documents it, method by method; `N` is its kind of handle."""

    @property
    def num_pages(self) -> int:
        """Pages owned."""
        ...

    @property
    def num_locked(self) -> int:
        """Pages of locked prefixes."""
        ...

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` can return."""
        ...

    def num_pages_in(self, namespace: str | None = None) -> int:
        """Return the pages owned in one namespace."""
        ...

    def match(self, tokens: Int32, namespace: str | None = None) -> MatchLike[N]:
        """Return the longest cached prefix, and count it as used."""
        ...

    def peek(self, tokens: Int32, namespace: str | None = None) -> MatchLike[N]:
        """Return the longest cached prefix, and change nothing."""
        ...

    def root(self, namespace: str | None = None) -> N:
        """Return the handle of the empty prefix."""
        ...

    def insert(
        self, tokens: Int32, pages: Int32, namespace: str | None = None, *, after: N | None = None
    ) -> InsertionLike[N]:
        """Adopt what is missing, and count the prefix as used."""
        ...

    def lock(self, node: N) -> N:
        """Lock a prefix, and return the handle to hold."""
        ...

    def unlock(self, node: N) -> None:
        """Take back one lock, and count the prefix as used."""
        ...

    def evict(self, num_pages: int) -> Int32:
        """Give up the pages that are first in order."""
        ...

    def clear(self, namespace: str | None = None) -> Int32:
        """Give up the unlocked pages of a namespace."""
        ...

    def check(self) -> None:
        """Raise AssertionError where an invariant does not hold."""
        ...
