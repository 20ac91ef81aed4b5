"""Adapts a cache of tokens and pages, such as `pagewood.radixcache.RadixCache`, to the simulator."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class TokenMatch(Protocol):
    """A cached prefix."""

    @property
    def num_tokens(self) -> int:
        """Length of the prefix."""
        ...

    @property
    def node(self) -> Any:
        """Handle for locking the prefix."""
        ...


class TokenInsertion(Protocol):
    """Result of an insertion."""

    @property
    def num_existing(self) -> int:
        """Leading pages that were cached before."""
        ...


class TokenCache(Protocol):
    """A cache of tokens with one page for each token; `RadixCache(page_size=1)` is one."""

    @property
    def num_pages(self) -> int:
        """Pages that the cache owns."""
        ...

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` can return."""
        ...

    def peek(self, tokens: Any) -> TokenMatch:
        """Find the longest cached prefix; does not count as a use."""
        ...

    def insert(self, tokens: Any, pages: Any) -> TokenInsertion:
        """Adopt the pages that are not cached yet."""
        ...

    def lock(self, node: Any) -> Any:
        """Lock a prefix against eviction; return the handle that unlocks it."""
        ...

    def unlock(self, node: Any) -> None:
        """Undo one lock."""
        ...

    def evict(self, num_pages: int) -> Any:
        """Evict up to `num_pages` pages and return an array of their ids."""
        ...


class OverTokens:
    """A `PrefixCache` over a `TokenCache`, in which a page of the simulator is a token.

    Invariant: `_leases` has the handles of exactly the locked prefixes; each id of a page below `_num_ids` is free or
    in the cache.
    """

    __slots__ = ("_array", "_cache", "_free", "_leases", "_num_ids")

    def __init__(self, cache: TokenCache, *, array: Callable[[Sequence[int]], Any]) -> None:
        """Wrap an empty cache.

        Args:
            cache: A cache with one page per token.
            array: Converts numbers to the token and page arrays of the cache; for `RadixCache`,
                `lambda numbers: numpy.array(numbers, numpy.int32)`.
        """
        self._cache = cache
        self._array = array
        self._leases: dict[int, list[Any]] = {}  # by the last key of the prefix
        self._free: list[int] = []  # written by: OverTokens
        self._num_ids = 0  # written by: OverTokens

    @property
    def num_pages(self) -> int:
        """Cached pages."""
        return self._cache.num_pages

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` can free now."""
        return self._cache.num_evictable

    def match(self, keys: Sequence[int]) -> int:
        """Return how many of the leading pages are cached; does not count as a use."""
        return self._cache.peek(self._array(keys)).num_tokens

    def insert(self, keys: Sequence[int], num_pages: int) -> int:
        """Adopt those of the first `num_pages` pages that are not cached yet, and return how many those are."""
        num_lacking = max(0, num_pages - len(self._free))
        self._free += range(self._num_ids, self._num_ids + num_lacking)
        self._num_ids += num_lacking
        first = len(self._free) - num_pages
        pages = self._free[first:]
        num_existing = self._cache.insert(self._array(keys[:num_pages]), self._array(pages)).num_existing
        self._free[first:] = pages[:num_existing]
        return num_pages - num_existing

    def lock(self, keys: Sequence[int], num_pages: int) -> None:
        """Lock the first `num_pages` pages, which are cached, against eviction."""
        if num_pages:
            node = self._cache.peek(self._array(keys[:num_pages])).node
            self._leases.setdefault(keys[num_pages - 1], []).append(self._cache.lock(node))

    def unlock(self, keys: Sequence[int], num_pages: int) -> None:
        """Undo one lock; the pages count as used now."""
        if num_pages:
            leases = self._leases[keys[num_pages - 1]]
            self._cache.unlock(leases.pop())
            if not leases:
                del self._leases[keys[num_pages - 1]]

    def evict(self, num_pages: int) -> int:
        """Evict up to `num_pages` unlocked pages, and return how many."""
        evicted = self._cache.evict(num_pages).tolist()
        self._free += evicted
        return len(evicted)
