# pyright: basic
# pytest-benchmark has no types.
"""A burst of requests that repeat one long prompt in progress; `nox -s "bench(package='schedpolicy')"`.

`arrive`: one pass in which all of them are compared and parked, or as many as a pass compares. `wait`: one pass while
they are parked and the leader makes progress, with 256 other candidates that repeat nothing.
"""

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from pagewood.schedpolicy import InBatchDeferral


class Prompt:
    def __init__(self, arrival: int, tokens: np.ndarray) -> None:
        self.arrival = arrival
        self.tokens = tokens
        self.num_prompt = self.num_tokens = len(tokens)
        self.num_matched = self.num_computed = 0

    def window(self, start: int, end: int) -> bytes:
        return self.tokens[start:end].tobytes()

    def num_shared(self, other: "Prompt") -> int:
        num_tokens = min(self.num_tokens, other.num_tokens)
        mine, theirs = self.tokens[:num_tokens], other.tokens[:num_tokens]
        if mine.tobytes() == theirs.tobytes():
            return num_tokens
        return int(np.argmax(mine != theirs))


def burst(num_repeats: int, num_tokens: int) -> tuple[Prompt, list[Prompt], list[Prompt]]:
    """Return a leader, the requests that repeat it, and 256 others."""
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, 32_000, num_tokens, dtype=np.int32)

    def own() -> np.ndarray:
        return rng.integers(0, 32_000, 100, dtype=np.int32)

    repeats = [Prompt(1 + number, np.concatenate((prefix, own()))) for number in range(num_repeats)]
    return Prompt(0, prefix), repeats, [Prompt(1 + num_repeats + number, own()) for number in range(256)]


@pytest.mark.parametrize(("num_repeats", "num_tokens"), [(50, 20_000), (300, 20_000), (250, 100_000)])
def test_arrive(benchmark: BenchmarkFixture, num_repeats: int, num_tokens: int):
    leader, repeats, _ = burst(num_repeats, num_tokens)

    def begin() -> tuple[tuple[InBatchDeferral], dict]:
        deferral = InBatchDeferral(page_size=16)
        deferral.start(leader)
        return (deferral,), {}

    def one_pass(deferral: InBatchDeferral) -> None:
        deferral.ready()
        assert all(map(deferral.defer, repeats))

    benchmark.pedantic(one_pass, setup=begin, rounds=50)


@pytest.mark.parametrize(("num_repeats", "num_tokens"), [(50, 20_000), (300, 20_000), (250, 100_000)])
def test_wait(benchmark: BenchmarkFixture, num_repeats: int, num_tokens: int):
    leader, repeats, others = burst(num_repeats, num_tokens)
    deferral = InBatchDeferral(page_size=16)
    deferral.start(leader)
    assert all(map(deferral.defer, repeats))
    for _ in range(num_repeats):
        assert deferral.ready() == []

    def one_pass() -> None:
        leader.num_computed += 16
        assert deferral.ready() == []
        assert not any(map(deferral.defer, others))

    benchmark.pedantic(one_pass, rounds=50)
