"""Draft lengths on simulated machines: never slower than plain decoding, near the best fixed length, and back."""

from collections.abc import Callable
from itertools import pairwise, product
from random import Random
from statistics import mean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewood.schedpolicy import DraftControl, DraftCost, StepCost
from pagewood.schedpolicy.drafting.comparison import Comparison
from pagewood.schedpolicy.testing import FakeRequest
from speculative_machine import SpeculativeMachine, SpeculativeRun, check_drafting

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
    "slowly changing": lambda arrival, step, position: 0.85 if step // 2000 % 2 == 0 else 0.05,
}
NEVER = property(lambda comparison: False, lambda comparison, value: None)
NUM_STEPS = {1: 2000, 4: 1500, 16: 800, 64: 300}


def simulate(curve: str, accepts: str, num_requests: int, **arguments: Any) -> tuple[float, float]:
    """Return the speedup, and that of the best fixed length."""
    machine = SpeculativeMachine(step_s=CURVES[curve], accepts=ACCEPTS[accepts], noise=0.03, life=150)
    num_steps = NUM_STEPS[num_requests]
    run = machine.run(Control(8, machine.table(SIZES), **arguments), lambda step: num_requests, num_steps)
    return run.speedup, machine.best_fixed(8, num_requests, num_steps)


