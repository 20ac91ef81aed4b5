"""Replays a trace into a real cache."""

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from pagewood.radixcache.arrays import Int32
from pagewood.radixcache.cache import RadixCache
from pagewood.radixcache.counts import require_count
from pagewood.radixcache.watches import Watch


def replay(requests: Iterable[Int32], cache: RadixCache, *, num_blocks: int, num_waiting: int = 0) -> int:
    """Serve requests one at a time with a memory of `num_blocks` blocks, and return how many blocks hit.

    For each request the replay does what an engine would do: match the prompt, lock the match, evict what the rest
    needs beyond the unused memory, and publish the prompt. A block of the trace is one token and one page of the cache.
    If a prompt is larger than the memory, only its first `num_blocks` blocks are served.

    Args:
        requests: the blocks of each request, `[num_blocks] int32`, in order of arrival.
        cache: an empty cache of page size 1; nothing else may use it during the replay.
        num_blocks: memory for the running request and everything that is cached.
        num_waiting: number of requests that wait while one is served; the replay opens a watch for each of them.

    Raises:
        ValueError: the page size of the cache is not 1, the cache is not empty, or `num_blocks` or
            `num_waiting` is not an integer >= 0.
    """
    require_count("num_blocks", num_blocks, least=0)
    require_count("num_waiting", num_waiting, least=0)
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
    """Yield the requests in order, with open watches for the `num_waiting` requests after the yielded one."""
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
