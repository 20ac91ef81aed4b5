# pyright: basic
# pytest-benchmark has no types.
"""Time of the calls that an engine makes in a step; `pytest packages/kvpool/benchmarks/*.py --benchmark-enable`."""

import numpy as np
import pytest
from numpy.typing import NDArray
from pytest_benchmark.fixture import BenchmarkFixture

from pagewood.kvpool import PageAllocator

POOLS = pytest.mark.parametrize("num_pages", [300_000, 2_000_000])
ORDERS = pytest.mark.parametrize("is_scattered", [False, True], ids=["fresh", "scattered"])
STEPS = pytest.mark.parametrize(
    "n",
    [
        pytest.param(16, id="decode 256 requests, page 16"),
        pytest.param(256, id="decode 256 requests, page 1"),
        pytest.param(256 * 63, id="extend 256 requests by 1000 tokens, page 16"),
        pytest.param(256_000, id="extend 256 requests by 1000 tokens, page 1"),
    ],
)


def make(num_pages: int, is_scattered: bool) -> PageAllocator:
    """Return a new allocator, or one that hands out its pages in random order, as after long use."""
    allocator = PageAllocator(num_pages)
    if is_scattered:
        allocator.free(np.random.default_rng(0).permutation(allocator.alloc(num_pages)).astype(np.int32))
    return allocator


@POOLS
@ORDERS
@STEPS
def test_alloc(benchmark: BenchmarkFixture, n: int, is_scattered: bool, num_pages: int):
    allocator = make(num_pages, is_scattered)
    held: list[NDArray[np.int32]] = []

    def give_back():
        while held:
            allocator.free(held.pop())

    def alloc():
        held.append(allocator.alloc(n))

    benchmark.pedantic(alloc, setup=give_back, rounds=100, warmup_rounds=5)


@POOLS
@STEPS
def test_alloc_into_an_array(benchmark: BenchmarkFixture, n: int, num_pages: int):
    allocator, out = make(num_pages, True), np.zeros(n, dtype=np.int32)

    def give_back():
        if allocator.num_free < num_pages:
            allocator.free(out)

    benchmark.pedantic(lambda: allocator.alloc(n, out=out), setup=give_back, rounds=100, warmup_rounds=5)


@POOLS
@ORDERS
@pytest.mark.parametrize("n", [16, 63, 1000, 16_128])
def test_free(benchmark: BenchmarkFixture, n: int, is_scattered: bool, num_pages: int):
    allocator = make(num_pages, is_scattered)
    benchmark.pedantic(allocator.free, setup=lambda: ((allocator.alloc(n),), {}), rounds=100, warmup_rounds=5)
