"""Draft lengths on simulated machines: never slower than plain decoding, near the best fixed length, and back."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewood.schedpolicy import DraftControl, DraftCost, StepCost
from pagewood.schedpolicy.acceptance import Acceptance
from pagewood.schedpolicy.testing import FakeRequest, SpeculativeMachine, check_drafting

Control = DraftControl[FakeRequest]
SIZES = sorted(
    {1, 2, 4} | {n for k in range(8, 65, 8) for n in (k, k + 1)} | {n for k in range(128, 577, 64) for n in (k, k + 1)}
)


def padded_to_graphs(num_tokens: int) -> float:
    """Return the seconds of a step that is padded to 8, 16, 32, 64, then to multiples of 64."""
    size = 8
    while size < num_tokens:
        size += size if size < 64 else 64
    return 0.008 + 0.00015 * size


CURVES: dict[str, Callable[[int], float]] = {
    "flat, then linear": lambda n: 0.01 * max(1.0, n / 32),
    "bent": lambda n: 0.01 + 0.0001 * min(n, 16) + 0.0006 * max(0, n - 16),
    "linear": lambda n: 0.001 * n,
    "affine": lambda n: 0.004 + 0.001 * n,
    "steps": padded_to_graphs,
}
ACCEPTS: dict[str, Callable[[int, int, int], float]] = {
    "never": lambda arrival, step, position: 0.0,
    "0.4": lambda arrival, step, position: 0.4,
    "0.8": lambda arrival, step, position: 0.8,
    "by position": lambda arrival, step, position: (0.9, 0.8, 0.6, 0.4, 0.2, 0.1, 0.05, 0.0)[position],
    "mixed": lambda arrival, step, position: 0.9 if arrival % 2 else 0.05,
    "changing": lambda arrival, step, position: 0.85 if step // 500 % 2 == 0 else 0.05,
}
NUM_STEPS = {1: 2000, 4: 2000, 16: 1500, 64: 1000}


def simulate(curve: str, accepts: str, num_requests: int, **arguments: Any) -> tuple[float, float]:
    """Return the speedup, and that of the best fixed length."""
    machine = SpeculativeMachine(step_s=CURVES[curve], accepts=ACCEPTS[accepts], noise=0.03, life=150)
    num_steps = NUM_STEPS[num_requests]
    run = machine.run(Control(8, machine.table(SIZES), **arguments), lambda step: num_requests, num_steps)
    return run.speedup, machine.best_fixed(8, num_requests, num_steps)


@pytest.mark.parametrize("num_requests", NUM_STEPS)
@pytest.mark.parametrize("accepts", ACCEPTS)
@pytest.mark.parametrize("curve", CURVES)
def test_it_is_never_slower_than_plain_decoding_and_near_the_best_fixed_length(
    curve: str, accepts: str, num_requests: int
):
    speedup, best = simulate(curve, accepts, num_requests)
    assert speedup >= 0.98
    assert speedup >= 0.94 * best


@settings(max_examples=25, deadline=None)
@given(
    jumps=st.lists(st.floats(0.0, 0.02), min_size=40, max_size=40),
    rates=st.lists(st.floats(0.0, 1.0), min_size=4, max_size=4),
    period=st.integers(5, 400),
    num_requests=st.integers(1, 40),
    max_tokens=st.integers(1, 8),
    finds=st.sampled_from([0.2, 1.0]),
    seed=st.integers(0, 1000),
)
def test_with_a_true_table_the_loss_is_bounded_after_every_step(
    jumps: list[float], rates: list[float], period: int, num_requests: int, max_tokens: int, finds: float, seed: int
):
    """Any rising curve, and acceptance that changes without warning."""
    sizes = list(range(1, 401, 10))
    table = StepCost(sizes, [0.005 + sum(jumps[: index + 1]) for index in range(len(sizes))])
    curve = table.after(0, 400)
    machine = SpeculativeMachine(
        step_s=lambda num_tokens: curve[num_tokens - 1],
        accepts=lambda arrival, step, position: rates[(arrival + step // period) % 4],
        finds=finds,
        lag=0,
    )
    run = machine.run(Control(max_tokens, table), lambda step: num_requests, 600, seed=seed)
    loss_s, start_s = 0.0, 0.02 * 100 * curve[num_requests - 1]
    for index, (taken_s, plain_s) in enumerate(zip(run.taken_s, run.plain_s, strict=True)):
        loss_s += taken_s - plain_s
        assert loss_s <= 0.02 * sum(run.plain_s[: index + 1]) + start_s + 1e-9


class Tease:
    """Accepts all drafts for a while, and then none for as long as drafts are made."""

    def __init__(self) -> None:
        self.control = Control(8)

    def __call__(self, arrival: int, step: int, position: int) -> float:
        return 1.0 if step % 40 < 8 else 0.0


def tease(control: Control) -> float:
    machine = SpeculativeMachine(step_s=CURVES["bent"], accepts=Tease(), noise=0.03)
    return machine.run(control, lambda step: 4, 2000).speedup
