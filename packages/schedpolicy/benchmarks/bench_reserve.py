# pyright: basic
# pytest-benchmark has no types.
"""The reserve of 256 running requests, computed in every step that admits."""

from dataclasses import dataclass

from pytest_benchmark.fixture import BenchmarkFixture

from pagewood.schedpolicy import NewTokenRatio


@dataclass(slots=True)
class Runner:
    arrival: int
    priority: int
    num_tokens: int
    num_generated: int
    max_new_tokens: int


def test_reserved_tokens(benchmark: BenchmarkFixture):
    running = [Runner(i, 0, 1000 + i, i, 512) for i in range(256)]
    benchmark(NewTokenRatio().reserved_tokens, running, page_size=16)
