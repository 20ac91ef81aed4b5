# pyright: basic
# pytest-benchmark has no types.
"""The reserve of 256 running requests, computed in every step that admits."""

from dataclasses import dataclass
from itertools import cycle

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from pagewood.schedpolicy import NewTokenRatio


@dataclass(slots=True)
class Runner:
    arrival: int
    priority: int
    num_tokens: int
    num_generated: int
    max_new_tokens: int


def learned() -> NewTokenRatio:
    """Return a ratio to which 64 requests have ended at different parts of their limit."""
    ratio = NewTokenRatio()
    for percent in range(36, 100):
        ratio.on_end(Runner(0, 0, 0, percent, 100))
    return ratio


def test_reserved_tokens(benchmark: BenchmarkFixture):
    running = [Runner(i, 0, 1000 + i, i, 512) for i in range(256)]
    benchmark(NewTokenRatio().reserved_tokens, running, page_size=16)


@pytest.mark.parametrize("changes", [False, True], ids=["the_same", "others"])
@pytest.mark.parametrize("num_available", [0, 1 << 30], ids=["short", "room"])
@pytest.mark.parametrize("num_running", [1, 32, 256, 1024])
def test_a_candidate(benchmark: BenchmarkFixture, num_running: int, num_available: int, changes: bool):
    """A step with one candidate; memory is short or there is room for all limits, and the same or others run."""
    ratio = learned()
    running = [Runner(i, 0, 1000 + i * 4000 // num_running, i * 4000 // num_running, 4000) for i in range(num_running)]
    others = [*running[1:], Runner(num_running, 0, 1000, 0, 4000)] if changes else running
    candidate, steps = Runner(-1, 0, 1000, 0, 4000), cycle((running, others))

    def step() -> int:
        reserve = ratio.open(next(steps), page_size=16, num_to_complete=0)
        return reserve.num_reserved(candidate, num_available=num_available)

    benchmark(step)
