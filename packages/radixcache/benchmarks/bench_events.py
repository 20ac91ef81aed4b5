# pyright: basic
# (pytest-benchmark is untyped)
"""What it costs a cache to be followed by an event log.

    pytest packages/radixcache/benchmarks/bench_events.py --benchmark-enable --benchmark-only

`test_request` measures 1,000 requests of 1,024 new tokens each, which are matched, published, and later evicted. So its
milliseconds are microseconds per request.
"""

from collections.abc import Callable

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from pagewood.radixcache import RadixCache
from pagewood.radixcache.events import EventLog, RemoteIndex

NUM_REQUESTS = 1000
NUM_TOKENS = 1024
NUM_KEPT = 100  # requests that fit in the memory


def no_log(cache: RadixCache) -> Callable[[], object]:
    return lambda: None


def unread(cache: RadixCache) -> Callable[[], object]:
    log = EventLog(cache)
    return lambda: log.position


def read(cache: RadixCache) -> Callable[[], object]:
    log, index = EventLog(cache), RemoteIndex()
    return lambda: index.apply(log.read(index.position))


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("follow", [no_log, unread, read])
def test_request(benchmark: BenchmarkFixture, follow: Callable, page_size: int) -> None:
    tokens = np.random.default_rng(0).integers(0, 128_000, (NUM_REQUESTS, NUM_TOKENS), dtype=np.int32)
    num_pages = NUM_TOKENS // page_size

    def fresh() -> tuple[tuple[RadixCache, Callable], dict]:
        cache = RadixCache(page_size)
        return (cache, follow(cache)), {}

    def replay(cache: RadixCache, publish: Callable) -> None:
        free = np.arange(NUM_KEPT * num_pages, dtype=np.int32)
        for prompt in tokens:
            lease = cache.lock(cache.match(prompt).node)
            if len(free) < num_pages:
                free = cache.evict(num_pages)
            cache.insert(prompt, free, after=lease)
            free = free[num_pages:]
            cache.unlock(lease)
            publish()

    benchmark.pedantic(replay, setup=fresh, rounds=5)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_snapshot(benchmark: BenchmarkFixture, page_size: int) -> None:
    """The first snapshot of 100 sequences of 1,024 tokens, and applying it to an index."""
    tokens = np.random.default_rng(0).integers(0, 128_000, (NUM_KEPT, NUM_TOKENS), dtype=np.int32)
    pages = np.arange(NUM_KEPT * NUM_TOKENS // page_size, dtype=np.int32).reshape(NUM_KEPT, -1)
    cache = RadixCache(page_size)
    for row, its_pages in zip(tokens, pages, strict=True):
        cache.insert(row, its_pages)

    def fresh() -> tuple[tuple[EventLog], dict]:
        return (EventLog(cache),), {}

    benchmark.pedantic(lambda log: RemoteIndex().apply(log.read()), setup=fresh, rounds=5)
