# pyright: basic
# pytest-benchmark has no types.
"""Costs of the calls that an engine makes in a step; `pytest packages/kvpool/benchmarks --benchmark-enable`."""

import numpy as np
import pytest
from numpy.typing import NDArray
from pytest_benchmark.fixture import BenchmarkFixture

from pagewood.kvpool import PageAllocator


def scattered(num_pages: int) -> PageAllocator:
    """Return an allocator that hands out its pages in random order, as one does after long use."""
    allocator = PageAllocator(num_pages)
    allocator.free(np.random.default_rng(0).permutation(allocator.alloc(num_pages)).astype(np.int32))
    return allocator


@pytest.mark.parametrize("num_pages", [20_000, 2_000_000])
@pytest.mark.parametrize(
    "n",
    [
        pytest.param(16, id="decode 256 requests, page 16"),
        pytest.param(256, id="decode 256 requests, page 1"),
        pytest.param(16_000, id="extend 256 requests by 1000 tokens, page 16"),
    ],
)
def test_alloc(benchmark: BenchmarkFixture, n: int, num_pages: int):
    allocator = scattered(num_pages)
    held: list[NDArray[np.int32]] = []

    def give_back():
        while held:
            allocator.free(held.pop())

    def alloc():
        held.append(allocator.alloc(n))

    benchmark.pedantic(alloc, setup=give_back, rounds=200, warmup_rounds=10)


@pytest.mark.parametrize("num_pages", [20_000, 2_000_000])
@pytest.mark.parametrize("n", [16, 1000])
def test_free(benchmark: BenchmarkFixture, n: int, num_pages: int):
    allocator = scattered(num_pages)
    benchmark.pedantic(allocator.free, setup=lambda: ((allocator.alloc(n),), {}), rounds=200, warmup_rounds=10)
