# pyright: basic
# (pytest-benchmark is untyped)
"""What the cache costs a request, from its match to its last unlock, in four deterministic workloads.

    pytest packages/radixcache/benchmarks/bench_cache.py --benchmark-enable --benchmark-only

Each benchmark's time is that of the whole replay; its extra information has microseconds per request. A request is what
an engine does with the cache (`serve`), with the cost of a toy page pool (a stack of free ids) in it.
"""

import gc
import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from pagewood.radixcache import RadixCache

Int32 = npt.NDArray[np.int32]

PAGE_SIZES = [1, 16, 64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Requests to replay: `warm_up` before the clock starts, then `timed`; each is a prompt and the reply to it."""

    warm_up: list[tuple[Int32, Int32]]
    timed: list[tuple[Int32, Int32]]
    num_pool_tokens: int


@dataclass(slots=True, kw_only=True)
class Bench:
    """A cache and the pool of pages that it shares with its requests."""

    cache: RadixCache
    page_size: int
    free: Int32  # a stack of page ids
    num_free: int
    num_evictions: int = 0
    times_ns: list[int] = field(default_factory=list["int"])

    def alloc(self, num_pages: int) -> Int32:
        if num_pages > self.num_free:
            self.num_evictions += 1
            self.put_back(self.cache.evict(num_pages - self.num_free))
        self.num_free -= num_pages
        return self.free[self.num_free : self.num_free + num_pages].copy()

    def put_back(self, pages: Int32) -> None:
        self.free[self.num_free : self.num_free + len(pages)] = pages
        self.num_free += len(pages)

    def serve(self, prompt: Int32, reply: Int32) -> None:
        """Find the prompt's prefix, publish the rest after its prefill, and the reply at its end."""
        cache, page_size = self.cache, self.page_size
        match = cache.match(prompt)
        lease = cache.lock(match.node)
        tokens = np.concatenate((prompt[match.num_tokens :], reply))
        pages = self.alloc(-(-len(tokens) // page_size))
        num_prompt_pages = (len(prompt) - match.num_tokens) // page_size
        prefill = cache.insert(tokens[: num_prompt_pages * page_size], pages, after=lease)
        grown = cache.lock(prefill.node)
        cache.unlock(lease)
        decoded = cache.insert(tokens[num_prompt_pages * page_size :], pages[num_prompt_pages:], after=grown)
        cache.unlock(grown)
        self.put_back(pages[: prefill.num_existing])
        self.put_back(pages[num_prompt_pages : num_prompt_pages + decoded.num_existing])
        self.put_back(pages[len(tokens) // page_size :])


def fresh(rng: np.random.Generator, num_tokens: int) -> Int32:
    return rng.integers(0, 128_000, num_tokens, dtype=np.int32)


def chat() -> Work:
    """200 conversations of 8 turns (200 tokens in, 200 out) that take turns at random, behind a system prompt of 1k."""
    rng = np.random.default_rng(1)
    system = fresh(rng, 1024)
    history = dict.fromkeys(range(200), system)
    requests: list[tuple[Int32, Int32]] = []
    for conversation in rng.permutation(np.repeat(np.arange(200), 8)).tolist():
        prompt = np.concatenate((history[conversation], fresh(rng, 200)))
        reply = fresh(rng, 200)
        history[conversation] = np.concatenate((prompt, reply))
        requests.append((prompt, reply))
    return Work(warm_up=requests[:200], timed=requests[200:], num_pool_tokens=400_000)


def shared_prefixes() -> Work:
    """50 prefixes of 8k tokens, each behind 20 requests with 200 tokens of their own and 100 of a reply."""
    rng = np.random.default_rng(2)
    prefixes = [fresh(rng, 8192) for _ in range(50)]
    requests = [
        (np.concatenate((prefixes[which], fresh(rng, 200))), fresh(rng, 100))
        for which in rng.permutation(np.repeat(np.arange(50), 20)).tolist()
    ]
    return Work(warm_up=requests[:100], timed=requests[100:], num_pool_tokens=600_000)


def documents() -> Work:
    """5 documents of 100k tokens, each asked 20 questions of 100 tokens with replies of 100."""
    rng = np.random.default_rng(3)
    texts = [fresh(rng, 100_000) for _ in range(5)]
    requests = [
        (np.concatenate((texts[which], fresh(rng, 100))), fresh(rng, 100))
        for which in rng.permutation(np.repeat(np.arange(5), 20)).tolist()
    ]
    return Work(warm_up=requests[:10], timed=requests[10:], num_pool_tokens=700_000)


def nothing_shared() -> Work:
    """512 tokens each that share nothing, into a cache that is full with 100k of the same."""
    rng = np.random.default_rng(4)
    tokens = fresh(rng, 512 * 102_000).reshape(-1, 512)
    requests = [(row, row[:0]) for row in tokens]
    return Work(warm_up=requests[:100_000], timed=requests[100_000:], num_pool_tokens=512 * 100_000)


WORKLOADS = {work.__name__: work for work in (chat, shared_prefixes, documents, nothing_shared)}


@pytest.fixture(params=WORKLOADS, scope="module")
def work(request: pytest.FixtureRequest) -> Work:
    return WORKLOADS[request.param]()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_request(benchmark: BenchmarkFixture, work: Work, page_size: int) -> None:
    def warm() -> tuple[tuple[Bench], dict[str, object]]:
        num_pages = work.num_pool_tokens // page_size
        free = np.arange(num_pages, dtype=np.int32)
        bench = Bench(cache=RadixCache(page_size), page_size=page_size, free=free, num_free=num_pages)
        for prompt, reply in work.warm_up:
            bench.serve(prompt, reply)
        bench.num_evictions = 0
        gc.collect()
        benches.append(bench)
        return (bench,), {}

    def replay(bench: Bench) -> None:
        for prompt, reply in work.timed:
            start = time.perf_counter_ns()
            bench.serve(prompt, reply)
            bench.times_ns.append(time.perf_counter_ns() - start)

    benches: list[Bench] = []
    benchmark.pedantic(replay, setup=warm, rounds=3)
    medians, means, p99s = zip(
        *((np.median(bench.times_ns), np.mean(bench.times_ns), np.quantile(bench.times_ns, 0.99)) for bench in benches),
        strict=True,
    )
    benchmark.extra_info["us_per_request"] = {
        "median": round(float(min(medians)) / 1000, 1),
        "mean": round(float(min(means)) / 1000, 1),
        "p99": round(float(min(p99s)) / 1000, 1),
    }
    benchmark.extra_info["share_of_requests_that_evict"] = benches[-1].num_evictions / len(work.timed)
    assert benches[-1].cache.num_locked == 0
