"""Long prompts of low priority do not keep a short one of high priority waiting for more than one step.

It arrives while a step is in flight or has just ended. All of it is computed in the step that is planned next; where
all places or all memory are taken and it may preempt, in the one after that. If a target for the time of a step leaves
less room than it needs, it gets all of that room, step after step.
"""

from typing import Any, get_args

import pytest

from echo_bench import PAGE, EchoBench, submit
from pagewood.engine.api import SchedulePreset
from pagewood.engine.testing import seconds_by
from pagewood.schedpolicy import ORDERS, StepModel

MAX_LENGTH = 600
CHUNK = 32
SHORT = [7, 8, 9] * 8
"""Fits one step; more than the eighth of one that is left to waiting requests in any case."""
LONG, OTHERS = 0, 2
"""Priorities; some of the long ones have the one, some the other."""
URGENT = 10
POLICIES = [order for order in ORDERS if order != "priority-low"]
BLIND = ("edf", "fair", "wrr")
"""Orders that read no priority."""
OVERLAPS = pytest.mark.parametrize("overlap", [False, True])
PRESETS = pytest.mark.parametrize("preset", get_args(SchedulePreset))
OPTIONS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "aligned": {"chunk_align": 4},
    "one prompt a step": {"max_prefills": 1},
    "two prompts a step": {"max_prefills": 2},
    "joint": {"joint_prefill_tokens": 8},
}
MODEL = StepModel(base_s=0.01, prefill_s=0.001, decode_s=0.001, kv_s=0.0)
WITH_OPTIONS = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def beside_long_ones(*, num_long: int, num_waiting: int = 0, **options: Any) -> EchoBench:
    """Return a bench that computes long prompts, beside two requests that decode."""
    options = {"max_running": 16, "num_pages": 4000, **options}
    bench = EchoBench(max_length=MAX_LENGTH, chunked_prefill_size=CHUNK, **options)
    for number in range(2):
        bench.step(submit(f"decodes {number}", [30 + number] * 4, max_tokens=500))
    bench.until(lambda: bench.tokens("decodes 0") and bench.tokens("decodes 1"))
    for number in range(num_long):
        priority = LONG if number % 2 else OTHERS
        bench.step(submit(f"long {number}", [10 + number] * 500, priority=priority, max_tokens=90))
        bench.steps(3)
    bench.step(*(submit(f"waits {number}", [40] + [number] * 300, priority=LONG) for number in range(num_waiting)))
    bench.steps(2)
    assert any(one.num_launched < one.num_prompt for one in bench.state.running)
    return bench


def num_steps_without(bench: EchoBench, **fields: Any) -> int:
    """Submit the short request; return how many steps are planned before the one that computes all of it."""
    bench.step(submit("short", SHORT, priority=URGENT, max_tokens=4, **fields))
    request, num_steps = bench.state.by_id["short"], 0
    while request.num_launched < len(SHORT):
        assert request.num_launched == 0, "it is computed in parts"
        num_steps += 1
        assert num_steps < 50
        bench.step()
    return num_steps


@OVERLAPS
@PRESETS
@WITH_OPTIONS
@pytest.mark.parametrize("num_long", [1, 3])
def test_a_short_prompt_of_high_priority_is_computed_in_the_next_step(
    overlap: bool, preset: SchedulePreset, options: dict[str, Any], num_long: int
) -> None:
    bench = beside_long_ones(num_long=num_long, overlap=overlap, schedule_preset=preset, **options)
    assert num_steps_without(bench) == 0
    bench.until(lambda: bench.finish("short"))


@OVERLAPS
@PRESETS
@pytest.mark.parametrize("policy", POLICIES)
def test_it_is_so_in_every_order(overlap: bool, preset: SchedulePreset, policy: str) -> None:
    num_waiting = 0 if policy in BLIND else 3
    bench = beside_long_ones(
        num_long=2, num_waiting=num_waiting, overlap=overlap, schedule_preset=preset, schedule_policy=policy
    )
    assert num_steps_without(bench) == 0


