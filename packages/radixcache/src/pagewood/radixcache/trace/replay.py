"""A trace replayed into a real cache."""

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from pagewood.radixcache.arrays import Int32
from pagewood.radixcache.cache import RadixCache
from pagewood.radixcache.watches import Watch


def replay(requests: Iterable[Int32], cache: RadixCache, *, num_blocks: int, num_waiting: int = 0) -> int:
    """Serve requests one after the other from a memory of `num_blocks` blocks, and return how many blocks hit.

    Each request does what an engine would do for it: it matches its prompt, locks the match, evicts what the rest
    needs beyond the unused memory, and publishes it. A block of the trace is a token and a page of the cache. Of a
    prompt that is larger than the memory, only the first `num_blocks` blocks are served.

    Args:
        requests: of each the blocks, `[num_blocks] int32`, in the order of their arrival.
        cache: of page size 1; empty, and nobody else's during the replay.
        num_blocks: memory for the running request and for all that is cached.
        num_waiting: how many requests wait while one is served; the cache is told of them by `watch`.

    Raises:
        ValueError: the cache has another page size, or holds pages.
    """
    if cache.page_size != 1 or cache.num_pages:
        raise ValueError(f"cache must be empty and of page size 1, got {cache.num_pages} pages of {cache.page_size}")
    unused = np.arange(num_blocks, dtype=np.int32)
    num_hits = 0
    for request in _queue(requests, cache, num_waiting):
        blocks = request[:num_blocks]
        match = cache.match(blocks)
        lease = cache.lock(match.node)
        missing = blocks[match.num_tokens :]
        if len(missing) > len(unused):
            unused = np.concatenate((unused, cache.evict(len(missing) - len(unused))))
        cache.insert(missing, unused, after=lease)
        unused = unused[len(missing) :]
        cache.unlock(lease)
        num_hits += match.num_tokens
    return num_hits


def _queue(requests: Iterable[Int32], cache: RadixCache, num_waiting: int) -> Iterator[Int32]:
    """Go through the requests, and watch each from when the `num_waiting`th before it is served until it is served."""
    waiting: deque[tuple[Int32, Watch]] = deque()
    for request in requests:
        if not num_waiting:
            yield request
            continue
        waiting.append((request, cache.watch(request)))
        if len(waiting) > num_waiting:
            yield _next(waiting)
    while waiting:
        yield _next(waiting)


def _next(waiting: deque[tuple[Int32, Watch]]) -> Int32:
    request, watch = waiting.popleft()
    watch.close()
    return request
