# pyright: basic
# pytest-benchmark has no types.
"""Draft lengths of a step: a decision, and what it learns from the result; 8 draft tokens at most, steps of 10 ms."""

from random import Random

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from pagewood.schedpolicy import DraftControl, DraftCost, StepCost
from pagewood.schedpolicy.testing import FakeRequest, OneStep


@pytest.mark.parametrize("num_requests", [1, 16, 64])
def test_lengths_and_observe(benchmark: BenchmarkFixture, num_requests: int):
    rng = Random(0)
    cost = StepCost([1, 16, 17, 128, 129, 576], [0.01, 0.011, 0.013, 0.02, 0.03, 0.06])
    control = DraftControl[FakeRequest](8, cost, draft_cost=DraftCost(per_pass_s=0.0003))
    batch = [FakeRequest(arrival=arrival) for arrival in range(num_requests)]

    def step():
        lengths = control.lengths(batch, 0)
        accepted = [rng.randint(0, length) for length in lengths]
        num_tokens = num_requests + sum(lengths)
        seconds = cost.seconds(num_tokens) + 0.0003 * max(lengths)
        report = OneStep.of(
            batch, lengths, lengths, accepted, num_tokens=num_tokens, draft_s=0.0003 * max(lengths), taken_s=seconds
        )
        control.observe(report)

    benchmark(step)
