# pyright: basic
# pytest-benchmark has no types.
"""Ordering a queue of 10,000; `pytest packages/schedpolicy/benchmarks/*.py --benchmark-enable`."""

import random
from dataclasses import dataclass

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from pagewood.schedpolicy import order_named


@dataclass(slots=True)
class Queued:
    arrival: int
    arrived_s: float
    priority: int
    num_tokens: int
    num_matched: int
    max_new_tokens: int
    num_generated: int = 0


@pytest.mark.parametrize("name", ["fcfs", "lpm"])
@pytest.mark.parametrize("is_shuffled", [False, True], ids=["by arrival", "shuffled"])
def test_order(benchmark: BenchmarkFixture, name: str, is_shuffled: bool):
    rng = random.Random(0)
    waiting = [Queued(i, i / 100, 0, 5000, rng.choice([0, 0, 64, 512, 4096]), 256) for i in range(10_000)]
    if is_shuffled:
        rng.shuffle(waiting)
    benchmark(order_named(name), waiting, 100.0)
