# pyright: basic
# (pytest-benchmark is untyped)
"""The cost of single calls, and what it must not depend on.

pytest packages/radixcache/benchmarks/bench_calls.py -o python_files="bench_*.py" --benchmark-enable
"""

import gc

import numpy as np
import numpy.typing as npt
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from pagewood.radixcache import (
    FIFO,
    GDSF,
    LFU,
    LRU,
    S3FIFO,
    QueueInformed,
    RadixCache,
    Retained,
    TailOptimizedLRU,
)

Int32 = npt.NDArray[np.int32]

PAGE_SIZES = [1, 16, 64]
POLICIES = {
    "LRU": LRU,
    "FIFO": FIFO,
    "LFU": LFU,
    "GDSF": GDSF,
    "tail-optimised": lambda: TailOptimizedLRU(threshold_tokens=256),
    "retained LRU": lambda: Retained(LRU()),
    "queue-informed LRU": lambda: QueueInformed(LRU()),
    "S3-FIFO": S3FIFO,
}


class Ids:
    """Returns page ids, each only once."""

    def __init__(self) -> None:
        self.num_made = 0

    def __call__(self, num_pages: int) -> Int32:
        self.num_made += num_pages
        return np.arange(self.num_made - num_pages, self.num_made, dtype=np.int32)


def fresh(rng: np.random.Generator, *shape: int) -> Int32:
    return rng.integers(0, 128_000, shape, dtype=np.int32)


def test_startswith(benchmark: BenchmarkFixture) -> None:
    """The reference for a match of 100k tokens."""
    key = fresh(np.random.default_rng(0), 100_000).tobytes()
    other = bytes(bytearray(key))
    benchmark(key.startswith, other)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("num_tokens", [8192, 100_000])
def test_match(benchmark: BenchmarkFixture, num_tokens: int, page_size: int) -> None:
    tokens, cache = fresh(np.random.default_rng(0), num_tokens), RadixCache(page_size)
    cache.insert(tokens, Ids()(num_tokens // page_size))
    prompt = tokens.copy()
    assert benchmark(cache.match, prompt).num_tokens == num_tokens // page_size * page_size


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_miss(benchmark: BenchmarkFixture, page_size: int) -> None:
    rng, ids, cache = np.random.default_rng(0), Ids(), RadixCache(page_size)
    for prompt in fresh(rng, 1000, 512):
        cache.insert(prompt, ids(512 // page_size))
    other = np.full(8192, 128_000, np.int32)
    assert benchmark(cache.match, other).num_tokens == 0


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("num_before", [1024, 100 * 1024])
def test_publish_a_chunk(benchmark: BenchmarkFixture, num_before: int, page_size: int) -> None:
    """Insert 512 new tokens after a prefix that was inserted in chunks, and move the lease to their end."""
    rng, ids, cache = np.random.default_rng(0), Ids(), RadixCache(page_size)
    lease = cache.lock(cache.root())
    for chunk in fresh(rng, num_before // 512, 512):
        lease = publish(cache, lease, chunk, ids(512 // page_size))

    def setup() -> tuple[tuple[object, ...], dict[str, object]]:
        return (cache, lease, fresh(rng, 512), ids(512 // page_size)), {}

    benchmark.pedantic(publish, setup=setup, rounds=200)


def publish(cache: RadixCache, lease, chunk: Int32, pages: Int32):
    grown = cache.lock(cache.insert(chunk, pages, after=lease).node)
    cache.unlock(lease)
    cache.lock(lease)  # restored for the next round
    return grown


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_leaves", [1000, 100_000])
def test_evict_a_leaf(benchmark: BenchmarkFixture, num_leaves: int, policy: str) -> None:
    """One call evicts one leaf of two pages."""
    rng, ids = np.random.default_rng(0), Ids()
    cache = RadixCache(16, policy=POLICIES[policy]())
    for prompt in fresh(rng, num_leaves, 32):
        cache.insert(prompt, ids(2))
    gc.collect()
    benchmark.pedantic(cache.evict, (2,), rounds=num_leaves // 4)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("num_watches", [0, 10_000])
def test_engine_step(benchmark: BenchmarkFixture, num_watches: int, page_size: int) -> None:
    """32 inserts and 32 evictions of 256 tokens each, with watches on 50 prefixes and their continuations."""
    rng, ids, cache = np.random.default_rng(0), Ids(), RadixCache(page_size)
    prefixes = list(fresh(rng, 50, 1024))
    cached = [np.concatenate((prefixes[index % 50], suffix)) for index, suffix in enumerate(fresh(rng, 3200, 256))]
    waiting = [np.concatenate((prefixes[index % 50], suffix)) for index, suffix in enumerate(fresh(rng, 5000, 256))]
    for prompt in [*prefixes, *cached]:
        add(cache, prompt, ids)
    watches = [cache.watch(prompt) for prompt in [*cached, *cached, *waiting][:num_watches]]

    def setup() -> tuple[tuple[list[tuple[Int32, Int32]]], dict[str, object]]:
        chosen = [waiting[index] for index in rng.integers(0, len(waiting), 32)]
        return ([(prompt, ids(len(prompt) // page_size)) for prompt in chosen],), {}

    def step(inserts: list[tuple[Int32, Int32]]) -> None:
        for prompt, pages in inserts:
            cache.insert(prompt, pages)
        for _ in range(32):
            cache.evict(256 // page_size)

    benchmark.pedantic(step, setup=setup, rounds=50)
    assert all(
        watch.num_tokens == cache.peek(prompt).num_tokens for watch, prompt in zip(watches, cached, strict=False)
    )


def add(cache: RadixCache, prompt: Int32, ids: Ids) -> None:
    existing = cache.peek(prompt).pages
    cache.insert(prompt, np.concatenate((existing, ids(len(prompt) // cache.page_size - len(existing)))))
