"""The KV pages of one replica: free, cached, or private to a running request."""

from pagewood.schedpolicy.pages import pages_of
from pagewood.schedpolicy.simulation.cache import PrefixCache
from pagewood.schedpolicy.simulation.request import SimRequest

_SPARE_NEEDS, _SPARE_TOKENS, _SPARE_SHARE = 2, 1024, 256
"""Spare pages that an eviction frees beyond the needed ones, as in pagewood-engine: _SPARE_NEEDS times the needed
pages, at least the pages of _SPARE_TOKENS tokens, and at most 1 / _SPARE_SHARE of all pages."""


class Memory:
    """Counts pages. Invariant: free, cached and private pages add up to all pages, and no count is negative.

    It counts how many pages a request holds, not which ones.
    """

    __slots__ = ("_num_private", "cache", "num_pages", "page_size")

    def __init__(self, *, num_pages: int, page_size: int, cache: PrefixCache) -> None:
        """Start with all pages free.

        Args:
            num_pages: Number of pages.
            page_size: Tokens per page.
            cache: An empty cache for computed pages.
        """
        self.num_pages = num_pages
        self.page_size = page_size
        self.cache = cache
        self._num_private = 0  # written by: Memory

    @property
    def num_free(self) -> int:
        """Pages that are neither cached nor private."""
        return self.num_pages - self._num_private - self.cache.num_pages

    @property
    def num_available(self) -> int:
        """Pages that can be taken: free, or cached and unlocked."""
        cache = self.cache
        return self.num_pages - self._num_private - cache.num_pages + cache.num_evictable

    @property
    def num_used(self) -> int:
        """Pages that running requests hold."""
        return self.num_pages - self.num_available

    def pages_of(self, num_tokens: int) -> int:
        """Return how many pages `num_tokens` tokens need."""
        return pages_of(num_tokens, self.page_size)

    def matched_pages(self, request: SimRequest, num_cached: int) -> int:
        """Return how many of its cached leading pages a request can use; its last token is always computed."""
        return min(num_cached, (request.num_tokens - 1) // self.page_size)

    def lease(self, request: SimRequest, num_pages: int) -> None:
        """Lock the leading cached pages of a request that will run."""
        self.cache.lock(request.keys, num_pages)
        request.num_leased = request.num_pages = num_pages

    def unlease(self, request: SimRequest) -> None:
        """Undo `lease`, if no page was taken since."""
        self.cache.unlock(request.keys, request.num_leased)
        request.num_leased = request.num_pages = 0

    def take(self, num_pages: int) -> None:
        """Make available pages private; evicts as needed."""
        num_lacking = num_pages - self.num_free
        if num_lacking > 0:
            num_evicted = self.cache.evict(num_lacking + self._num_spare(num_pages))
            assert num_evicted >= num_lacking, "take must not exceed num_available"
        self._num_private += num_pages

    def take_singly(self, num_pages: int) -> None:
        """Make available pages private one after the other, as decoding requests of pagewood-engine get them.

        Each eviction frees one page and the spare ones; the next eviction comes when these have run out.
        """
        num_lacking = num_pages - self.num_free
        if num_lacking > 0:
            num_freed = 1 + self._num_spare(1)
            num_evicted = self.cache.evict(-(-num_lacking // num_freed) * num_freed)
            assert num_evicted >= num_lacking, "take_singly must not exceed num_available"
        self._num_private += num_pages

    def grow(self, request: SimRequest, num_tokens: int) -> bool:
        """Give a request that does not decode pages for its first `num_tokens` tokens; return whether they fit."""
        num_lacking = self.pages_of(num_tokens) - request.num_pages
        if num_lacking > self.num_available:
            return False
        if num_lacking > 0:
            self.take(num_lacking)
            request.num_pages += num_lacking
            request.num_private += num_lacking
        return True

    def settle(self, request: SimRequest, num_taken: int) -> None:
        """Assign to a request the pages that `take` took for it while it was decoding."""
        request.num_pages += num_taken
        request.num_private += num_taken

    def publish(self, request: SimRequest, num_tokens: int) -> None:
        """Publish the whole pages of the first `num_tokens` tokens, which are computed, in the cache."""
        num_pages = min(num_tokens // self.page_size, len(request.keys))
        if num_pages <= request.num_leased:
            return
        # Copies of pages that another request has published stay private until they are released.
        num_adopted = self.cache.insert(request.keys, num_pages)
        request.num_private -= num_adopted
        self._num_private -= num_adopted
        self.cache.lock(request.keys, num_pages)
        self.cache.unlock(request.keys, request.num_leased)
        request.num_leased = num_pages

    def receive(self, request: SimRequest, num_pages: int) -> None:
        """Cache the first `num_pages` pages of a request, computed by another replica, as far as there is room."""
        cache, keys = self.cache, request.keys
        num_cached = cache.match(keys[:num_pages])
        cache.lock(keys, num_cached)
        num_new = min(num_pages - num_cached, self.num_available)
        self.take(num_new)
        self._num_private -= cache.insert(keys, num_cached + num_new)
        cache.unlock(keys, num_cached)

    def release(self, request: SimRequest, num_tokens: int) -> None:
        """Publish the computed pages, and free everything that the request holds."""
        self.publish(request, num_tokens)
        self._num_private -= request.num_private
        self.cache.unlock(request.keys, request.num_leased)
        request.num_leased = request.num_pages = request.num_private = 0

    def _num_spare(self, num_pages: int) -> int:
        """Return how many spare pages an eviction frees beyond `num_pages` needed ones."""
        return min(max(_SPARE_NEEDS * num_pages, _SPARE_TOKENS // self.page_size), self.num_pages // _SPARE_SHARE)
