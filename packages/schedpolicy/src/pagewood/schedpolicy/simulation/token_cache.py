"""Any cache of tokens and pages, such as `pagewood.radixcache.RadixCache`, as the cache of a simulated replica."""

from collections.abc import Callable, Sequence, Sized
from typing import Any, Protocol


class TokenMatch(Protocol):
    """A cached prefix."""

    @property
    def num_tokens(self) -> int:
        """Its length."""
        ...

    @property
    def node(self) -> Any:
        """Handle to lock it by."""
        ...


class TokenInsertion(Protocol):
    """What an insert did."""

    @property
    def num_existing(self) -> int:
        """Leading pages that the cache had already."""
        ...


class TokenCache(Protocol):
    """A cache of tokens with one page for each token; `RadixCache(page_size=1)` is one."""

    @property
    def num_pages(self) -> int:
        """Pages that it owns."""
        ...

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` can return."""
        ...

    def peek(self, tokens: Any) -> TokenMatch:
        """Find the longest cached prefix; this is not a use."""
        ...

    def insert(self, tokens: Any, pages: Any) -> TokenInsertion:
        """Adopt the pages that are lacking."""
        ...

    def lock(self, node: Any) -> Any:
        """Keep a prefix from eviction; return what unlocks it."""
        ...

    def unlock(self, node: Any) -> None:
        """Undo one lock."""
        ...

    def evict(self, num_pages: int) -> Sized:
        """Give up to so many pages back."""
        ...


class OverTokens:
    """A `PrefixCache` over a `TokenCache`, to which the key of a page is a token: the simulator only counts pages.

    Invariant: `_leases` has the handles of exactly the prefixes that are locked.
    """

    __slots__ = ("_array", "_cache", "_leases")

    def __init__(self, cache: TokenCache, *, array: Callable[[Sequence[int]], Any]) -> None:
        """Wrap an empty cache.

        Args:
            cache: With a page for each token.
            array: Makes of numbers what the cache takes as tokens and pages: for `RadixCache`,
                `lambda numbers: numpy.array(numbers, numpy.int32)`.
        """
        self._cache = cache
        self._array = array
        self._leases: dict[int, list[Any]] = {}  # by the last key of the prefix

    @property
    def num_pages(self) -> int:
        """Pages that it holds."""
        return self._cache.num_pages

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` can give back now."""
        return self._cache.num_evictable

    def match(self, keys: Sequence[int]) -> int:
        """Return how many of the leading pages are cached; this is not a use."""
        return self._cache.peek(self._array(keys)).num_tokens

    def insert(self, keys: Sequence[int], num_pages: int) -> int:
        """Adopt those of the first `num_pages` pages that are lacking, and return how many those are."""
        tokens = self._array(keys[:num_pages])
        return num_pages - self._cache.insert(tokens, tokens).num_existing

    def lock(self, keys: Sequence[int], num_pages: int) -> None:
        """Keep the first `num_pages` pages, which are cached, from eviction."""
        if num_pages:
            node = self._cache.peek(self._array(keys[:num_pages])).node
            self._leases.setdefault(keys[num_pages - 1], []).append(self._cache.lock(node))

    def unlock(self, keys: Sequence[int], num_pages: int) -> None:
        """Undo one such lock; the pages count as used now."""
        if num_pages:
            leases = self._leases[keys[num_pages - 1]]
            self._cache.unlock(leases.pop())
            if not leases:
                del self._leases[keys[num_pages - 1]]

    def evict(self, num_pages: int) -> int:
        """Give up to `num_pages` unlocked pages back, and return how many."""
        return len(self._cache.evict(num_pages))