@OVERLAPS
@PRESETS
@WITH_OPTIONS
@pytest.mark.parametrize("num_waiting", [0, 3])
def test_it_takes_a_place_after_one_step_where_all_are_taken(
    overlap: bool, preset: SchedulePreset, options: dict[str, Any], num_waiting: int
) -> None:
    num_long = min(2, options.get("max_prefills", 2))
    options = {"max_running": 2 + num_long, "preemption_threshold": 5, "overlap": overlap, **options}
    bench = beside_long_ones(num_long=num_long, num_waiting=num_waiting, schedule_preset=preset, **options)
    assert len(bench.state.running) == 2 + num_long
    assert num_steps_without(bench) == 1
    assert bench.engine.counters().num_preempted == 1


@OVERLAPS
@PRESETS
def test_it_takes_the_place_of_one_that_decodes_as_soon(overlap: bool, preset: SchedulePreset) -> None:
    bench = EchoBench(
        max_running=2, preemption_threshold=5, overlap=overlap, schedule_preset=preset, num_pages=400,
        max_length=MAX_LENGTH,
    )  # fmt: skip
    for number in range(2):
        bench.step(submit(f"decodes {number}", [30 + number] * 4, max_tokens=500))
    bench.until(lambda: bench.tokens("decodes 0") and bench.tokens("decodes 1"))
    assert num_steps_without(bench) == 1


@OVERLAPS
@PRESETS
def test_a_short_prompt_of_the_same_priority_shares_the_step(overlap: bool, preset: SchedulePreset) -> None:
    bench = beside_long_ones(num_long=1, overlap=overlap, schedule_preset=preset)
    bench.step(submit("equal", SHORT, priority=OTHERS))
    assert 0 < bench.state.by_id["equal"].num_launched < len(SHORT)


@OVERLAPS
@PRESETS
@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "aligned"])  # which cannot have a target
@pytest.mark.parametrize("num_room", [16, 20, 28])
def test_it_gets_all_that_a_target_leaves_for_prompts(
    overlap: bool, preset: SchedulePreset, name: str, num_room: int
) -> None:
    target_s = MODEL.step_s(num_prefill=num_room, num_decode=2, num_kv=0) + MODEL.prefill_s / 2
    bench = beside_long_ones(
        num_long=3, overlap=overlap, schedule_preset=preset, target_step_s=target_s, step_s=seconds_by(MODEL),
        **OPTIONS[name],
    )  # fmt: skip
    pacing = bench.engine._pacing  # pyright: ignore[reportPrivateUsage]
    assert pacing is not None
    bench.until(lambda: pacing.max_prefill_tokens(bench.state) == num_room)
    assert any(one.num_launched < one.num_prompt for one in bench.state.running)
    bench.step(submit("short", SHORT, priority=URGENT, max_tokens=4))
    request, num_launched = bench.state.by_id["short"], 0
    while num_launched < len(SHORT):
        num_launched = min(num_launched + num_room, len(SHORT))
        assert request.num_launched == num_launched
        bench.step()


@OVERLAPS
@PRESETS
@WITH_OPTIONS
@pytest.mark.parametrize("num_waiting", [0, 3])
@pytest.mark.parametrize("is_computed", [False, True])
def test_it_takes_memory_after_one_step_where_all_is_taken(
    overlap: bool, preset: SchedulePreset, options: dict[str, Any], num_waiting: int, is_computed: bool
) -> None:
    """A long prompt in progress will need the free pages, or it and the outputs have taken them."""
    num_pages = 150 if is_computed else 131 if preset == "prefill-first" else 137
    bench = beside_long_ones(
        num_long=1, num_waiting=num_waiting, num_pages=num_pages, schedule_conservativeness=1e-6,
        overlap=overlap, schedule_preset=preset, preemption_threshold=5, **options,
    )  # fmt: skip
    if is_computed:
        bench.until(lambda: PAGE * bench.kv.num_available < len(SHORT))
    assert len(bench.state.running) == 3
    assert num_steps_without(bench) == 1
    assert bench.engine.counters().num_preempted == 1