@pytest.mark.parametrize(
    ("curve", "accepts", "num_requests"),
    [  # all values, but one of three combinations in every run
        pytest.param(*case, marks=() if sum(places) % 3 == 0 else pytest.mark.slow)
        for places, case in zip(
            product(range(len(CURVES)), range(len(ACCEPTS)), range(len(NUM_STEPS))),
            product(CURVES, ACCEPTS, NUM_STEPS),
            strict=True,
        )
    ],
)
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
def test_the_loss_is_bounded_whatever_a_step_takes_and_acceptance_does(
    jumps: list[float], rates: list[float], period: int, num_requests: int, max_tokens: int, finds: float, seed: int
):
    """Any rising curve, and acceptance that changes without warning."""
    sizes = list(range(1, 401, 10))
    table = StepCost(sizes, [0.005 + sum(jumps[: index + 1]) for index in range(len(sizes))])
    curve = [table.seconds(size) for size in range(1, 402)]
    machine = SpeculativeMachine(
        step_s=lambda num_tokens: curve[num_tokens - 1],
        accepts=lambda arrival, step, position: rates[(arrival + step // period) % 4],
        finds=finds,
        lag=0,
    )
    run = machine.run(Control(max_tokens, table), lambda step: num_requests, 600, seed=seed)
    assert run.speedup >= 0.95


def test_lengths_fall_to_zero_under_load_and_return_at_once():
    assert mean(back_from_load()) >= 0.7


def back_from_load() -> list[float]:
    """Return, for each wave of load, the lengths right after it as a part of those before it."""
    machine = SpeculativeMachine(step_s=CURVES["bent"], accepts=ACCEPTS["0.8"], noise=0.03, life=10_000)
    run = machine.run(Control(8, machine.table(SIZES)), lambda step: 64 if step // 200 % 2 else 1, 2000)
    parts: list[float] = []
    for start in range(200, 2000, 400):
        before, under = run.mean_length[start - 50 : start], run.mean_length[start + 10 : start + 200]
        assert sum(under) <= 0.02 * len(under) * max(before)
        assert sum(run.plain_s[start : start + 200]) >= 0.98 * sum(run.taken_s[start : start + 200])
        after = run.mean_length[start + 205 : start + 225]
        if after:
            parts.append(sum(after) / 20 / (sum(before) / 50))
    assert parts
    return parts


def test_lengths_follow_a_load_that_rises_and_falls_slowly_without_oscillating():
    machine = SpeculativeMachine(step_s=CURVES["bent"], accepts=ACCEPTS["0.8"], noise=0.03, life=10_000)
    run = machine.run(Control(8, machine.table(SIZES)), lambda step: 1 + abs(step // 20 % 40 - 20), 3200)
    by_load: dict[int, list[float]] = {}
    for step, length in enumerate(run.mean_length):
        if step >= 800 and step % 20 >= 5 and run.reasons[step] != "rest":
            by_load.setdefault(1 + abs(step // 20 % 40 - 20), []).append(length)
    means = [sum(lengths) / len(lengths) for _, lengths in sorted(by_load.items())]
    assert means[-1] < 0.3 < 4 < means[0]
    assert all(right <= left + 0.5 for left, right in pairwise(means))


@pytest.mark.parametrize("curve", ["bent", "affine", "steps"])
def test_lengths_follow_a_change_of_acceptance(curve: str):
    fallen, risen = after_changes(curve)
    assert fallen <= 0.25
    assert risen >= 0.75


def after_changes(curve: str) -> tuple[float, float]:
    """Return the lengths 40 steps after acceptance fell, and 700 after it rose, as parts of those before."""
    machine = SpeculativeMachine(
        step_s=CURVES[curve],
        accepts=lambda arrival, step, position: 0.0 if 600 <= step < 1200 else 0.9,
        noise=0.03,
        life=10_000,
    )
    run = make_run(machine, Control(8, machine.table(SIZES)), 4, 2100)
    before = sum(run.mean_length[500:600]) / 100
    fallen = sum(run.mean_length[640:1200]) / 560
    risen = sum(run.mean_length[1900:2100]) / 200
    return fallen / before, risen / before


def make_run(machine: SpeculativeMachine, control: Control, num_requests: int, num_steps: int = 1500) -> SpeculativeRun:
    return machine.run(control, lambda step: num_requests, num_steps)


def test_an_unpredictable_request_stops_and_leaves_the_room_to_the_others():
    machine = SpeculativeMachine(step_s=CURVES["affine"], accepts=ACCEPTS["mixed"], noise=0.03, life=10_000)
    run = make_run(machine, Control(8, machine.table(SIZES)), 4, 400)
    unpredictable = [lengths[0] + lengths[2] for lengths in run.lengths[20:]]
    predictable = [lengths[1] + lengths[3] for lengths in run.lengths[20:]]
    assert sum(unpredictable) < 0.1 * sum(predictable)
    assert sum(predictable) / len(predictable) > 2 * 1.5


def test_a_higher_priority_gets_more_of_the_room():
    machine = SpeculativeMachine(step_s=CURVES["bent"], accepts=ACCEPTS["0.8"], noise=0.03, life=10_000)
    control = Control(8, machine.table(SIZES))
    run = machine.run(control, lambda step: 6, 600, priority=lambda arrival: 3 * (arrival % 2))
    low, high = (sum(sum(lengths[first::2]) for lengths in run.lengths) for first in (0, 1))
    assert high > 1.3 * low
    assert run.speedup > 0.9 * machine.best_fixed(8, 6, 600)


@pytest.mark.parametrize("num_requests", [1, 8])
@pytest.mark.parametrize("finds", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("curve", CURVES)
def test_a_lookup_that_often_finds_nothing_is_near_the_best_fixed_length(curve: str, finds: float, num_requests: int):
    machine = SpeculativeMachine(step_s=CURVES[curve], accepts=ACCEPTS["0.8"], finds=finds, noise=0.03)
    run = make_run(machine, Control(8, machine.table(SIZES)), num_requests)
    assert run.speedup >= 0.98
    assert run.speedup >= 0.92 * machine.best_fixed(8, num_requests, 100)


@pytest.mark.parametrize("num_requests", [1, 4, 16])
@pytest.mark.parametrize("pass_s", [0.0005, 0.002, 0.02])
@pytest.mark.parametrize("knows", [True, False])
def test_the_cost_of_drafting_counts(pass_s: float, num_requests: int, knows: bool):
    machine = SpeculativeMachine(
        step_s=CURVES["bent"], accepts=ACCEPTS["0.8"], draft_s=lambda passes, tokens: pass_s * passes, noise=0.03
    )
    speedups: list[float] = []
    for seed in range(3):
        control = Control(8, machine.table(SIZES), draft_cost=DraftCost(per_pass_s=pass_s) if knows else None)
        speedups.append(machine.run(control, lambda step: num_requests, 6000, seed=seed).speedup)
    assert min(speedups) >= 0.98
    assert mean(speedups) >= 0.92 * machine.best_fixed(8, num_requests, 100)


@pytest.mark.parametrize("num_requests", [1, 4, 64])
@pytest.mark.parametrize("num_steps", [0.5, 3.0, 10.0])
def test_what_drafters_have_left_out_is_paid_for(num_steps: float, num_requests: int):
    """After each rest a drafter first takes as long as `num_steps` plain steps, and nothing is accepted."""
    assert waking(num_steps, num_requests) >= 0.97


def waking(num_steps: float, num_requests: int) -> float:
    """Return the speedup of short requests if drafts never help and a rest makes them expensive."""
    step_s = CURVES["bent"]
    machine = SpeculativeMachine(
        step_s=step_s,
        accepts=ACCEPTS["never"],
        draft_s=lambda passes, tokens: 1e-4 * passes,
        wake_s=num_steps * step_s(num_requests),
        noise=0.03,
        life=17,
    )
    control = Control(5, machine.table(SIZES), draft_cost=DraftCost(per_pass_s=1e-4))
    return make_run(machine, control, num_requests, 6000).speedup


@pytest.mark.parametrize("num_requests", [1, 4, 16, 64])
@pytest.mark.parametrize("short_s", [2e-3, 6e-3])
def test_a_drafter_that_follows_the_text_in_vain_is_let_rest(short_s: float, num_requests: int):
    assert following(short_s, num_requests, "never").speedup >= 0.98


def test_a_drafter_that_was_let_rest_is_tried_again():
    """Acceptance changes every 12 seconds."""
    run = following(6e-3, 1, "slowly changing", num_steps=12_000)
    for change in (4000, 8000):
        good, bad = slice(change + 1000, change + 2000), slice(change + 3000, change + 4000)
        assert mean(run.mean_length[good]) > 4
        assert mean(run.mean_length[bad]) < 0.5
        assert mean(run.is_far[bad]) > 0.6


def following(short_s: float, num_requests: int, accepts: str, *, num_steps: int = 4000) -> SpeculativeRun:
    """Return a run with a drafter that takes a twentieth of a step while it follows the text, and a tenth to draft."""
    plain_s = short_s + 2e-5 * num_requests
    machine = SpeculativeMachine(
        step_s=lambda num_tokens: short_s + 2e-5 * num_tokens, accepts=ACCEPTS[accepts],
        draft_s=lambda passes, tokens: 0.1 * passes * plain_s, wake_s=0.5 * plain_s, follow_s=0.05 * plain_s,
        noise=0.05, life=17,
    )  # fmt: skip
    return make_run(machine, Control(5, machine.table(SIZES)), num_requests, num_steps)


@pytest.mark.parametrize("num_requests", [1, 16])
@pytest.mark.parametrize("curve", CURVES)
def test_a_wrong_table_is_corrected(curve: str, num_requests: int):
    assert corrected(curve, num_requests) >= 0.98


def corrected(curve: str, num_requests: int) -> float:
    """Return the speedup with a table by which tokens cost nothing, when its first 1,000 steps have corrected it."""
    machine = SpeculativeMachine(step_s=CURVES[curve], accepts=ACCEPTS["0.4"], noise=0.03)
    run = make_run(machine, Control(8, StepCost([1, 600], [0.01, 0.01])), num_requests, 3000)
    return sum(run.plain_s[1000:]) / sum(run.taken_s[1000:])


def test_it_works_without_measured_durations():
    machine = SpeculativeMachine(step_s=CURVES["steps"], accepts=ACCEPTS["mixed"], is_measured=False, life=150)
    run = make_run(machine, Control(8, machine.table(SIZES)), 8)
    assert run.speedup >= 0.94 * machine.best_fixed(8, 8, 100)


@pytest.mark.parametrize(
    "seed", [seed if seed < 10 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(40)]
)
def test_it_conforms(seed: int):
    rng = Random(seed)
    table = StepCost([1, 8, 9, 64], [0.01, 0.011, 0.014, 0.05])
    check_drafting(
        lambda: Control(
            rng.randint(1, 8),
            table if rng.random() < 0.9 else None,
            mode=rng.choice(("adaptive", "adaptive", "fixed")),
            computes_padding=rng.random() < 0.5,
        ),
        rng,
    )


@pytest.mark.parametrize("num_requests", [1, 4, 16])
def test_short_steps_are_decided_together(num_requests: int):
    """Where a step takes 0.2 ms, few steps are decided one by one, and requests that come and go change nothing."""
    machine = SpeculativeMachine(
        step_s=lambda num_tokens: 1e-4 + 2e-6 * num_tokens,
        accepts=ACCEPTS["0.8"],
        draft_s=lambda passes, tokens: 5e-6 * passes,
        noise=0.03,
        life=5,
    )
    counted = Counted(5, machine.table(SIZES), draft_cost=DraftCost(per_pass_s=5e-6))
    run = make_run(machine, counted, num_requests, 4000)
    assert run.reasons.count("gain") > 3000
    assert counted.num_decided < 0.15 * 4000
    assert run.speedup > 1.2


@pytest.mark.parametrize("num_requests", [1, 16, 64])
def test_short_steps_that_gain_nothing_rest(num_requests: int):
    machine = SpeculativeMachine(
        step_s=lambda num_tokens: 1e-4 + 1e-5 * num_tokens, accepts=ACCEPTS["0.4"], noise=0.03, life=17
    )
    counted = Counted(5, machine.table(SIZES))
    run = make_run(machine, counted, num_requests, 6000)
    assert counted.num_decided < 0.1 * 6000
    assert run.speedup >= 0.98


class Counted(Control):
    """Counts its decisions."""

    __slots__ = ("num_decided",)

    def _best(self, *arguments: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.num_decided = getattr(self, "num_decided", 0) + 1
        return super()._best(*arguments)


def short_steps(num_requests: int, accepts: float, *, host_s: float = 0.0) -> SpeculativeRun:
    """Return a run of short steps, in which the host adds `host_s` while drafters follow the text."""
    machine = SpeculativeMachine(
        step_s=lambda num_tokens: 1e-4 + 2e-5 * num_tokens,
        accepts=lambda arrival, step, position: accepts,
        draft_s=lambda passes, tokens: 2e-5 * passes,
        wake_s=1e-3,
        host_s=host_s,
        noise=0.1,
        life=17,
    )
    table = machine.table([1, 2, 4, 8, 16, 32, 64, 128, 400])
    return make_run(machine, Control(5, table, draft_cost=DraftCost(per_pass_s=2e-5)),
                    num_requests, 20_000)  # fmt: skip


@pytest.mark.parametrize("num_requests", [1, 4, 16, 64])
@pytest.mark.parametrize("accepts", [0.0, 0.3, 0.5])
def test_what_no_estimate_knows_of_is_lost_for_a_short_time(accepts: float, num_requests: int):
    run = short_steps(num_requests, accepts, host_s=3e-5)
    assert run.speedup >= 0.93
    half = len(run.taken_s) // 2
    assert sum(run.plain_s[half:]) / sum(run.taken_s[half:]) >= 0.98


@pytest.mark.parametrize("num_requests", [1, 4])
def test_periods_of_rest_cost_little_where_drafts_gain(num_requests: int, monkeypatch: pytest.MonkeyPatch):
    run = short_steps(num_requests, 0.85)
    with monkeypatch.context() as always:
        always.setattr(Comparison, "is_resting", NEVER)
        assert run.speedup >= 0.97 * short_steps(num_requests, 0.85).speedup > 1.0


def test_the_checks_notice_faults(monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as faulty:
        faulty.setattr(Comparison, "is_resting", NEVER)
        assert short_steps(1, 0.5, host_s=3e-5).speedup < 0.96


@pytest.mark.parametrize("num_requests", [4, 16, 64])
def test_decisions_take_a_part_of_the_time_whatever_the_load_does(num_requests: int):
    """Lengths that change with every request would be decided anew in each step."""
    machine = SpeculativeMachine(
        step_s=lambda num_tokens: 3e-4 + 2e-6 * num_tokens, accepts=ACCEPTS["mixed"], finds=0.5, noise=0.3, life=9
    )
    num_gains, speedups = 0, list[float]()
    for seed in range(3):
        counted = Counted(5, machine.table(SIZES))
        rng = Random(seed)
        loads = [rng.randint(max(1, num_requests // 2), num_requests) for _ in range(4000)]
        run = machine.run(counted, loads.__getitem__, 4000, seed=seed)
        assert counted.num_decided < 0.15 * 4000
        num_gains += run.reasons.count("gain")
        speedups.append(run.speedup)
    assert num_gains > 3 * 2000
    assert mean(speedups) >= 1.05
