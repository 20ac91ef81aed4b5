"""The loop of several steps: the same answers as in the other loops, fewer decisions, and faults that must be found.

The faults in `FAULTS` are seeded one at a time, and random scenarios find them:

    no pages for the steps after the first   the same requests decode on without a page for the next token
    past the limit                           they get positions that they may not have
    steps in flight lost                     an interrupt leaves the steps behind it unretired
"""

import random
from dataclasses import replace
from typing import Literal, get_args

import pytest

from pagewood.engine.api import EngineConfig, SamplingParams
from pagewood.engine.core import loop
from pagewood.engine.core.steps import plan
from scenarios.drawing import random_scenario, with_drafts, with_grammars, with_interruptions
from scenarios.faulty import random_faults
from scenarios.running import run_scenario
from scenarios.scenario import Arrival, Scenario
from seeded_faults import Edit, assert_found

Loop = Literal["plain", "overlapped", "several steps"]


def in_loop(scenario: Scenario, loop: Loop, *, num_steps: int = 4) -> Scenario:
    config = replace(
        scenario.config,
        overlap=loop == "overlapped",
        num_continuous_decode_steps=num_steps if loop == "several steps" else 1,
    )
    return replace(scenario, config=config)


def with_nothing(scenario: Scenario, _: random.Random) -> Scenario:
    return scenario


@pytest.mark.parametrize("loop", get_args(Loop))
def test_the_same_scenarios_have_the_same_answers_in_every_loop(loop: Loop) -> None:
    reports = [
        run_scenario(in_loop(make(random_scenario(random.Random(seed), overlap=False), random.Random(seed)), loop))
        for seed in range(10)
        for make in (with_nothing, with_drafts, with_grammars, with_interruptions)
    ]
    assert sum(report.num_preempted for report in reports) > 5
    assert sum(report.num_aborted for report in reports) > 10
    assert (sum(report.num_launched_ahead for report in reports) > 0) == (loop != "plain")


def steady(*, num_output: int, num_steps: int, stop: tuple[int, ...] = ()) -> Scenario:
    """Three requests that arrive together, and end together unless a stop token ends one."""
    arrivals = [
        Arrival(
            at_step=0,
            abort_at_step=None,
            prompt=(index + 1, 2, 3),
            sampling=SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True, stop_token_ids=stop),
            priority=0,
            namespace=None,
        )
        for index in range(3)
    ]
    return Scenario(
        config=EngineConfig(page_size=4, max_running=3, num_continuous_decode_steps=num_steps),
        num_pages=64,
        max_length=64,
        arrivals=tuple(arrivals),
        eager_steps=frozenset(),
    )


@pytest.mark.parametrize(("num_steps", "num_ahead"), [(2, 9), (4, 14), (100, 18)])
def test_all_steps_of_a_decision_but_the_first_are_launched_ahead(num_steps: int, num_ahead: int) -> None:
    report = run_scenario(steady(num_output=20, num_steps=num_steps))
    # The step of the prompts is one decision, and the 19 that decode are as many as num_steps allows.
    assert (report.num_steps, report.num_launched_ahead) == (20, num_ahead)


@pytest.mark.parametrize(("stop", "is_one_step"), [(tuple(range(40)), True), ((7, 8, 9), False)])
def test_only_steps_behind_an_end_are_computed_for_nothing(stop: tuple[int, ...], is_one_step: bool) -> None:
    plain, several = (
        run_scenario(in_loop(steady(num_output=40, num_steps=8, stop=stop), one)) for one in ("plain", "several steps")
    )
    assert is_one_step == (plain.num_steps == 1)  # the step of the prompts is a decision of its own
    assert plain.num_steps + (not is_one_step) <= several.num_steps < plain.num_steps + 4


FAULTS: dict[str, list[Edit]] = {
    "no pages for the steps after the first": [
        (plan.Planner, "plan_again", "if not self._kv.add_page_to_each(full):", "if False:")
    ],
    "past the limit": [(plan.Planner, "_next_decodes", "end < request.max_length", "True")],
    "steps in flight lost": [(loop.Engine, "step_several", "interrupts.append(error)", "raise")],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_several_steps_is_found(fault: str) -> None:
    def search(seed: int) -> None:
        rng = random.Random(seed)
        scenario = replace(random_scenario(rng, overlap=False), faults=random_faults(rng))
        run_scenario(in_loop(scenario, "several steps"))

    assert_found(FAULTS[fault], search, range(300))


def test_the_device_chooses_the_loop_unless_it_is_configured() -> None:
    assert EngineConfig().resolved().overlap is True
    assert EngineConfig(overlap=False).resolved().overlap is False


def test_a_wrong_number_of_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="num_continuous_decode_steps must be >= 1, got 0"):
        EngineConfig(num_continuous_decode_steps=0)
